"""A tiny language model under transformers' Trainer: ours on ranks of the pool, the
stock one in the pytest process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from accelerate_smp.handle import parallel_of
from accelerate_smp.trainer import SmpTrainerMixin
from smp_core.checkpoint import full_state_dict

SAMPLES, LENGTH, VOCABULARY = 48, 9, 61


def make_model(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=24,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def make_dataset(
    samples: int = SAMPLES, seed: int = 3
) -> list[dict[str, torch.Tensor]]:
    """Sequences with some labels left out, so that ranks hold different numbers of
    tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)
    dataset = []
    for number, sequence in enumerate(tokens):
        labels = sequence.clone()
        labels[: number % 4] = -100
        dataset.append({"input_ids": sequence, "labels": labels})
    return dataset


@dataclass
class Run:
    """What a Trainer run showed."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.run = Run()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any
    ) -> None:
        if "grad_norm" in logs:
            self.run.losses.append(float(logs["loss"]))
            self.run.norms.append(float(logs["grad_norm"]))


def make_trainer(
    folder: Path | str,
    batch: int,
    micro_batches: int,
    knobs: dict[str, Any] | None = None,
    **flags: Any,
) -> tuple[Trainer, Recorder]:
    """On ranks: SmpTrainer with ``batch`` samples per step and micro-batch over all
    ranks; alone: the stock Trainer."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    model, kind = flags.pop("model", None), flags.pop("kind", Trainer)
    arguments = TrainingArguments(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": batch // ranks,
            "per_device_eval_batch_size": 4,
            "gradient_accumulation_steps": micro_batches,
            "max_grad_norm": 0.5,
            "learning_rate": 3e-3,
            "num_train_epochs": 1,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": ranks == 1,
            **flags,
        }
    )
    recorder = Recorder()
    options = {
        "model": model or make_model(dist.get_rank() if dist.is_initialized() else 0),
        "args": arguments,
        "train_dataset": make_dataset(),
        # Whole batches on every rank: of a ragged last batch Trainer repeats samples
        # before it takes the mean.
        "eval_dataset": make_dataset(32, seed=5),
        "callbacks": [recorder],
    }
    if knobs is not None:
        kind = type("SmpKind", (SmpTrainerMixin, kind), {})
    return kind(
        **options, **({"smp_config": knobs} if knobs is not None else {})
    ), recorder


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    handle = parallel_of(model)
    if handle is not None and handle.pipeline is not None:
        return full_state_dict(
            model.state_dict(), rank0_only=False, stages=handle.stage_group
        )
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value)
        .detach()
        .clone()
        for name, value in model.state_dict().items()
    }


def fit(
    folder: Path | str,
    batch: int,
    micro_batches: int,
    knobs: dict[str, Any] | None = None,
    **flags: Any,
) -> Run:
    resume = flags.pop("resume", None)
    trainer, recorder = make_trainer(folder, batch, micro_batches, knobs, **flags)
    trainer.train(resume_from_checkpoint=resume)
    recorder.run.weights = whole_weights(trainer.model)
    return recorder.run


def assert_close(seen: Run, expected: Run, noise: float, first_step: int = 0) -> None:
    """float32: losses and norms to 1e-6 + 2e-7 per step; weights to 5x what one process
    differs from itself by when it adds up in another order."""
    assert len(seen.losses) == len(expected.losses) - first_step
    pairs = [
        ("loss", seen.losses, expected.losses),
        ("norm", seen.norms, expected.norms),
    ]
    for what, ours, theirs in pairs:
        for step, (a, b) in enumerate(
            zip(ours, theirs[first_step:], strict=True), first_step
        ):
            assert abs(a - b) <= 1e-6 + 2e-7 * step, (
                f"{what} of step {step}: {a} against {b}"
            )
    assert seen.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        worst = (seen.weights[name] - value).abs().max().item()
        assert worst <= 5 * noise, f"{name} is {worst} off, noise {noise}"


def noise_between(one: Run, other: Run) -> float:
    return max(
        (one.weights[name] - other.weights[name]).abs().max().item()
        for name in one.weights
    )


def life(
    folder: Path | str,
    batch: int,
    micro_batches: int,
    knobs: dict[str, Any] | None = None,
    **flags: Any,
) -> Run:
    """Evaluate, train with evaluation and saving, evaluate the best model, predict,
    save."""
    trainer, recorder = make_trainer(
        folder,
        batch,
        micro_batches,
        knobs,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        **flags,
    )
    run = recorder.run
    run.extra["before"] = trainer.evaluate()["eval_loss"]
    trainer.train()
    run.extra["best"] = Path(trainer.state.best_model_checkpoint).name
    run.extra["after"] = trainer.evaluate()["eval_loss"]
    prediction = trainer.predict(trainer.eval_dataset[:22])
    run.extra["predicted"] = prediction.predictions.shape
    run.extra["logits"] = torch.as_tensor(prediction.predictions)
    trainer.save_model(str(Path(folder) / "final"))
    run.weights = whole_weights(trainer.model)
    return run


def seen_samples(
    folder: Path | str, batch: int, checkpoint: str | None
) -> list[list[int]]:
    """Train; the samples of each global batch, as the sums of their tokens, sorted."""
    trainer, _ = make_trainer(
        folder, batch, 1, {"checkpoint": {"allow_batch_change": True}}
    )
    seen: list[list[int]] = []
    compute_loss = trainer.compute_loss

    def watched(
        model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        sums = inputs["input_ids"].sum(1)
        seen.append(sorted(trainer.accelerator.gather(sums).tolist()))
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = watched
    trainer.train(resume_from_checkpoint=checkpoint)
    return seen

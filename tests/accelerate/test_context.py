"""Sequences over context ranks under Accelerate and Trainer: what one process trains,
evaluates and predicts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.parallelism_config import ParallelismConfig
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from accelerate_smp.callbacks import SmpMonitorCallback
from accelerate_smp.trainer import SmpTrainer
from tests.accelerate.context_rows import BATCH, LENGTH, STEPS, VOCABULARY, make_rows
from tests.accelerate.running import fresh_accelerator
from tests.accelerate.trainers import Recorder, Run, whole_weights
from tests.harness import run_ranks
from tests.older_transformers import needs_counted_smoothing

# A multiple of 2 x 2 and of 2 x 4 ranks.
PADDED_LENGTH = 24
# The FLOPs that the monitor is given for a sample.
FLOPS = 1000.0


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(5)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


def run_trainer(
    folder: Path, micro_batches: int, knobs: dict[str, Any] | None = None, **flags: Any
) -> Run:
    """Evaluate, train for `STEPS` steps, evaluate, predict with labels and without."""
    names = ("context_parallel_degree", "pipeline_parallel_degree")
    sharing = math.prod((knobs or {}).get(name, 1) for name in names)
    data_ranks = dist.get_world_size() // sharing if dist.is_initialized() else 1
    function = flags.pop("compute_loss_func", None)
    arguments = TrainingArguments(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": BATCH // data_ranks,
            "per_device_eval_batch_size": BATCH // data_ranks,
            "gradient_accumulation_steps": micro_batches,
            "max_steps": STEPS,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": data_ranks * sharing == 1,
            **flags,
        }
    )
    recorder = Recorder()
    monitor = SmpMonitorCallback(flops_per_sample=FLOPS)
    options: dict[str, Any] = {"compute_loss_func": function}
    if knobs is not None:
        options["smp_config"] = knobs
    trainer = (Trainer if knobs is None else SmpTrainer)(
        model=make_model(),
        args=arguments,
        train_dataset=make_rows(STEPS * BATCH * micro_batches // 2, 1),
        eval_dataset=make_rows(4 * BATCH, 2),
        callbacks=[recorder] if knobs is None else [recorder, monitor],
        **options,
    )
    if (
        knobs is None
        and trainer._get_num_items_in_batch(
            [{"labels": torch.zeros(1, 2)}], arguments.device
        )
        == 2
    ):
        for row in (*trainer.train_dataset, *trainer.eval_dataset):
            # No token predicts it: Transformers 4 counts it all the same, and we do
            # not.
            row["labels"][0] = -100
    run = recorder.run
    run.extra["before"] = trainer.evaluate()["eval_loss"]
    trainer.train()
    run.extra["figures"] = dict(monitor.latest)
    run.extra["after"] = trainer.evaluate()["eval_loss"]
    # Not a multiple of the batch, on any number of ranks.
    for name, keys in (
        ("labelled", ("input_ids", "labels")),
        ("unlabelled", ("input_ids",)),
    ):
        rows = [
            {key: row[key] for key in keys} for row in make_rows(7, 3, packed=False)
        ]
        prediction = trainer.predict(rows)
        run.extra[name] = torch.as_tensor(prediction.predictions)
    run.extra["label_ids"] = torch.as_tensor(
        trainer.predict(make_rows(7, 3, packed=False)).label_ids
    )
    run.weights = whole_weights(trainer.model)
    return run


KEPT = {"keep_between_micro_batches": "parameters"}
STAGES = {"pipeline_parallel_degree": 2, "pipeline": {"microbatches": 2}}
CASES = [
    pytest.param(*case, marks=() if case[3] is STAGES else pytest.mark.slow)
    for case in (
        ("auto", 2, 2, {}),
        (2, 2, 2, STAGES),
        (2, 2, 2, {}),
        (4, 2, 1, {}),
        (4, 4, 1, {}),
        (2, 2, 1, {}),
        (4, 2, 2, KEPT),
    )
]


@pytest.mark.parametrize(("shard", "context", "micro_batches", "more"), CASES)
def test_steps_of_trainer_equal_one_process(
    tmp_path: Path,
    shard: int | str,
    context: int,
    micro_batches: int,
    more: dict[str, Any],
) -> None:
    """float32: losses and norms to 1e-6 + 2e-7 per step (summation order), evaluation
    likewise; logits, which grow with weights that Adam moves by its own noise, to 2e-4.
    Every prediction is there, in order, of whole sequences. The monitor counts a shared
    sample once, with its tokens (padding included) and FLOPs."""
    expected = run_trainer(tmp_path / "alone", micro_batches)
    knobs = {"shard_degree": shard, "context_parallel_degree": context, **more}
    for seen in run_ranks(
        run_trainer, 4, tmp_path / "ranks", micro_batches, knobs, ranks_per_node=2
    ):
        assert len(seen.losses) == len(expected.losses) == STEPS
        for what, ours, theirs in (
            ("loss", seen.losses, expected.losses),
            ("norm", seen.norms, expected.norms),
        ):
            for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                assert abs(a - b) <= 1e-6 + 2e-7 * step, (
                    f"{what} of step {step}: {a} against {b}"
                )
        assert seen.extra["before"] == pytest.approx(expected.extra["before"], abs=1e-6)
        assert seen.extra["after"] == pytest.approx(expected.extra["after"], abs=5e-6)
        for name in ("labelled", "unlabelled"):
            assert seen.extra[name].shape == (7, LENGTH, VOCABULARY)
            torch.testing.assert_close(
                seen.extra[name], expected.extra[name], atol=2e-4, rtol=0
            )
        assert torch.equal(seen.extra["label_ids"], expected.extra["label_ids"])
        figures = seen.extra["figures"]
        # Rates share one clock, so their ratios are exact but for rounding.
        assert figures["tokens_per_second"] / figures[
            "samples_per_second"
        ] == pytest.approx(PADDED_LENGTH, rel=1e-9)
        flops_per_second = figures["tflops_per_device"] * 1e12 * 4
        assert flops_per_second / figures["samples_per_second"] == pytest.approx(
            FLOPS, rel=1e-9
        )


def token_losses(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None
) -> torch.Tensor:
    """A loss function as people write them for Trainer: cross entropy with a penalty on
    large logits."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    penalty = logits.logsumexp(-1).square().masked_fill(targets == -100, 0).sum()
    return (
        F.cross_entropy(logits, targets, reduction="sum") + 1e-2 * penalty
    ) / num_items_in_batch


LOSSES: dict[str, dict[str, Any]] = {
    "label_smoothing_factor": {"label_smoothing_factor": 0.2},
    "label_smoothing_factor, chunks": {"label_smoothing_factor": 0.2},
    "compute_loss_func": {"compute_loss_func": token_losses},
    "chunks, whole sequences": {},
}


def short_runs(folder: Path, on_ranks: bool) -> list[Run]:
    """Evaluate, take three steps, evaluate and predict, with each of the losses."""
    found = []
    for name, options in LOSSES.items():
        knobs: dict[str, Any] = {
            "shard_degree": 2,
            "context_parallel_degree": 1 if "whole" in name else 2,
        }
        if "chunks" in name:
            knobs["chunked_cross_entropy"] = 4
        found.append(
            run_trainer(
                folder,
                2,
                knobs if on_ranks else None,
                max_steps=3,
                logging_steps=1,
                **options,
            )
        )
    return found


@pytest.mark.slow
@needs_counted_smoothing
def test_losses_of_the_trainers_own_and_of_ones_own_equal_one_process(
    tmp_path: Path,
) -> None:
    """float32, as above. Logits are there for predictions, in chunks or not."""
    expected = short_runs(tmp_path / "alone", False)
    assert len({run.losses[0] for run in expected}) == 3, (
        "smoothing and the function make a difference"
    )
    for runs in run_ranks(short_runs, 4, tmp_path / "ranks", True, ranks_per_node=2):
        for name, seen, wanted in zip(LOSSES, runs, expected, strict=True):
            for step, (ours, theirs) in enumerate(
                zip(seen.losses, wanted.losses, strict=True)
            ):
                assert abs(ours - theirs) <= 1e-6 + 2e-7 * step, (
                    f"{name}, step {step}: {ours} against {theirs}"
                )
            assert seen.norms == pytest.approx(wanted.norms, abs=2e-6), name
            for when in ("before", "after"):
                assert seen.extra[when] == pytest.approx(
                    wanted.extra[when], abs=5e-6
                ), f"{name}, {when}"
            for predicted in ("labelled", "unlabelled"):
                torch.testing.assert_close(
                    seen.extra[predicted], wanted.extra[predicted], atol=2e-4, rtol=0
                )


def refusal(folder: Path) -> str:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = BertConfig(**sizes, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    knobs = {"shard_degree": 2, "context_parallel_degree": 2}
    trainer = SmpTrainer(
        BertForMaskedLM(config),
        arguments,
        train_dataset=make_rows(4, 1),
        smp_config=knobs,
    )
    with pytest.raises(ValueError) as refused:
        trainer.train()
    return str(refused.value)


def test_models_that_take_a_mean_over_their_own_targets_are_refused(
    tmp_path: Path,
) -> None:
    for message in run_ranks(refusal, 2, tmp_path):
        assert "BertForMaskedLM" in message and "context_parallel_degree" in message


class Stream(IterableDataset):
    def __iter__(self):  # type: ignore[no-untyped-def]
        yield from make_rows(3 * BATCH, 1)


class Listens(TrainerCallback):
    """Keeps the largest noise that embeddings get in training."""

    def __init__(self) -> None:
        self.largest = 0.0

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        embeddings = model.get_input_embeddings()

        def note(module: Any, tokens: Any, output: torch.Tensor) -> None:
            if module.training:
                clean = F.embedding(tokens[0], module.weight)
                self.largest = max(self.largest, float((output - clean).abs().max()))

        embeddings.register_forward_hook(note)


def largest_noise(folder: str, knobs: dict[str, Any]) -> float:
    listens = Listens()
    tokens = torch.arange(LENGTH).remainder(VOCABULARY)
    trainer = SmpTrainer(
        model=make_model(),
        args=TrainingArguments(
            output_dir=folder,
            max_steps=2,
            neftune_noise_alpha=8.0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[{"input_ids": tokens, "labels": tokens}] * 16,
        callbacks=[listens],
        smp_config=knobs,
    )
    trainer.train()
    assert trainer.neftune_noise_alpha == 8.0
    return listens.largest


def test_noise_of_embeddings_is_no_larger_over_parts_of_sequences(
    tmp_path: Path,
) -> None:
    """NEFTune draws it up to alpha / sqrt(tokens x features)."""
    bound = 8.0 / math.sqrt(LENGTH * 16)
    for largest in run_ranks(
        largest_noise, 2, str(tmp_path), {"context_parallel_degree": 2}
    ):
        assert 0.9 * bound < largest <= 1.001 * bound


def bare_loop(arguments: dict[str, Any] | None, stream: bool) -> dict[str, Any]:
    """A loop as Accelerate's documentation writes it; nothing in it knows of context
    ranks."""
    if arguments is None:
        from accelerate import Accelerator

        accelerator: Any = Accelerator(cpu=True)
    else:
        accelerator = fresh_accelerator(**arguments)
    data_ranks = getattr(accelerator, "data_size", accelerator.num_processes)
    model = make_model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data: Any = Stream() if stream else make_rows(3 * BATCH, 1)
    train, held_out = (
        DataLoader(data, batch_size=BATCH // data_ranks),
        DataLoader(make_rows(6, 2), BATCH // data_ranks),
    )
    model, optimizer, train, held_out = accelerator.prepare(
        model, optimizer, train, held_out
    )
    losses, seen = [], []
    step = getattr(accelerator, "pipeline_step", lambda function: function)(
        lambda batch: model(**batch).loss
    )
    for batch in train:
        loss = step(batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach().double(), "mean").item())
    model.eval()
    for batch in held_out:
        with torch.no_grad():
            logits = model(**batch).logits
        seen.append(accelerator.gather_for_metrics(logits))
    return {
        "losses": losses,
        "logits": torch.cat(seen),
        "weights": whole_weights(model),
    }


STAGED = {
    "shard_degree": 2,
    "context_parallel_degree": 2,
    "pipeline_parallel_degree": 2,
    "pipeline": {"microbatches": 1},
}


@pytest.mark.parametrize(
    ("stream", "staged"),
    [(False, False), pytest.param(True, False, marks=pytest.mark.slow), (True, True)],
)
def test_a_bare_loop_equals_one_process(stream: bool, staged: bool) -> None:
    """float64, but for the loss, which Transformers computes in float32. Under
    Accelerate's own name for the degree."""
    expected = bare_loop(None, stream)
    arguments = (
        STAGED
        if staged
        else {"parallelism_config": ParallelismConfig(dp_shard_size=2, cp_size=2)}
    )
    for seen in run_ranks(bare_loop, 4, arguments, stream, ranks_per_node=2):
        assert seen["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        assert (
            seen["logits"].shape == expected["logits"].shape == (6, LENGTH, VOCABULARY)
        )
        torch.testing.assert_close(
            seen["logits"], expected["logits"], atol=1e-5, rtol=0
        )
        for name, value in expected["weights"].items():
            assert (seen["weights"][name] - value).abs().max() <= 1e-5, name


def in_turn(loader: Any, shorter: Any) -> Iterator[Any]:
    """The batches of a loader that goes on when another one, begun after it, has
    ended."""
    others = iter(shorter)
    for batch in loader:
        next(others, None)
        yield batch


def losses_of_batches(how: str) -> list[float] | str:
    """The losses of three batches, read in different ways; or what is refused."""
    accelerator = fresh_accelerator(shard_degree=2, context_parallel_degree=2)
    model, loader = accelerator.prepare(
        make_model().double(), DataLoader(make_rows(3 * BATCH, 1), batch_size=BATCH)
    )

    def read_ahead() -> Iterator[Any]:
        batches = iter(loader)
        before = next(batches)
        for batch in batches:
            yield before
            before = batch
        yield before

    def around_evaluations() -> Iterator[Any]:
        for batch in loader:
            for other in evaluated:
                model(**other)
            yield batch

    evaluated = accelerator.prepare(
        DataLoader(make_rows(2 * BATCH, 2), batch_size=BATCH)
    )
    ways: dict[str, Any] = {
        "as it is": lambda: loader,
        "a list": lambda: list(loader),
        "ahead": read_ahead,
    }
    ways |= {
        "around evaluations": around_evaluations,
        "in turn": lambda: in_turn(loader, evaluated),
    }
    losses = []
    try:
        for batch in ways[how]():
            with torch.no_grad():
                losses.append(
                    accelerator.reduce(model(**batch).loss.double(), "mean").item()
                )
    except ValueError as error:
        return str(error)
    return losses


def test_a_batch_that_its_loader_has_left_behind_is_refused() -> None:
    """Its rank's part of a sequence alone would be attended over, without a word."""
    for how in ("a list", "ahead", "in turn"):
        for said in run_ranks(losses_of_batches, 2, how):
            assert (
                isinstance(said, str)
                and "no list(loader), and no reading ahead" in said
            )


def norm_of_a_step(evaluates: bool) -> float:
    """The gradients' norm, where an evaluation comes between a step's forward and its
    backward or none does."""
    accelerator = fresh_accelerator(
        shard_degree=2, context_parallel_degree=2, activations="full"
    )
    rows = (DataLoader(make_rows(BATCH, seed), batch_size=BATCH) for seed in (1, 2))
    model, loader, evaluated = accelerator.prepare(make_model().double(), *rows)
    for batch in loader:
        loss = model(**batch).loss
        for other in evaluated if evaluates else ():
            with torch.no_grad():
                model(**other)
        accelerator.backward(loss)
    return float(accelerator.clip_grad_norm_(model.parameters(), 1.0))


def test_an_evaluation_inside_of_a_step_leaves_its_batch_as_it_was() -> None:
    plain, *_ = run_ranks(losses_of_batches, 2, "as it is")
    assert len(plain) == 3
    assert run_ranks(losses_of_batches, 2, "around evaluations") == [plain] * 2
    assert run_ranks(norm_of_a_step, 2, True) == run_ranks(norm_of_a_step, 2, False)

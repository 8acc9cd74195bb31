"""Random programs of transformers' Trainer, played by SmpTrainer on ranks, by the stock
Trainer in one process that sees the same global batches, or by the stock Trainer on
ranks (DDP)."""

from __future__ import annotations

import contextlib
import gc
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from torch import nn
from transformers import (
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerState,
    TrainingArguments,
)

from accelerate_smp.trainer import SmpTrainer, SmpTrainerMixin
from tests.accelerate.program_parts import (
    CALLBACKS,
    FAMILIES,
    OVERRIDES,
    WORDS,
    Metrics,
    Recorder,
    Stream,
    as_arrow,
    filled,
    largest,
    make_model,
    make_rows,
    padding,
    per_item,
    with_lora,
)
from tests.accelerate.programs import Program, samples_ranks
from tests.accelerate.rare_parts import CALLBACKS as RARE, with_adapter
from tests.accelerate.trainers import whole_weights
from tests.core.tensor_parallel.model_cases import Wide, wide_when_computed_again


def reset() -> None:
    """Forget the states of Accelerate that are the process's."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    gc.collect()


class _Alone:
    """In front of the stock Trainer in one process: its last batch is filled as on
    several that read."""

    fills: bool

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super()._get_dataloader(*args, **kwargs)  # type: ignore[misc]
        is_training = kwargs.get("is_training", False)
        return filled(loader) if self.fills and is_training else loader


class _OnRanks:
    """In front of the stock Trainer on ranks: the loss of a training, to which it adds
    this rank's losses of the steps after the last logged one, is that of all."""

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "train_loss" in logs:
            mean = torch.tensor(logs["train_loss"], dtype=torch.float64)
            dist.all_reduce(mean)
            logs["train_loss"] = mean.item() / dist.get_world_size()
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        output = super().train(*args, **kwargs)  # type: ignore[misc]
        return output._replace(training_loss=output.metrics["train_loss"])


def trainer_class(program: Program, how: str, readers: int) -> type:
    """``how``: "smp", "stock" (on ranks) or "alone"; ``readers``: the ranks that read
    different samples."""
    bases: dict[str, tuple[type, ...]] = {
        "smp": (SmpTrainer,),
        "stock": (_OnRanks, Trainer),
        "alone": (_Alone, Trainer),
    }
    if "seq2seq" in program["extras"]:
        bases = {
            "smp": (SmpTrainerMixin, Seq2SeqTrainer),
            "stock": (_OnRanks, Seq2SeqTrainer),
            "alone": (_Alone, Seq2SeqTrainer),
        }
    kind = type("Program", bases[how], {"fills": how == "alone" and readers > 1})
    for name in program["overrides"]:
        kind = OVERRIDES[name](kind)
    return kind


def make_trainer(
    program: Program, folder: Path, how: str, knobs: dict[str, Any], world: int
) -> Trainer:
    """``how``: as of :func:`trainer_class`; ``world``: ours, also for the stock
    Trainer."""
    readers = samples_ranks({"knobs": knobs}, world)
    is_whole = how == "alone" or program["accelerator_config"].get(
        "split_batches", False
    )
    batch = program["batch"] if is_whole else program["batch"] // readers
    arguments = dict(program["arguments"])
    if program["data"] in ("group_by_length", "sequential", "batch_rebalance"):
        arguments["train_sampling_strategy"] = program["data"]
    make_arguments = TrainingArguments
    if "seq2seq" in program["extras"]:
        make_arguments = Seq2SeqTrainingArguments
        arguments |= {"predict_with_generate": True, "generation_max_length": 6}
    args = make_arguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=program["micro_batches"],
        accelerator_config=program["accelerator_config"],
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=program["data"] == "arrow",
        eval_use_gather_object="inputs by object" in program["extras"],
        **arguments,
    )
    rows = make_rows(
        program["model"], program["samples"], program["lengths"], program["seed"]
    )
    extra = 0
    if how == "alone" and 1 < readers < world and not args.dataloader_drop_last:
        # Ranks that share a batch read the stream, and fill its last one.
        extra = -len(rows) % program["batch"]
    evals = {}
    for name, samples in zip("ab", program["eval_samples"], strict=False):
        evaluated = make_rows(
            program["model"],
            samples,
            program["lengths"],
            program["seed"] + 100 + samples,
        )
        evals[name] = (
            Stream(evaluated) if program["eval_data"] == "stream" else evaluated
        )
    data: Any = Stream(rows, extra) if program["data"] == "stream" else rows
    if program["data"] == "arrow":
        data = as_arrow(rows)
    recorder = Recorder()
    tokens = torch.arange(3, 9).remainder(WORDS).view(2, 3)
    callbacks: list[Any] = [recorder]
    for name in program["callbacks"]:
        callbacks.append(
            EarlyStoppingCallback(1)
            if name == "early stopping"
            else {**CALLBACKS, **RARE}[name](recorder, tokens)
        )
    # The first rank's weights are everyone's. What Trainer calls again seeds the order
    # of samples too.
    is_apart = how == "smp" and "model init" not in program["extras"]
    seed = program["seed"] + (dist.get_rank() if is_apart else 0)
    options: dict[str, Any] = {"smp_config": knobs} if how == "smp" else {}

    def make() -> nn.Module:
        made = make_model(program["model"], seed)
        if program["model"] in FAMILIES:
            wide_when_computed_again(made)
        if "frozen" in program["extras"]:
            next(
                parameter for parameter in made.parameters() if parameter.ndim > 1
            ).requires_grad_(False)
        if "adapter" in program:
            return with_adapter(made, program["adapter"])
        return with_lora(made) if "lora" in program["extras"] else made

    model = None if "model init" in program["extras"] else make()
    if "given optimizer" in program["extras"]:
        assert model is not None
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=args.learning_rate, weight_decay=0.1
        )
        options["optimizers"] = (
            optimizer,
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        )
    if "loss function" in program["extras"]:
        options["compute_loss_func"] = per_item
    kind = trainer_class(program, how, readers)
    trainer = kind(
        model=model,
        model_init=None if model is not None else make,
        args=args,
        train_dataset=data,
        eval_dataset=evals["a"] if len(evals) == 1 else evals,
        data_collator=padding,
        callbacks=callbacks,
        compute_metrics=_metrics(program, args),
        preprocess_logits_for_metrics=largest if program["largest"] else None,
        **options,
    )
    trainer.recorder = recorder
    return trainer


def _metrics(program: Program, args: TrainingArguments) -> Any:
    if not program["metrics"]:
        return None
    metrics = Metrics(args.batch_eval_metrics)
    if args.batch_eval_metrics:
        return metrics
    return lambda prediction: metrics(prediction)


def play(
    program: Program, folder: Path, how: str, resume: bool = False
) -> dict[str, Any]:
    """Run the script of the program, or its resumption from a checkpoint in ``folder``;
    what a user sees of it."""
    knobs, world = program["knobs"], program["world"]
    if resume:
        knobs, world = program["resume"]["knobs"], program["resume"]["world"]
        program = {**program, "script": ["resume"]}
        program["arguments"] = {
            **program["arguments"],
            "ignore_data_skip": program["resume"]["ignore_data_skip"],
        }
    reset()
    trainer = make_trainer(program, folder, how, knobs, world)
    found: dict[str, Any] = {"calls": []}
    with Wide() if program["model"] in FAMILIES else contextlib.nullcontext():
        for number, call in enumerate(program["script"]):
            found["calls"].append(_call(trainer, program, call, folder))
            found[f"state {number}"] = _state(trainer.state)
    found["log"] = [_timeless(entry) for entry in trainer.state.log_history]
    found["events"] = trainer.recorder.events
    found["numbers"] = trainer.recorder.numbers
    found["weights"] = {
        name: value.clone() for name, value in whole_weights(trainer.model).items()
    }
    found["files"] = _files(trainer, program, folder)
    found["arguments"] = {"accumulation": trainer.args.gradient_accumulation_steps}
    return found


def _call(trainer: Trainer, program: Program, call: str, folder: Path) -> Any:
    """Make one call of the script; what it returns."""
    if call == "evaluate":
        return _timeless(trainer.evaluate())
    if call == "evaluate two":
        more = {
            name: make_rows(program["model"], 8, program["lengths"], seed)
            for name, seed in (("c", 5), ("d", 6))
        }
        return _timeless(trainer.evaluate(more, metric_key_prefix="own"))
    if call == "predict":
        samples = program["eval_samples"][0]
        rows = make_rows(
            program["model"], samples, program["lengths"], program["seed"] + 55
        )
        if "unlabelled" in program["extras"]:
            rows = [
                {name: value for name, value in row.items() if name != "labels"}
                for row in rows
            ]
        predicted = trainer.predict(
            Stream(rows) if program["eval_data"] == "stream" else rows
        )
        return [
            _tensors(predicted.predictions),
            _tensors(predicted.label_ids),
            _timeless(predicted.metrics),
        ]
    if call == "save":
        trainer.save_model(str(folder / "final"))
        return None
    checkpoint: Any = None
    if call == "resume" and program["resume"]["which"] == "newest":
        checkpoint = True
    elif call == "resume":
        saved = _checkpoints(folder)
        checkpoint = str(
            saved[
                {"first": 0, "middle": len(saved) // 2, "last": -1}[
                    program["resume"]["which"]
                ]
            ]
        )
    output = trainer.train(resume_from_checkpoint=checkpoint)
    return [
        output.global_step,
        {"train_loss": output.training_loss},
        _timeless(output.metrics),
    ]


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(
        folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1])
    )


def _tensors(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_tensors(each) for each in value]
    return None if value is None else torch.as_tensor(value)


_TIMES = ("runtime", "per_second", "preparation_time")


def _timeless(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in entry.items()
        if not any(word in name for word in _TIMES)
    }


def _state(state: TrainerState) -> dict[str, Any]:
    best = state.best_model_checkpoint
    return {
        "step": state.global_step,
        "epoch": state.epoch,
        "max_steps": state.max_steps,
        "best": None if best is None else Path(best).name,
        "best_metric": state.best_metric,
        "best_step": state.best_global_step,
        "tokens": state.num_input_tokens_seen,
        "flos": state.total_flos,
    }


def _files(trainer: Trainer, program: Program, folder: Path) -> dict[str, Any]:
    """What plain Transformers loads from the checkpoints that are left, on the first
    rank."""
    trainer.accelerator.wait_for_everyone()
    if not trainer.is_world_process_zero():
        return {}
    found: dict[str, Any] = {}
    for path in [*_checkpoints(folder), folder / "final"]:
        if not path.is_dir():
            continue
        if "lora" in program["extras"] or "adapter" in program:
            found[path.name] = {
                "weights": load_file(path / "adapter_model.safetensors")
            }
        elif program["model"] in FAMILIES:
            kind = type(make_model(program["model"], 0))
            loaded: nn.Module = kind.from_pretrained(path, dtype=torch.float64)
            found[path.name] = {"weights": dict(loaded.state_dict())}
        else:
            found[path.name] = {"weights": load_file(path / "model.safetensors")}
        if (path / "trainer_state.json").exists():
            found[path.name]["state"] = _state(
                TrainerState.load_from_json(str(path / "trainer_state.json"))
            )
    return found


def play_all(
    programs: list[Program], folder: Path, how: str, resume: bool = False
) -> list[dict[str, Any] | str]:
    """Play several, each in a folder of its own; an error becomes its words. On ranks
    these raise together or not."""
    warnings.filterwarnings("ignore")
    found: list[dict[str, Any] | str] = []
    for program in programs:
        if dist.is_initialized():
            dist.barrier()
        own = folder / f"program-{program['seed']}"
        print(f"program {program['seed']}", flush=True)
        try:
            found.append(play(program, own, how, resume))
        except Exception as error:
            found.append("".join(traceback.format_exception(error)))
    reset()
    return found

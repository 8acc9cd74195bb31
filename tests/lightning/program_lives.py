"""Random programs of Lightning that are interrupted in the middle of epochs, and go on
at other numbers of ranks and layouts, compared with a run of one process that nothing
interrupts.

A life is a call of ``fit``. Each but the last one takes a checkpoint when a batch has
ended, and raises before the next one, as a job does that is killed; the next one
resumes there.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from tests.lightning.axis_programs import (
    BATCH as BATCH_OVER_AXES,
    LAYERS,
    draw_over_axes,
    module_over_axes,
)
from tests.lightning.programs import (
    BATCH,
    KNOBS,
    Program,
    draw,
    is_alone,
    module_of,
    table,
    trainer_of,
    weights_of,
    world,
)

# What ends a run or an epoch early, which an interrupted one does elsewhere. Lightning,
# in one process, leaves frozen what was thawed in the epoch that a run goes on in.
_NOT_HERE = ("stop", "skip an epoch", "on_train_batch_start", "freeze and thaw")
# Layouts of two ranks and of one, by the kind of the program.
TWO: dict[str, tuple[dict[str, Any], ...]] = {
    "rows": ({"shard_degree": 1}, {"shard_degree": 2}),
    "context": (
        {"shard_degree": 2, "context_parallel_degree": 2, "full_outputs": True},
        {"shard_degree": 2},
    ),
    "tensor": (
        {
            "shard_degree": 1,
            "tensor_parallel_degree": 2,
            "tensor_parallel": {"plan": LAYERS},
        },
        {"shard_degree": 2},
    ),
    "pipeline": (
        {"shard_degree": 1, "pipeline_parallel_degree": 2, "pipeline": "1f1b"},
        {"shard_degree": 2},
    ),
    "experts": ({"shard_degree": 2, "expert_parallel_degree": 2}, {"shard_degree": 2}),
}


class Interrupted(Exception):
    """The end of a life."""


class Interrupts(Callback):
    """Takes a checkpoint at a batch of an epoch, and raises before the next."""

    def __init__(self, path: Path, epoch: int, share: float) -> None:
        self.path, self.epoch, self.share, self.saved = path, epoch, share, False

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        last = trainer.num_training_batches - 1
        if (
            trainer.current_epoch == self.epoch
            and batch_idx == int(self.share * last) < last
        ):
            trainer.save_checkpoint(self.path)
            self.saved = True

    def on_train_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.saved:
            raise Interrupted


def draw_lives(seed: int) -> Program:
    """A program over 4 ranks, 2, and 1 or 4, with the places where it is
    interrupted."""
    rng = random.Random(77 * seed + 3)
    program = draw_over_axes(seed) if rng.random() < 0.6 else draw(seed)
    kind = program["axes"].split()[0] if "axes" in program else "rows"
    knobs = {
        name: value
        for name, values in KNOBS.items()
        if (value := rng.choice(values)) is not None
    }
    knobs = {name: value for name, value in knobs.items() if name in program["knobs"]}
    second = {**knobs, **rng.choice(TWO[kind])}
    third = rng.choice(
        ((1, {"shard_degree": 1}), (4, program["knobs"]), (4, {"shard_degree": 4}))
    )
    first_epoch = rng.randint(0, 1)
    for name in _NOT_HERE:
        program["overrides"] = [each for each in program["overrides"] if each != name]
        program["callbacks"] = [each for each in program["callbacks"] if each != name]
    program["flags"].pop("max_steps", None)
    program["flags"]["max_epochs"] = first_epoch + rng.randint(2, 3)
    # Monitors of an epoch's mean in training, which an interrupted one has not.
    if program["val_loaders"] != 1:
        program["callbacks"] = [
            each for each in program["callbacks"] if each != "early"
        ]
        program["schedule"] = (
            "step" if program["schedule"] == "plateau" else program["schedule"]
        )
    program["train"] = program["train"] // 4 * 4
    whole = (
        program["train"] % (2 * (BATCH if kind == "rows" else BATCH_OVER_AXES)) == 0
        and program["loaders"] == "one"
    )
    if program["optimization"] == "in windows by hand" and not (
        whole and "limit_train_batches" not in program["flags"]
    ):
        # A window of two epochs, whose gradients are not saved, as is said.
        program["optimization"] = "by hand"
    if program["optimization"] == "in windows by hand":
        # It is stepped with every batch, and those of an open window are seen again.
        program["schedule"] = "none"
    # Counts batches, and those of an open window are seen again.
    if "ema by hand" in program["callbacks"]:
        program["flags"].pop("accumulate_grad_batches", None)
        program["callbacks"] = [
            each for each in program["callbacks"] if each != "accumulation"
        ]
        windows = program["optimization"] == "in windows by hand"
        program["optimization"] = "by hand" if windows else program["optimization"]
    places = [(first_epoch, rng.random()), (first_epoch + 1, rng.random())]
    lives = [
        (4, program["knobs"], *places[0]),
        (2, second, *places[1]),
        (*third, -1, 0.0),
    ]
    if rng.random() < 0.3:
        del lives[1]
    # Means over uneven targets are one process's where ranks share sequences.
    return {**program, "after": [], "lives": lives, "uneven": False}


def live(program: Program, folder: str, number: int | None) -> dict[str, Any] | None:
    """One life, or (None) all of it without an interruption; what a user sees of the
    last one."""
    place, make = Path(folder), module_over_axes if "axes" in program else module_of
    is_last = number is None or number == len(program["lives"]) - 1
    more: list[Callback] = []
    load = None
    if number is not None:
        _, knobs, *until = program["lives"][number]
        program = {**program, "knobs": knobs}
        more = [] if is_last else [Interrupts(place / f"life-{number}.ckpt", *until)]
        load = place / f"life-{number - 1}.ckpt" if number else None
    module: Any = make(program)
    trainer = trainer_of(program, module, place, program["knobs"])
    # Before what saves checkpoints, and behind what else happens at a batch's end.
    trainer.callbacks[-1:-1] = more
    if load is not None and not load.exists():
        return None  # an earlier life came to its end
    try:
        trainer.fit(module, ckpt_path=load, weights_only=False)
    except Interrupted:
        return None
    return shown(trainer, module) if is_last else None


def shown(trainer: Any, module: Any) -> dict[str, Any]:
    saver: Any = trainer.checkpoint_callback
    losses = torch.stack(module.losses) if module.losses else torch.zeros(0)
    if not is_alone():
        dist.all_reduce(losses)
        losses /= world()

    def named(path: Any) -> str:
        return re.sub(r"-v\d+", "", Path(path).name)

    return {
        "losses": losses.tolist(),
        "weights": weights_of(trainer, module),
        "rates": [
            float(group["lr"])
            for optimizer in trainer.optimizers
            for group in optimizer.param_groups
        ],
        "place": [trainer.current_epoch, trainer.global_step],
        "names": [named(saver.best_model_path), named(saver.last_model_path)],
        "scores": {
            named(path): float(score) for path, score in saver.best_k_models.items()
        },
        "metrics": {
            key: float(value) for key, value in trainer.callback_metrics.items()
        },
        "seen": module.seen,
        "log": table(trainer) if trainer.is_global_zero else [],
    }


def rows_of(log: list[dict[str, str]]) -> dict[str, float]:
    """Values of a log by their step and name, but for an epoch's means in training."""
    named = ("train_epoch", "told_epoch", "epoch", "step")
    return {
        f"{key} at {row['step']}": float(value)
        for row in log
        for key, value in row.items()
        if value and key not in named
    }


def _but_saves(seen: list[Any]) -> list[Any]:
    """A ModelCheckpoint does not keep whether it has saved the last one."""
    return [each for each in seen if "on_save_checkpoint" not in each]


def rest_of(
    whole: dict[str, Any], last: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an uninterrupted run has to show where another one's last life began."""
    begun = next(
        (n for n, hook in enumerate(last["seen"]) if "on_train_batch_start" in hook),
        len(last["seen"]),
    )
    hooks = _but_saves(last["seen"][begun:])
    whole = {**whole, "seen": _but_saves(whole["seen"])}
    ours, theirs = rows_of(last["log"]), rows_of(whole["log"])
    first = min((int(float(row["step"])) for row in last["log"]), default=0)
    # An epoch's mean in training is that of the rest of it, where the run began inside.
    names = {
        name
        for name in whole["metrics"]
        if not name.endswith("_epoch") and name not in ("train", "told")
    }
    expected = {
        **whole,
        "metrics": {name: whole["metrics"][name] for name in names},
        "losses": whole["losses"][len(whole["losses"]) - len(last["losses"]) :],
        "seen": whole["seen"][len(whole["seen"]) - len(hooks) :],
        "log": {
            key: value
            for key, value in theirs.items()
            if int(key.rsplit(" ", 1)[1]) > first
        },
    }
    ours = {
        key: value for key, value in ours.items() if int(key.rsplit(" ", 1)[1]) > first
    }
    metrics = {
        name: value
        for name, value in last["metrics"].items()
        if name in names or name not in whole["metrics"]
    }
    return expected, {**last, "metrics": metrics, "seen": hooks, "log": ours}

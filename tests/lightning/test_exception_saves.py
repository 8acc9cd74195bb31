"""Checkpoints that callbacks save when an exception ends the run, and the run that goes
on from them."""

from __future__ import annotations

import os
from abc import ABC
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_smp.processes import exception_checkpoints, take_over_exception_saves
from smp_core.checkpoint import read_manifest
from tests.harness import run_ranks
from tests.lightning.modules import LanguageModule, rank
from tests.lightning.running import QUIET, Run, make_trainer, report

BATCHES = 8


class FailingModule(LanguageModule):
    """Raises in a batch of the run, on all ranks; draws numbers of each rank's own
    generator."""

    fails_at = -1

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.fit_loop.total_batch_idx == self.fails_at:
            raise ArithmeticError("the user's own mistake")
        return super().training_step(batch, batch_idx) * (1 + 0.1 * torch.rand(()))


def train(
    folder: Path, fails_at: int, case: dict[str, Any], go_on: bool = False
) -> Run:
    seed_everything(3 + rank(), verbose=False)
    module = FailingModule(BATCHES, 1)
    module.fails_at = fails_at
    if case["callback"] == "OnExceptionCheckpoint":
        callback: Any = OnExceptionCheckpoint(folder)
    else:
        callback = ModelCheckpoint(
            folder, save_on_exception=True, save_last=True, every_n_train_steps=3
        )
    flags = {
        "callbacks": [callback],
        "enable_checkpointing": True,
        "accumulate_grad_batches": case["window"],
    }
    trainer = make_trainer(
        {"shard_degree": 2, "checkpoint": case["checkpoint"]}, **flags
    )
    error = ""
    try:
        trainer.fit(module, ckpt_path="last" if go_on else None)
    except ArithmeticError as raised:
        error = str(raised)
    return report(
        trainer,
        module,
        error=error,
        reached=trainer.global_step,
        files=sorted(os.listdir(folder)),
    )


def step_of(path: Path) -> int:
    if path.is_file():  # an ordinary checkpoint of Lightning
        return torch.load(path, weights_only=False)["global_step"]
    return read_manifest(path).metadata["step"]


def failing(folder: str, cases: list[dict[str, Any]]) -> list[tuple[Run, Run, Run]]:
    seen = []
    for number, case in enumerate(cases):
        places = [Path(folder, f"{kind}{number}") for kind in ("plain", "failed")]
        for place in places:
            place.mkdir(exist_ok=True)
        plain = train(places[0], -1, case)
        failed = train(places[1], 5, case)
        failed.extra["saved"] = [step_of(path) for path in places[1].glob("*.ckpt")]
        seen.append((plain, failed, train(places[1], -1, case, go_on=True)))
    return seen


QUICK = [
    {"callback": "OnExceptionCheckpoint", "checkpoint": "sharded", "window": 1},
    {"callback": "OnExceptionCheckpoint", "checkpoint": "async", "window": 2},
]
MORE = [
    {"callback": callback, "checkpoint": checkpoint, "window": window}
    for callback in ("OnExceptionCheckpoint", "ModelCheckpoint")
    for checkpoint in ("sharded", "async", "full")
    for window in (1, 2)
]


def check(cases: list[dict[str, Any]], folder: Path) -> None:
    by_rank = run_ranks(failing, 2, str(folder), cases, timeout=600.0)
    for number, case in enumerate(cases):
        for plain, failed, resumed in (seen[number] for seen in by_rank):
            assert (
                failed.extra["error"] == "the user's own mistake"
                and not resumed.extra["error"]
            )
            step = 5 // case["window"]
            assert failed.extra["reached"] == step and step in failed.extra["saved"], (
                case,
                failed.extra,
            )
            assert (
                failed.losses[: step * case["window"]] + resumed.losses == plain.losses
            ), case
            for name, value in plain.weights.items():
                assert torch.equal(value, resumed.weights[name]), (case, name)
            if case["callback"] == "OnExceptionCheckpoint":
                assert failed.extra["files"] == ["on_exception.ckpt"]
                assert os.listdir(folder / f"failed{number}") == [], (
                    "the run that went well needs it no longer"
                )


def test_a_run_that_fails_on_all_ranks_goes_on_where_it_failed(tmp_path: Path) -> None:
    """To the last bit; with a save behind training in the middle of a window too."""
    check(QUICK, tmp_path)


@pytest.mark.slow
def test_with_every_callback_and_kind_of_save(tmp_path: Path) -> None:
    check(MORE, tmp_path)


class Abstract(ABC, OnExceptionCheckpoint):
    """A callback of a user's, whose class begins with a base that has no
    ``__dict__``."""


def test_a_callback_of_any_class_saves_on_all_ranks_or_none(tmp_path: Path) -> None:
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": True, "callbacks": [Abstract(tmp_path)]}
    )
    take_over_exception_saves(trainer)
    (callback,) = (each for each in trainer.callbacks if isinstance(each, Abstract))
    assert type(callback) is not Abstract and exception_checkpoints(trainer) == [
        callback.ckpt_path
    ]

"""A run whose job is about to be ended saves on all ranks at one step, leaves, and goes
on as if nothing had been."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

import smp_core.checkpoint.folders.storage as storage
from lightning_smp import SmpShardedStrategy
from smp_core.checkpoint import read_manifest, verify_checkpoint
from smp_core.watch.preemption import Preempted
from tests.harness import run_ranks
from tests.lightning.modules import LanguageModule, rank
from tests.lightning.running import Run, make_trainer, report

BATCHES, VALIDATION = 12, 12
TERM, USR1 = int(signal.SIGTERM), int(signal.SIGUSR1)


class ToldModule(LanguageModule):
    """Tells ``ranks`` that the job is about to be ended when it comes to ``place`` for
    the first time from the run's batch ``at`` on; computes with numbers of each rank's
    own generator."""

    place, at, ranks, number = "", 3, (0,), TERM
    told_at: int | None = None
    validated = 0
    in_validation = False

    def come_to(self, place: str, validated: int | None = None) -> None:
        done = (
            self.trainer.fit_loop.total_batch_idx + 1
            if validated is None
            else validated + 3
        )
        if place == self.place and done >= self.at and self.told_at is None:
            self.told_at = self.trainer.global_step
            if rank() in self.ranks:
                os.kill(os.getpid(), self.number)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.come_to("step")
        if batch_idx % 3 == 1:
            self.come_to("in a window")
        if batch_idx % 3 == 2:
            self.come_to("end of a window")
        loss = super().training_step(batch, batch_idx) * (1 + 0.1 * torch.rand(()))
        self.come_to("forward")
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.come_to("optimizer")
        super().optimizer_step(*args, **kwargs)

    def on_before_backward(self, *args: Any) -> None:
        self.come_to("before backward")

    def on_after_backward(self) -> None:
        self.come_to("after backward")

    def on_before_zero_grad(self, *args: Any) -> None:
        self.come_to("gradients")

    def lr_scheduler_step(self, *args: Any) -> None:
        self.come_to("schedule")
        super().lr_scheduler_step(*args)

    def on_train_batch_start(self, *args: Any) -> None:
        self.come_to("batch start")

    def on_train_batch_end(self, *args: Any) -> None:
        self.come_to("batch end")

    def transfer_batch_to_device(self, *args: Any) -> Any:
        if self.trainer.training:
            self.come_to("data")
        return super().transfer_batch_to_device(*args)

    def on_train_epoch_start(self) -> None:
        self.come_to("epoch start")

    def on_train_epoch_end(self) -> None:
        self.come_to("epoch end")

    def on_validation_start(self) -> None:
        self.validated, self.in_validation = 0, True
        self.come_to("validation start")

    def on_validation_end(self) -> None:
        self.come_to("validation end")
        self.in_validation = False

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.validated += 1
        self.come_to("validation", batch_idx)
        return super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.95**step
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.come_to("save")


@contextlib.contextmanager
def telling_while_files_are_written(module: ToldModule) -> Iterator[None]:
    """Let ``module`` come to "writing" when a file of a checkpoint is closed, and to
    "removal" when one is removed."""
    close, remove = storage.Sink.close, SmpShardedStrategy.remove_checkpoint

    def closed(sink: storage.Sink) -> Any:
        module.come_to("writing")
        return close(sink)

    def removed(strategy: SmpShardedStrategy, path: Any) -> None:
        module.come_to("removal")
        remove(strategy, path)

    with mock.patch.object(storage.Sink, "close", closed):
        with mock.patch.object(SmpShardedStrategy, "remove_checkpoint", removed):
            yield


def train(
    folder: Path,
    resume: bool = False,
    accumulate: int = 1,
    told: dict[str, Any] | None = None,
    **knobs: Any,
) -> Run:
    """One run of two epochs of 12 batches, with checkpoints and validations in between;
    its end is in ``extra``."""
    seed_everything(3 + rank(), verbose=False)
    module = ToldModule(BATCHES, VALIDATION)
    for name, value in (told or {}).items():
        setattr(module, name, value)
    saver = ModelCheckpoint(
        folder, save_last=True, every_n_train_steps=5 if accumulate == 1 else 2
    )
    flags = {
        "enable_checkpointing": True,
        "callbacks": [saver],
        "accumulate_grad_batches": accumulate,
    }
    trainer = make_trainer(
        {"shard_degree": 2, **knobs}, val_check_interval=8, max_epochs=2, **flags
    )
    code: Any = None
    with telling_while_files_are_written(module):
        try:
            trainer.fit(module, ckpt_path="last" if resume else None)
        except Preempted as end:
            code = end.code
    saved = folder / "last-preempted.ckpt"
    step = read_manifest(saved).metadata["step"] if code is not None else None
    broken = verify_checkpoint(saved, deep=True) if code is not None else []
    handlers = [
        signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
        for number in (TERM, USR1)
    ]
    seen = {
        "code": code,
        "told_at": module.told_at,
        "step": step,
        "handlers": handlers,
        "broken": broken,
    }
    left_in = module.validated if module.in_validation else 0
    return report(
        trainer, module, validated=left_in, reached=trainer.global_step, **seen
    )


def interrupted(
    folder: str, cases: list[tuple[dict[str, Any], dict[str, Any]]]
) -> list[tuple[Run, Run, Run]]:
    """For each case an uninterrupted run, one that is told, and the one that goes on
    from it."""
    seen = []
    plain: dict[int, Run] = {}
    for number, (told, options) in enumerate(cases):
        steps = options.get("accumulate", 1)
        if steps not in plain:
            plain[steps] = train(Path(folder, f"plain{steps}"), accumulate=steps)
        place = Path(folder, str(number))
        seen.append(
            (
                plain[steps],
                train(place, told=told, **options),
                train(place, resume=True, **options),
            )
        )
    return seen


def check(
    case: tuple[dict[str, Any], dict[str, Any]], runs: list[tuple[Run, Run, Run]]
) -> None:
    """What all ranks saw in one case."""
    told, options = case
    codes = {left.extra["code"] for _, left, _ in runs}
    assert codes == {128 + told.get("number", TERM)}
    steps = {left.extra["step"] for _, left, _ in runs}
    assert len(steps) == 1
    step = steps.pop()
    assert not any(left.extra["broken"] for _, left, _ in runs)
    for plain, left, resumed in runs:
        assert plain.extra["code"] is None and resumed.extra["code"] is None
        assert left.extra["handlers"] == resumed.extra["handlers"] == [True, True]
        assert (
            left.extra["told_at"]
            <= step
            == left.extra["reached"]
            < plain.extra["reached"]
            == resumed.extra["reached"]
        )
        if (
            told["place"] == "validation"
            and options["checkpoint"].get("preemption_grace_s") == 0.01
        ):
            assert 0 < left.extra["validated"] < VALIDATION
        done = step * options.get("accumulate", 1)
        assert left.losses[:done] + resumed.losses == plain.losses
        for name, value in plain.weights.items():
            assert torch.equal(value, resumed.weights[name]), name


FIRST = [
    (
        {"place": "step", "ranks": (0, 1), "number": USR1},
        {"accumulate": 3, "checkpoint": {"async_save": True}},
    ),
    ({"place": "step", "ranks": (1,)}, {}),
    (
        {"place": "validation", "ranks": (1,), "at": 4},
        {"checkpoint": {"preemption_grace_s": 0.01}},
    ),
]
INSTANTS = (
    *(
        "data",
        "batch start",
        "step",
        "forward",
        "before backward",
        "after backward",
        "optimizer",
        "gradients",
    ),
    *(
        "schedule",
        "in a window",
        "end of a window",
        "batch end",
        "epoch end",
        "epoch start",
    ),
    *("validation start", "validation", "validation end", "save", "writing", "removal"),
)


def cases_at(place: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Both signals, one rank or all, saves in training or behind it: eight cases, every
    other one in haste."""
    cases = []
    for number, (sent, ranks, behind) in enumerate(
        itertools.product((TERM, USR1), (None, (0, 1)), (False, True))
    ):
        one = ((INSTANTS.index(place) + number) % 2,)
        told = {"place": place, "ranks": ranks or one, "number": sent}
        grace = 0.01 if number % 3 == 0 else 30.0
        accumulate = 3 if "window" in place or number % 4 == 3 else 1
        knobs = {
            "checkpoint": {"async_save": behind, "preemption_grace_s": grace},
            "accumulate": accumulate,
        }
        cases.append((told, knobs))
    return cases


@pytest.mark.parametrize(
    "cases", [FIRST[::2], pytest.param(FIRST[1:2], marks=pytest.mark.slow)], ids=len
)
def test_a_run_that_is_told_to_end_saves_and_goes_on_as_if_nothing_had_been(
    cases: list[tuple[dict[str, Any], dict[str, Any]]], tmp_path: Path
) -> None:
    """One rank is told or all are, in a step, in a window, in a validation; to the last
    bit."""
    by_rank = run_ranks(interrupted, 2, str(tmp_path), cases)
    for number, case in enumerate(cases):
        check(case, [seen[number] for seen in by_rank])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("place", INSTANTS)
def test_at_every_instant_and_for_every_kind_of_save(
    place: str, tmp_path: Path
) -> None:
    """20 instants x 2 signals x one rank or all x saves in training or behind it: 160
    runs, and as many that go on."""
    cases = cases_at(place)
    by_rank = run_ranks(interrupted, 2, str(tmp_path), cases, timeout=1000.0)
    for number, case in enumerate(cases):
        check(case, [seen[number] for seen in by_rank])

"""A rank that stops training alone ends with an error that says so, and hangs no
other; ranks whose clocks differ validate together."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from tests.harness import RanksFailed, run_ranks
from tests.lightning.modules import LanguageModule
from tests.lightning.running import (
    Run,
    assert_same,
    fit,
    make_trainer,
    report,
    together,
)

SAID = (
    r"(rank 0 is at trainer.should_stop = True and rank 1 at the next batch|"
    r"rank 1 is at the next batch and rank 0 at trainer.should_stop = True)[\s\S]*"
    r"reduce_boolean_decision\(this_rank_stops, all=False\)"
)


class Stops(Callback):
    """Sets ``trainer.should_stop`` at a place, on some ranks."""

    def __init__(self, hook: str, ranks: tuple[int, ...]) -> None:
        self.hook, self.ranks = hook, ranks

    def _stop(self, hook: str, trainer: Trainer) -> None:
        if hook == self.hook and trainer.global_rank in self.ranks:
            trainer.should_stop = True

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._stop("last batch" if trainer.is_last_batch else "batch", trainer)
        if trainer.global_step == 3:
            self._stop("third", trainer)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self._stop("epoch", trainer)


def steps(hook: str, ranks: tuple[int, ...], knobs: dict[str, Any]) -> int:
    run = fit(LanguageModule, knobs=knobs, max_epochs=2, callbacks=[Stops(hook, ranks)])
    return len(run.losses)


def test_a_rank_that_stops_alone_is_named() -> None:
    with pytest.raises(RanksFailed, match=SAID):
        run_ranks(steps, 2, "batch", (0,), {"shard_degree": 1})


def steps_validating_inside(ranks: tuple[int, ...]) -> int:
    """The last of an epoch's four batches is not one behind which all validate."""
    module = LanguageModule()
    trainer = make_trainer(
        {"shard_degree": 2},
        max_epochs=2,
        val_check_interval=3,
        callbacks=[Stops("last batch", ranks)],
    )
    trainer.fit(module)
    return trainer.global_step


def test_a_rank_that_stops_before_its_own_validation_is_named() -> None:
    with pytest.raises(
        RanksFailed,
        match=r"trainer.should_stop = True[\s\S]*the end of an epoch|"
        r"the end of an epoch[\s\S]*trainer.should_stop = True",
    ):
        run_ranks(steps_validating_inside, 2, (0,), timeout=60)
    assert run_ranks(steps_validating_inside, 2, (0, 1)) == [4, 4]


def what_is_caught(hook: str) -> str:
    trainer = make_trainer(
        {"shard_degree": 2}, max_epochs=2, callbacks=[Stops(hook, (0,))]
    )
    try:
        trainer.fit(LanguageModule())
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("hook", ["last batch", "epoch"])
def test_a_rank_that_stops_behind_an_epoch_leaves_no_other_waiting(hook: str) -> None:
    """Also where the script catches the error and its processes go on."""
    for said in run_ranks(what_is_caught, 2, hook, timeout=60):
        assert re.match(SAID, said), said


class Clock(Callback):
    """Makes the time since the last validation long on one rank at a time, and notes
    the steps of validations."""

    def __init__(self) -> None:
        self.validations: list[int] = []

    def on_train_batch_start(
        self, trainer: Trainer, module: Any, batch: Any, batch_idx: int
    ) -> None:
        is_long = (batch_idx + trainer.global_rank) % 2 == 0
        trainer._last_val_time = time.monotonic() - 10_000 * is_long

    def on_validation_start(self, trainer: Trainer, module: Any) -> None:
        self.validations.append(trainer.global_step)


def steps_of_validations() -> list[int]:
    clock = Clock()
    trainer = make_trainer(
        {"shard_degree": 2},
        val_check_interval=timedelta(hours=1),
        callbacks=[clock],
    )
    trainer.fit(LanguageModule())
    return clock.validations


def test_the_clock_of_rank_0_says_when_to_validate() -> None:
    """``val_check_interval`` as a time, whose clocks are each rank's own."""
    alone = steps_of_validations()
    assert alone == [1, 3]
    assert run_ranks(steps_of_validations, 2, timeout=60) == [alone, alone]


@pytest.mark.slow
def test_ranks_that_stop_together_stop() -> None:
    at_batch, at_epoch = (
        run_ranks(steps, 2, hook, (0, 1), {"shard_degree": 2})
        for hook in ("batch", "epoch")
    )
    assert at_batch == [1, 1] and len(set(at_epoch)) == 1 and at_epoch[0] > 1


def stopped_and_gone_on(folder: str, knobs: dict[str, Any] | None = None) -> Run:
    """Runs that are stopped behind the third of an epoch's four batches, saved when
    they are over, and gone on from."""
    losses = []
    for name, limits in (
        ("callback", {"callbacks": [Stops("third", (0, 1))]}),
        ("steps", {"max_steps": 3}),
    ):
        path = f"{folder}/{name}.ckpt"
        for start, more in ((None, limits), (path, {})):
            module = LanguageModule()
            trainer = make_trainer(
                knobs, **{"precision": "64-true", "max_epochs": 2, **more}
            )
            trainer.fit(module, ckpt_path=start)
            trainer.save_checkpoint(path)
            losses += module.losses
    module.losses = losses
    return report(trainer, module)


def test_a_run_that_was_stopped_within_an_epoch_goes_on_with_the_next_one(
    tmp_path: Path,
) -> None:
    """As in one process, with all of its batches. 1e-6: one process loads weights
    before it makes them float64."""
    for folder in ("alone", "ours"):
        (tmp_path / folder).mkdir()
    expected = stopped_and_gone_on(str(tmp_path / "alone"))
    runs = together(
        stopped_and_gone_on, str(tmp_path / "ours"), {"shard_degree": 2}, ranks=2
    )
    assert len(expected.losses) == 2 * (3 + 4)
    assert_same(runs, expected, 1e-6)

"""The validation that is due: on all ranks at the same batch, and what becomes of one
that is due, or runs, when a checkpoint is taken: the resumed run begins with it.

Lightning begins behind it: ModelCheckpoint every N steps and a preemption save at a
batch's end, before the validation that may follow there. A resumed run would lack its
metrics and draw other random numbers than an uninterrupted one, because the data
loaders of a validation draw from the same generators as training.

The way back is Lightning's own. A checkpoint that says that the first validation step
had begun is resumed with the validation; so what is due is written as begun, and a
validation in progress as one that has just begun.

Private names: ``_TrainingEpochLoop._should_check_val_fx``, Lightning's rule of when a
validation is due, which depends on seven of its settings, and
``FitLoop._data_fetcher``, which the rule takes; ``Trainer._val_check_time_interval`` and
``_last_val_time``, the seconds that ``val_check_interval`` was given as, and their
beginning.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from smp_core.checkpoint.random_state import random_state

# Batches between two questions at the most.
_MOST_BATCHES = 7


def is_due(trainer: Trainer) -> bool:
    """Return whether a validation follows the batch that is being trained on, or
    was."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(
        fetcher
    )


def is_lacking(trainer: Trainer) -> bool:
    """Return whether a checkpoint of this instant lacks a validation: one is due, or
    one has not come to its end."""
    if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
        return False
    loop = trainer.fit_loop.epoch_loop
    if trainer.validating:
        batches = loop.val_loop.batch_progress
        return not (
            batches.is_last_batch and batches.current.completed == batches.current.ready
        )
    # ModelCheckpoint saves between a batch's step and its count as completed.
    at_batch_end = (
        loop.batch_progress.current.processed  # type: ignore[attr-defined]
        == loop.batch_progress.current.completed + 1
    )
    return at_batch_end and is_due(trainer)


def begin_with_it(checkpoint: dict[str, Any], in_progress: bool) -> None:
    """Make ``checkpoint``, which lacks a validation, resume with this validation's
    first batch.

    Args:
        in_progress: whether the validation had begun.
    """
    loop = checkpoint["loops"]["fit_loop"]
    # The batch is over, and the first step of its validation is ready: Lightning's own
    # mark of a validation to be gone on with.
    trained = loop["epoch_loop.batch_progress"]
    for part in ("total", "current"):
        trained[part]["completed"] = trained[part]["processed"]
    validated = loop["epoch_loop.val_loop.batch_progress"]
    before = validated["total"]["completed"] - (
        validated["current"]["completed"] if in_progress else 0
    )
    validated["total"] = {
        "ready": before + 1,
        "started": before + 1,
        "processed": before,
        "completed": before,
    }
    validated["current"] = dict.fromkeys(validated["current"], 0)
    validated["is_last_batch"] = False


def begins_with_it(trainer: Trainer) -> bool:
    """Return whether the run that is being resumed begins with a validation. From
    ``on_train_start`` on, once: the counters that said so are put right.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    if not loop.restarted_mid_evaluation:
        return False
    total = loop.batch_progress.total
    total.ready = total.started = total.completed  # type: ignore[attr-defined]
    return True


def agree_on_time(trainer: Trainer, broadcast: Callable[[Any], Any]) -> None:
    """Let rank 0's clock tell all ranks when ``val_check_interval``, given as a time, has
    passed.

    Lightning asks each rank's own. Some ranks would validate where others train on, and
    wait for them forever.

    Args:
        broadcast: gives all ranks rank 0's answer.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    if trainer._val_check_time_interval is not None:  # type: ignore[attr-defined]
        loop._should_check_val_fx = _ClockOfRank0(loop, broadcast)


class _ClockOfRank0:
    """Lightning's rule of when a validation is due, by the time that has passed on rank
    0, which is asked for more rarely while much of the interval is left."""

    def __init__(self, loop: Any, broadcast: Callable[[Any], Any]) -> None:
        self.loop, self._broadcast = loop, broadcast
        self._now: tuple[int, float] | None = None
        self._passed = False
        # Batches until the next question, since the last one, and when that was.
        self._wait = self._since = 0
        self._asked_at = time.monotonic()

    def __call__(self, fetcher: Any) -> bool:
        trainer = self.loop.trainer
        interval = trainer._val_check_time_interval
        # A batch and the validation before it have one answer, whoever asks: a
        # checkpoint of this batch, or Lightning at its end.
        now = (self.loop.total_batch_idx, trainer._last_val_time)
        if now != self._now:
            # Behind a validation the pace is another one.
            if self._now is None or now[1] != self._now[1]:
                self._wait = 0
            self._now, self._passed = now, False
            self._wait, self._since = self._wait - 1, self._since + 1
            if self._wait < 0:
                self._ask(interval, trainer._last_val_time)
        # Lightning's other rules, with an interval that has passed, or never does.
        trainer._val_check_time_interval = -math.inf if self._passed else math.inf
        try:
            due: bool = type(self.loop)._should_check_val_fx(self.loop, fetcher)
        finally:
            trainer._val_check_time_interval = interval
        return due

    def _ask(self, interval: float, begun: float) -> None:
        """Get from rank 0 whether the interval has passed and, where it has not, how
        many batches it will surely not pass in. Collective."""
        time_now = time.monotonic()
        left = interval - (time_now - begun)
        # Batches may become slower: half as many as would fit, with a bound.
        batches = int(left * self._since / max(time_now - self._asked_at, 1e-9) / 2)
        wait = min(_MOST_BATCHES, max(0, batches))
        self._passed, self._wait = self._broadcast((left <= 0, wait))
        self._since, self._asked_at = 0, time_now


class BeforeValidation:
    """The random states of this rank from before the validation in progress."""

    def __init__(self) -> None:
        self._random: dict[str, Any] | None = None

    def step_has_ended(self, trainer: Trainer) -> None:
        """Keep the present states if a validation follows."""
        self._random = random_state() if is_due(trainer) else None

    def random_states(self, trainer: Trainer) -> dict[str, Any] | None:
        """Return the states to begin a validation in progress with; None where none is
        in progress."""
        return self._random if trainer.validating and is_lacking(trainer) else None

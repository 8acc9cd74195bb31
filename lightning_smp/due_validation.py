"""A validation that is due, or runs, when a checkpoint is taken: the resumed run begins
with it.

Lightning begins behind it: ModelCheckpoint every N steps and a preemption save at a
batch's end, before the validation that may follow there. A resumed run would lack its
metrics and draw other random numbers than an uninterrupted one, because the data
loaders of a validation draw from the same generators as training.

The way back is Lightning's own. A checkpoint that says that the first validation step
had begun is resumed with the validation; so what is due is written as begun, and a
validation in progress as one that has just begun.

Private names: ``_TrainingEpochLoop._should_check_val_fx``, Lightning's rule of when a
validation is due, which depends on seven of its settings, and
``FitLoop._data_fetcher``, which the rule takes.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from smp_core.checkpoint.random_state import random_state


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

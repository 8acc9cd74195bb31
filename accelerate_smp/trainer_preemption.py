"""What transformers' Trainer does when its job is about to be ended: it saves on all
ranks after the same step, and leaves. In an evaluation that takes too long it does so
after a batch, if all ranks have as many of them.

Trainer goes on behind the evaluation that followed a checkpoint's step. So a checkpoint
says whether it lacks one, and the resumed run begins with it: its metrics count, and it
draws the random numbers that it would have drawn.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import IntervalStrategy, has_length

from smp_core.checkpoint.random_state import random_state
from smp_core.cluster import of_all_ranks
from smp_core.watch import Preemption


class LeavesWhenTold(TrainerCallback):
    """Saves and leaves when a launcher gives notice; the last callback.

    Args:
        trainer: one whose accelerator is :class:`SmpAccelerator`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._preemption: Preemption = self._trainer.accelerator.preemption
        self._leaves = False
        self._in_evaluation = False
        self._before_evaluation: dict[str, Any] | None = None
        self._evaluation_follows = False
        self._preemption.install()
        self._preemption.begin_phase()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> TrainerControl:
        # Trainer evaluates at an epoch's end after this hook, which therefore foresees
        # it.
        self._evaluation_follows = _evaluates_now(args, state)
        if self._preemption.agreed():
            self._leaves = control.should_save = True
            self._evaluation_follows |= control.should_evaluate
            control.should_evaluate = False
        return control

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        if self._leaves:
            self._trainer.accelerator.leave()

    # Evaluations in the middle of training.

    @property
    def lacks_evaluation(self) -> bool:
        """Return whether a checkpoint of this instant lacks an evaluation that belongs
        to its step."""
        return self._evaluation_follows or self._before_evaluation is not None

    @property
    def random(self) -> dict[str, Any] | None:
        """Random states of this rank from before the evaluation in progress; None where
        there is none."""
        return self._before_evaluation

    def begin_evaluation(self, loader: Any) -> None:
        """Note that an evaluation over a loader begins. Collective."""
        # Notices are agreed on batch by batch, which takes as many batches on all
        # ranks.
        counts = of_all_ranks(len(loader) if has_length(loader) else None)
        self._in_evaluation = None not in counts and len(set(counts)) == 1
        self._before_evaluation = random_state()
        self._preemption.begin_phase()

    def end_evaluation(self) -> None:
        """Note that it has ended, well or not."""
        self._in_evaluation = self._evaluation_follows = False
        self._before_evaluation = None
        self._preemption.begin_phase()

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        if self._in_evaluation and self._preemption.agreed(whole_step=False):
            self._trainer.save_training()
            self._trainer.accelerator.leave()


def _evaluates_now(args: TrainingArguments, state: TrainerState) -> bool:
    """Return whether an epoch ends with this step, and with an evaluation."""
    epoch = state.epoch or 0.0
    # The epoch is a sum of fractions.
    at_end = abs(epoch - round(epoch)) < 1e-6 and epoch > 0
    return (
        at_end
        and args.eval_strategy == IntervalStrategy.EPOCH
        and args.eval_delay <= epoch
    )

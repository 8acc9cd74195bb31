"""What transformers' Trainer does when its job is about to be ended: it saves on all ranks after the same step, and
leaves. In an evaluation that takes too long it does so after a batch, if all ranks have as many of them; the rest of
the evaluation is lost then.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from smp_core.preemption import Preemption


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
        self._preemption.install()
        self._preemption.begin_phase()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        if self._preemption.agreed():
            self._leaves = control.should_save = True
            control.should_evaluate = False
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._leaves:
            self._trainer.accelerator.leave()

    # Evaluations in the middle of training.

    def begin_evaluation(self, loader: Any) -> None:
        """Note that an evaluation over a loader begins. Collective."""
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, len(loader) if has_length(loader) else None)
        self._in_evaluation = None not in counts and len(set(counts)) == 1
        self._preemption.begin_phase()

    def end_evaluation(self) -> None:
        """Note that it has ended, well or not."""
        self._in_evaluation = False
        self._preemption.begin_phase()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._in_evaluation and self._preemption.agreed(whole_step=False):
            self._trainer.save_training()
            self._trainer.accelerator.leave()

"""SmpCheckpointCallback: the saves of transformers' Trainer, by steps or at the interval that loses the least time."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from smp_core.checkpoint import SaveSchedule


class SmpCheckpointCallback(TrainerCallback):
    """Makes Trainer save every so many optimizer steps and when training ends; give ``save_strategy="no"`` with it.

    Args:
        checkpoint_interval: optimizer steps between two saves, or ``"auto"``: the interval that loses the least time
            (Daly 2006), from the measured times of steps and saves and the time between failures.
        mean_time_between_failures: of the whole job, in seconds or as a timedelta: one node's, divided by the number of
            nodes. Needed for ``"auto"``.

    ``save_total_limit`` says how many stay.

    Raises:
        CheckpointError: a bad interval, or ``"auto"`` without a time between failures.
    """

    def __init__(
        self,
        checkpoint_interval: int | str = "auto",
        mean_time_between_failures: float | timedelta | None = None,
    ) -> None:
        failures = mean_time_between_failures
        seconds = failures.total_seconds() if isinstance(failures, timedelta) else failures
        self.schedule = SaveSchedule(checkpoint_interval, seconds)
        self._begin: float | None = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.schedule.step() or state.global_step >= state.max_steps:
            control.should_save = True
        self._begin = time.perf_counter() if control.should_save else None

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        if self._begin is not None:
            self._begin = time.perf_counter()  # the time before belongs to the step

    def on_save(self, *_: Any, **__: Any) -> None:
        self.schedule.saved(0.0 if self._begin is None else time.perf_counter() - self._begin)

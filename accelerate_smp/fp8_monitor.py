"""Fp8MonitorCallback: saturation, underflow and scales of FP8 layers, in the log of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from accelerate_smp.handle import parallel_of
from smp_core.fp8 import Fp8Watch


class Fp8MonitorCallback(TrainerCallback):
    """A callback that measures, every ``every_n_steps`` optimizer steps, how each FP8 layer's numbers fitted.

    SmpTrainer puts ``fp8/<module>/<figure>`` of the last probed step into the next log entry with a loss, so that they
    reach the console, ``trainer.state.log_history`` and every logger; a line of JSON goes to ``fp8.jsonl``, which
    ``smp fp8-report`` draws. Figures: see :meth:`smp_core.fp8.monitoring.Fp8Probe.end`. A probed step is slower, the
    others are not touched.

    Args:
        every_n_steps: >= 1.
        path: the file; default ``fp8.jsonl`` in ``output_dir``.
        modules: globs over module names that go to Trainer's log; the file gets all.

    Attributes:
        latest: the figures for the next log entry.

    Raises:
        ValueError: ``every_n_steps`` below 1; when training starts, a run without FP8.
    """

    def __init__(
        self, every_n_steps: int = 100, path: str | Path | None = None, modules: Sequence[str] = ("*",)
    ) -> None:
        self._watch = Fp8Watch("Fp8MonitorCallback", every_n_steps, path, modules)
        self.latest: dict[str, float] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        parallel = parallel_of(model)
        fp8 = None if parallel is None else parallel.fp8
        self._watch.start(fp8, str(args.output_dir), 'smp_config={"fp8": True}')

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._watch.step_begins(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        shown = self._watch.step_ends(state.global_step, writes=state.is_world_process_zero)
        self.latest = shown or self.latest

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        if "loss" in (logs or {}):
            self.latest = {}

"""Callbacks of transformers' Trainer: SmpMonitorCallback, SmpCheckpointCallback and
Fp8MonitorCallback.

SmpMonitorCallback measures throughput and memory. The figures are those of Lightning's
SmpMonitor (smp_core.observe.job_figures). A TrainerCallback does not see batches, so
samples, tokens and FLOPs are counted in hooks around the model's forward.
SmpTrainerMixin puts the figures into every log entry with a loss, so that they reach
the console, ``trainer.state.log_history`` and every logger.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from accelerate_smp.forward_counts import figures_of_job, sizes_of
from accelerate_smp.handle import parallel_of
from smp_core.checkpoint import SaveSchedule
from smp_core.fp8 import Fp8Watch
from smp_core.observe import DrawsTimeline, RunRecord, WatchesMemory, check_peak
from smp_core.run_log import FILE


class SmpMonitorCallback(WatchesMemory, DrawsTimeline, TrainerCallback):
    """Samples/s, tokens/s, model TFLOPS per device, MFU, peak memory, and bytes between
    nodes and inside them.

    Args:
        peak_tflops: the device's peak in TFLOPS at the precision in use, for MFU;
            default: the known dense bfloat16 peak of the GPU. Without it, on a CPU for
            example, MFU is not reported.
        flops_per_sample: model FLOPs of one sample's training step, where counting them
            does not work, as in a compiled model; default: counted while the first
            batch runs.
        memory_every_n_steps: optimizer steps between two whose peak memory is taken
            apart by kind; default: none. A watched step is slower
            (docs/memory-reports.md).
        memory_log: the file that gets a JSON line for each watched step, for ``smp
            memory-report``; default ``memory.jsonl`` in the Trainer's ``output_dir``.
        run_log: the file that ``smp report`` makes a page of (docs/monitoring.md);
            default ``run.jsonl`` in ``output_dir``.

    Reported with every log entry of training (``logging_steps``, or of an epoch):
    ``samples_per_second``, ``tokens_per_second``, ``tflops_per_device``, ``mfu``,
    ``peak_device_memory_gib`` or ``peak_host_rss_gib`` (the highest of all ranks), and
    ``bytes_between_nodes``, ``bytes_inside_nodes``: sent per optimizer step and node.
    Rates are of the whole job since the last entry; the clock starts after the first
    step and stands still in evaluations and while saving. With ``memory_every_n_steps``
    also the parts of the last watched step's peak, each the highest of all ranks:
    ``peak_parameters_gib``, ``peak_gathered_gib``, ``peak_gradients_gib``,
    ``peak_optimizer_gib``, ``peak_activations_gib`` and, on CUDA, ``peak_other_gib``;
    :meth:`save_memory_plot` draws them. ``latest`` holds the last report.

    On CPU ranks with pipeline stages also ``bubble_share``, ``bubble_share_stage_0``,
    ..., and ``seconds_stage_0``, ... that they compute in an optimizer step;
    :meth:`save_timeline` draws the last batch.

    Raises:
        ValueError: a peak that is not positive, ``memory_every_n_steps`` below 1; when
            training starts, ``memory_every_n_steps`` where nothing is sharded.
    """

    def __init__(
        self,
        *,
        peak_tflops: float | None = None,
        flops_per_sample: float | None = None,
        memory_every_n_steps: int | None = None,
        memory_log: str | Path | None = None,
        run_log: str | Path | None = None,
    ) -> None:
        self._will_watch(memory_every_n_steps)
        check_peak(peak_tflops)
        self.peak_tflops, self.flops_per_sample = peak_tflops, flops_per_sample
        self._memory_log, self._run_log = memory_log, run_log
        self._record: RunRecord | None = None
        self.latest: dict[str, float] = {}
        self._hooks: list[Any] = []

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        handle = parallel_of(model)
        log = Path(self._memory_log or Path(str(args.output_dir)) / "memory.jsonl")
        # Accelerate's wrapper has the real one.
        stepping = getattr(optimizer, "optimizer", optimizer)
        why_not = (
            "takes the memory of a sharded model apart, and this one is not; leave it out, or use SmpTrainer with more "
            "than one process"
        )
        self._start_watching(handle, [stepping], log, state.global_step, why_not)
        self._end()  # of an earlier call of train() that failed
        self._device = torch.device(args.device)
        self._figures = figures_of_job(
            handle,
            self._device,
            state.global_step,
            self.peak_tflops,
            self.flops_per_sample,
        )
        if state.is_world_process_zero:
            path = Path(self._run_log or Path(str(args.output_dir)) / FILE)
            micro_batches = args.gradient_accumulation_steps
            self._record = RunRecord(
                handle, [stepping], path, state.global_step, micro_batches
            )
        # Without stages a forward of the model is one micro-batch, counted when it
        # ends.
        self._stages = (
            None
            if handle is None or handle.pipeline is None
            else handle.pipeline.stages
        )
        self._samples = 0
        self._tokens: int | None = None
        self._reported = state.global_step
        if self._stages is not None:
            self._hooks = [
                model.register_forward_pre_hook(self._before_stage, with_kwargs=True)
            ]
            return
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward),
        ]

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        **_: Any,
    ) -> None:
        numbers = {
            name: value
            for name, value in (logs or {}).items()
            if isinstance(value, (int, float))
        }
        if self._record is None or self._figures is None:
            return
        if "loss" in numbers:
            self._record.write_step(
                state.global_step, {**numbers, **self.latest}, self._figures.details
            )
        else:  # of an evaluation, or of Trainer.log in the user's code
            self._record.write_metrics(state.global_step, numbers)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        self.end(state.global_step)

    def end(self, step: int, error: BaseException | None = None) -> None:
        """End the run's log, and watch the model no more; SmpTrainer calls it where an
        error ends training, which has no hook."""
        if self._record is not None:
            self._record.end(step, error)
            self._record = None
        self._abandon_watch()
        self._end()

    def _end(self) -> None:
        if self._figures is not None:
            self._figures.end()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before_forward(
        self, model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        # Forwards of evaluations count neither samples nor FLOPs.
        if not model.training:
            return
        assert self._figures is not None
        self._figures.enter("forward")
        self._samples, self._tokens = sizes_of(args, kwargs)
        if self._samples:
            self._figures.measure_forward()

    def _after_forward(self, model: torch.nn.Module, *_: Any) -> None:
        if model.training and self._figures is not None:
            self._figures.count(self._samples, self._tokens)
            self._figures.enter("backward")

    # A pipeline stage leaves the model in the middle, once for each micro-batch and
    # chunk; it books at the step's end.

    def _before_stage(
        self, model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        if model.training:
            samples, tokens = sizes_of(args, kwargs)
            self._samples += samples
            self._tokens = None if tokens is None else (self._tokens or 0) + tokens

    def _count_of_stage(self, chunks: int) -> None:
        assert self._figures is not None
        # Each chunk's call had the same inputs.
        self._figures.count(
            self._samples // chunks,
            None if self._tokens is None else self._tokens // chunks,
        )
        self._samples, self._tokens = 0, None

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if self._figures is not None:
            self._figures.enter("optimizer")

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        self._watch_if_due(state.global_step, self._device)
        if self._stages is not None:
            assert self._figures is not None
            self._figures.measure_forward()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        assert self._figures is not None
        if self._stages is not None:
            self._count_of_stage(self._stages.per_stage)
        if self._watch is not None:
            self._watch.end(state.global_step)
        self._figures.end_step()
        self.before_log_evaluate_save(state, control)

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        # Strategies of "epoch": Trainer logs, evaluates and saves behind this hook.
        self.before_log_evaluate_save(state, control)

    def before_log_evaluate_save(
        self, state: TrainerState, control: TrainerControl
    ) -> None:
        """Make the report of the log entry that comes next, and stop the clock where an
        evaluation or a save does. Collective.

        SmpTrainer calls it again behind the hooks: callbacks that come after this one
        ask for such things too.
        """
        if self._figures is None:
            return
        # Before the clock's parts of evaluation and save, which belong to no step.
        if control.should_log and state.global_step > self._reported:
            self._report(state.global_step)
        self._figures.start_clock()
        if control.should_evaluate or control.should_save:
            self._figures.pause()

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        if self._figures is not None and not control.should_save:
            self._figures.resume()

    def on_save(self, *_: Any, **__: Any) -> None:
        if self._figures is not None:
            self._figures.resume()

    def _report(self, step: int) -> None:
        """Make a report for the next log entry. Collective: every rank calls it after
        the same optimizer step."""
        assert self._figures is not None
        self._reported = step
        self.latest = self._report_of(self._figures, step, self._device)
        del self.latest["samples"]  # the Trainer's own log tells the progress


class SmpCheckpointCallback(TrainerCallback):
    """Makes Trainer save every so many optimizer steps and when training ends; give
    ``save_strategy="no"`` with it.

    Args:
        checkpoint_interval: optimizer steps between two saves, or ``"auto"``: the
            interval that loses the least time (Daly 2006), from the measured times of
            steps and saves and the time between failures.
        mean_time_between_failures: of the whole job, in seconds or as a timedelta: one
            node's, divided by the number of nodes. Needed for ``"auto"``.

    ``save_total_limit`` says how many stay.

    Raises:
        CheckpointError: a bad interval, or ``"auto"`` without a time between failures.
    """

    def __init__(
        self,
        checkpoint_interval: int | str = "auto",
        mean_time_between_failures: float | timedelta | None = None,
    ) -> None:
        self.schedule = SaveSchedule(checkpoint_interval, mean_time_between_failures)
        self._begin: float | None = None
        self._saved_step = 0

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        if self.schedule.step() or state.global_step >= state.max_steps:
            control.should_save = True
        self._begin = time.perf_counter() if control.should_save else None

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        # Another callback has ended training: Trainer comes here, and saves behind it.
        if control.should_training_stop and state.global_step > self._saved_step:
            control.should_save = True

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        if self._begin is not None:
            self._begin = time.perf_counter()  # the time before belongs to the step

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        self._saved_step = state.global_step
        # Also a save that Trainer or another callback has asked for starts the interval
        # again.
        self.schedule.saved(
            0.0 if self._begin is None else time.perf_counter() - self._begin
        )


class Fp8MonitorCallback(TrainerCallback):
    """A callback that measures, every ``every_n_steps`` optimizer steps, how each FP8
    layer's numbers fitted.

    SmpTrainer puts ``fp8/<module>/<figure>`` of the last probed step into the next log
    entry with a loss, so that they reach the console, ``trainer.state.log_history`` and
    every logger; a line of JSON goes to ``fp8.jsonl``, which ``smp fp8-report`` draws.
    Figures: see :meth:`smp_core.fp8.monitoring.Fp8Probe.end`. A probed step is slower,
    the others are not touched.

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
        self,
        every_n_steps: int = 100,
        path: str | Path | None = None,
        modules: Sequence[str] = ("*",),
    ) -> None:
        self._watch = Fp8Watch("Fp8MonitorCallback", every_n_steps, path, modules)
        self.latest: dict[str, float] = {}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_: Any,
    ) -> None:
        parallel = parallel_of(model)
        fp8 = None if parallel is None else parallel.fp8
        self._watch.start(fp8, str(args.output_dir), 'smp_config={"fp8": True}')

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        self._watch.step_begins(state.global_step)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        shown = self._watch.step_ends(
            state.global_step, writes=state.is_world_process_zero
        )
        # Steps between two probed ones leave the last figures for the next log entry.
        self.latest = shown or self.latest

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        **_: Any,
    ) -> None:
        if "loss" in (logs or {}):
            self.latest = {}

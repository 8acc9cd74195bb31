"""SmpMonitor: the throughput and memory of a bare Accelerate loop, and which rank the
others wait for.

The figures are those of Lightning's SmpMonitor (smp_core.observe.job_figures). A loop
has no hooks between the parts of a step, so these are told by what it calls anyway: the
model's forward, ``accelerator.backward`` and ``optimizer.step``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from accelerate_smp.accelerator import SmpAccelerator
from accelerate_smp.forward_counts import figures_of_job, sizes_of
from accelerate_smp.handle import parallel_of
from smp_core.observe import RunRecord, WatchesMemory, check_peak
from smp_core.torch_facts import after_each_step


class SmpMonitor(WatchesMemory):
    """Samples/s, tokens/s, model TFLOPS per device, MFU, peak memory, bytes, parts of a
    step and the slow rank.

    Args:
        accelerator, model, optimizer: as ``accelerator.prepare`` returned them.
        every_n_steps: optimizer steps between two reports; the same on all ranks.
        run_log: the file that ``smp report`` makes a page of (docs/monitoring.md);
            None: none is written.
        step: optimizer steps that an earlier run took.
        peak_tflops, flops_per_sample: as of :class:`accelerate_smp.SmpMonitorCallback`.

    ``latest`` holds the last report, by the names of docs/monitoring.md. A forward in
    evaluation mode stops the clock until the next one in training mode. A loop that
    calls ``loss.backward()`` itself has no part `backward`.

    Raises:
        ValueError: ``every_n_steps`` below 1, a peak that is not positive, a model that
            was not prepared, pipeline stages, a second monitor of an accelerator.
    """

    def __init__(
        self,
        accelerator: SmpAccelerator,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        every_n_steps: int = 50,
        run_log: str | Path | None = None,
        step: int = 0,
        peak_tflops: float | None = None,
        flops_per_sample: float | None = None,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(
                f"every_n_steps={every_n_steps} is not a number of steps; allowed: 1 and more"
            )
        check_peak(peak_tflops)
        if accelerator.monitor is not None:
            raise ValueError(
                "SmpMonitor: this accelerator has a monitor, which counts all its backward passes, whatever the model; "
                "a second one would count none or the other's: leave it out, or end the first one on all ranks with "
                "accelerator.monitor.end()"
            )
        handle = parallel_of(model)
        if accelerator.sharding and handle is None:
            raise ValueError(
                "SmpMonitor: the model is not prepared; give what accelerator.prepare(model, ...) returned"
            )
        if handle is not None and handle.pipeline is not None:
            raise ValueError(
                "SmpMonitor of a loop does not know pipeline stages; leave it out, or use SmpTrainer with "
                "SmpMonitorCallback"
            )
        self._will_watch(None)
        self.every_n_steps, self.step = every_n_steps, step
        self.latest: dict[str, float] = {}
        self._accelerator, self._device = accelerator, accelerator.device
        self._figures = figures_of_job(
            handle, self._device, step, peak_tflops, flops_per_sample
        )
        # Accelerate's wrapper has the real one.
        stepping = getattr(optimizer, "optimizer", optimizer)
        self._record: RunRecord | None = None
        if run_log is not None and accelerator.is_main_process:
            self._record = RunRecord(
                handle,
                [stepping],
                Path(run_log),
                step,
                accelerator.gradient_accumulation_steps,
            )
        self._reported = step
        self._evaluates = False
        self._samples = 0
        self._tokens: int | None = None
        # A loop says what it does by these three: forward, backward (through the
        # accelerator), step.
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            # Also where a forward fails: a loop may go on with a smaller batch.
            model.register_forward_hook(self._after_forward, always_call=True),
            after_each_step(stepping, self._after_step),
        ]
        accelerator.monitor = self

    def __reduce__(self) -> Any:
        """Leave it out, as None, where its accelerator is sent to another process."""
        return type(None), ()

    @property
    def straggler(self) -> Any:
        """The rank that the others waited for before the last report
        (:class:`smp_core.observe.step_times.Straggler`)."""
        return self._figures.straggler

    def _before_forward(
        self, model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        # The first forward of another mode stops the clock, or lets it run again.
        if model.training == self._evaluates:
            self._evaluates = not model.training
            (self._figures.pause if self._evaluates else self._figures.resume)()
        if model.training:
            self._figures.enter("forward")
            self._samples, self._tokens = sizes_of(args, kwargs)
            if self._samples:
                self._figures.measure_forward()

    def _after_forward(self, model: torch.nn.Module, *_: Any) -> None:
        if model.training:
            self._figures.end_forward()

    @contextlib.contextmanager
    def around_backward(self, loss: torch.Tensor) -> Iterator[None]:
        """Take a backward pass of ``loss`` into account; for
        :class:`SmpAccelerator`."""
        # The loss comes with the batch's weight in it, and is noted without.
        weight = self._accelerator.batch_weight
        if weight == 0:
            self._figures.count(0, 0)  # the batch is repeated
        else:
            self._figures.count(self._samples, self._tokens, loss / weight)
        self._samples, self._tokens = 0, None
        self._figures.enter("backward")
        try:
            yield
        finally:
            self._figures.enter(
                "optimizer" if self._accelerator.sync_gradients else "data"
            )

    def _after_step(self) -> None:
        self.step += 1
        self._figures.end_step()
        if self.step - self._reported >= self.every_n_steps:
            self._report()
        self._figures.start_clock()

    def _report(self) -> None:
        """Make a report. Collective: every rank calls it after the same optimizer
        step."""
        self.latest = self._report_of(self._figures, self.step, self._device)
        self._reported = self.step
        if self._record is not None:
            loss = {} if self._figures.loss is None else {"loss": self._figures.loss}
            self._record.write_step(
                self.step, {**loss, **self.latest}, self._figures.details
            )

    def end(self) -> None:
        """Report about the last steps and end the log; ``accelerator.end_training``
        does it. Collective."""
        if self.step > self._reported:
            self._report()
        self._figures.end()
        if self._record is not None:
            self._record.end(self.step)
        for hook in self._hooks:
            hook.remove()
        self._accelerator.monitor = None

"""MemoryWatch: the parts of a step's peak memory every so many optimizer steps, over
all ranks, in a log.

What the monitors of both faces use. A watched step is slower (docs/memory-reports.md
has figures), the others are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from smp_core.engine import ParallelModel
from smp_core.observe.job_figures import JobFigures
from smp_core.observe.memory_log import KINDS, StepMemory, append_to_log, draw
from smp_core.observe.memory_report import MemoryReport
from smp_core.observe.monitoring import peak_memory_gib
from smp_core.plan import GIB
from smp_core.run_log import note


class MemoryWatch:
    """A watch over peaks by kind, the highest of all ranks.

    Args:
        parallel: the parallelized model.
        optimizers: the optimizers whose states count.
        every_n_steps: >= 1; each step whose number it divides is watched.
        log: rank 0 adds a line for each watched step to this file
            (:mod:`smp_core.observe.memory_log`).
        step: optimizer steps that were taken before.

    Attributes:
        latest: figures of the last watched step in GiB: ``peak_parameters_gib``,
            ``peak_activations_gib``, ...; on CPU without ``peak_other_gib``, which is
            not known there.
        steps: the peaks of the watched steps, by number of the step.
    """

    def __init__(
        self,
        parallel: ParallelModel,
        optimizers: Sequence[Optimizer],
        every_n_steps: int,
        log: Path,
        step: int = 0,
    ) -> None:
        self._report = MemoryReport(parallel, optimizers)
        self._mesh = parallel.mesh
        self._every = every_n_steps
        self._log = log
        self._due = self._after(step)
        self._began: int | None = None
        self.latest: dict[str, float] = {}
        self.steps: dict[int, StepMemory] = {}

    def _after(self, step: int) -> int:
        # Every n-th step, counted from the beginning of training.
        return (step // self._every + 1) * self._every

    def is_due(self, step: int) -> bool:
        """Return whether :meth:`begin` is to be called now, after ``step`` optimizer
        steps."""
        # A watch that is under way lasts until its step ends.
        return self._began is None and step + 1 >= self._due

    def begin(self, step: int) -> None:
        """Begin to watch. Call it before the first forward of the step after number
        ``step``."""
        self._began = step
        self._report.begin()

    def end(self, step: int) -> None:
        """End the watch once the optimizer has stepped. Call it after a batch.

        Collective then: every rank watches the same steps.
        """
        if self._began is None or step == self._began:
            return
        # Another step has begun: the watched one is over.
        self._began, self._due = None, self._after(step)
        own = self._report.end()
        # The most of any rank, by kind.
        device, host = sorted(own.device), sorted(own.host)
        values = [own.device[kind] for kind in device]
        values += [own.host[kind] for kind in host]
        most = torch.tensor(values, dtype=torch.float64, device=self._mesh.device)
        if self._mesh.topology.world_size > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._mesh.world_group)
        most_bytes = [int(value) for value in most.tolist()]
        seen = StepMemory(
            dict(zip(device, most_bytes[: len(device)], strict=True)),
            dict(zip(host, most_bytes[len(device) :], strict=True)),
        )
        self.steps[step] = seen
        # Without an allocator to ask, "other" is not known.
        known = [
            kind
            for kind in KINDS
            if kind != "other" or self._mesh.device.type == "cuda"
        ]
        self.latest = {f"peak_{kind}_gib": seen.device[kind] / GIB for kind in known}
        if self._mesh.rank == 0:
            append_to_log(self._log, step, seen)
            note("memory", step=step, device=seen.device, host=seen.host)

    def abandon(self) -> None:
        """Stop watching a step that did not come to its end."""
        if self._began is not None:
            self._began = None
            self._report.abandon()

    def save_plot(self, path: str | Path) -> None:
        """Draw a stacked bar for each watched step, as a PNG (or in the format of the
        ending of ``path``).

        Raises:
            ValueError: no step has been watched, or matplotlib is not installed.
        """
        if not self.steps:
            raise ValueError(
                f"no step was watched yet; the next one is number {self._due}"
            )
        draw(self.steps, path)


class WatchesMemory:
    """A base of the monitors of both faces: the peak memory of a training run, and on
    request its parts."""

    def _will_watch(self, every_n_steps: int | None) -> None:
        """Take the option of the same name, before anything runs."""
        # Refused before a run begins, not inside one.
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(
                f"memory_every_n_steps={every_n_steps} is not a number of steps; allowed: 1 and more, None"
            )
        self.memory_every_n_steps = every_n_steps
        self._watch: MemoryWatch | None = None
        self._highest: dict[str, float] = {}

    def _start_watching(
        self,
        parallel: ParallelModel | None,
        optimizers: Sequence[Optimizer],
        log: Path,
        step: int,
        why_not: str,
    ) -> None:
        """Begin a training run: with a watch if one was asked for, and without the
        peaks of an earlier run.

        Args:
            step: optimizer steps taken before.
            why_not: the end of the error's message where nothing is sharded.

        Raises:
            ValueError: a watch was asked for and nothing is sharded.
        """
        # An earlier run's peak says nothing about this one.
        self._highest = {}
        self._abandon_watch()  # an earlier run may have failed inside a step
        self._watch = None
        if self.memory_every_n_steps is None:
            return
        # Without shards there are no kinds to count.
        if parallel is None:
            raise ValueError(
                f"{type(self).__name__}(memory_every_n_steps=...) {why_not}"
            )
        self._watch = MemoryWatch(
            parallel, optimizers, self.memory_every_n_steps, log, step
        )

    def _abandon_watch(self) -> None:
        """Stop watching a step that did not come to its end."""
        if self._watch is not None:
            self._watch.abandon()

    def _note_peak(self, device: torch.device) -> None:
        for name, value in peak_memory_gib(device).items():
            self._highest[name] = max(value, self._highest.get(name, 0.0))

    def _report_of(
        self, figures: JobFigures, step: int, device: torch.device
    ) -> dict[str, float]:
        """Return a report after ``step`` optimizer steps, with the highest memory so
        far and the parts of the last watched step's. Collective."""
        self._note_peak(device)
        report = figures.report(step, self._highest)
        return report if self._watch is None else report | self._watch.latest

    def _watch_if_due(self, step: int, device: torch.device) -> None:
        """Begin a watch if one is due. Call it before the first forward of the step
        after number ``step``."""
        if self._watch is not None and self._watch.is_due(step):
            self._note_peak(device)  # watching starts the allocator's own peak anew
            self._watch.begin(step)

    def save_memory_plot(self, path: str | Path) -> None:
        """Draw the parts of the watched steps' peaks as stacked bars, into a PNG or the
        format of the ending of ``path``.

        Raises:
            ValueError: no step has been watched, or matplotlib is not installed.
        """
        if self._watch is None:
            raise ValueError(
                f"no step was watched; write {type(self).__name__}(memory_every_n_steps=100)"
            )
        self._watch.save_plot(path)

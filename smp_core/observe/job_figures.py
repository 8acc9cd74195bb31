"""JobFigures: the rates and bytes of a whole job, from the counts of its ranks; the
core of both faces' monitors.

A face counts each batch of its rank, and asks for a report every so many optimizer
steps. A report adds up the counts of all ranks, with one small sum and one small
maximum, so that its figures are those of the job and not rank 0's times a guess. Each
of R ranks that share a sample counts it, so samples are divided by R; of its tokens and
its FLOPs each rank counts its own part.

Where hosts wait for collectives (on CPU) a report also tells what the parts of a step
take, and which rank the others wait for (:mod:`smp_core.observe.step_times`); with
pipeline stages also what each of them computes and how long it is idle.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smp_core.cluster import Axis, of_all_ranks
from smp_core.comm import LINK_CLASSES, LinkClass
from smp_core.engine import ParallelModel
from smp_core.observe.monitoring import (
    FlopMeasurement,
    ModelFlops,
    StepMeter,
    device_peak_flops,
)
from smp_core.observe.router_loads import RouterLoads
from smp_core.observe.step_times import (
    PARTS,
    Part,
    StepTimes,
    Straggler,
    find_straggler,
)
from smp_core.pipeline import (
    Computation,
    Direction,
    Pipeline,
    draw_timeline,
    idle_shares,
    unmeasured,
)

logger = logging.getLogger("smp")

BYTES: dict[LinkClass, str] = {
    "inter": "bytes_between_nodes",
    "intra": "bytes_inside_nodes",
}
"""The names of the figures of bytes, by link class."""

_MOST_RANKS = 64  # whose times by part are told: those that worked longest


@dataclass(eq=False)
class _Counts:
    """The counts of this rank since the last report."""

    samples: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0
    batches: float = 0.0
    loss: float | Tensor = 0.0


class JobFigures:
    """The figures of one training run.

    Args:
        parallel: the handle of the sharded model, for bytes; None: bytes are not
            reported.
        device: the device of this rank.
        world_size: all ranks; each is one device.
        data_size: ranks that read different samples.
        over_ranks: (values, "sum" or "max") -> the sum or the maximum of each value
            over all ranks. Collective.
        peak_tflops: the device's peak in TFLOPS, for MFU; None: the known dense
            bfloat16 peak of the device, if any.
        flops_per_sample: model FLOPs of one sample's training step; None: measured by
            :meth:`measure_forward`.
        step: optimizer steps taken before.
    """

    def __init__(
        self,
        parallel: ParallelModel | None,
        *,
        device: torch.device,
        world_size: int,
        data_size: int,
        over_ranks: Callable[[list[float], str], list[float]],
        peak_tflops: float | None = None,
        flops_per_sample: float | None = None,
        step: int = 0,
    ) -> None:
        # Without a meter, or with one that is off, bytes are not counted.
        self._meter = (
            parallel.meter if parallel is not None and parallel.meter.enabled else None
        )
        self._nodes = 1 if parallel is None else parallel.mesh.topology.num_nodes
        # Ranks that share samples all count them; sums are divided by their number.
        self._sharing = world_size // data_size
        # Tensor ranks and stages see all tokens of a batch, context ranks their own.
        self._same_tokens = (
            1
            if parallel is None
            else parallel.mesh.tensor_degree * parallel.mesh.pipeline_degree
        )
        self._over_ranks = over_ranks
        peak = device_peak_flops(device) if peak_tflops is None else peak_tflops * 1e12
        # Counts are added up over the ranks before they are booked, so to the meter
        # there is one data rank.
        self._rates = StepMeter(
            world_size=world_size, peak_flops_per_device=peak, window=1
        )
        # Optimizer steps since the clock was last read.
        self._clock_runs, self._clocked = False, 0
        self._parallel, self._world_size = parallel, world_size
        # Hosts of accelerators run ahead, so their waits say nothing.
        self._times = (
            StepTimes() if parallel is not None and device.type == "cpu" else None
        )
        self.straggler: Straggler | None = None
        """The rank that the others waited for in most steps before the last report."""
        self.loss: float | None = None
        """The mean of the losses that were counted before the last report, over batches
        and ranks."""
        self._by_rank: dict[int, list[float]] = {}
        # Counts of routers are made on the device and read at each report.
        self._routers = RouterLoads(
            () if parallel is None else (parallel.module,),
            share_models=parallel is not None and parallel.pipeline is not None,
            device=device,
        )
        self._pipeline: Pipeline | None = None
        if parallel is not None and parallel.pipeline is not None:
            # The pipeline calls `_around` for each computation of this stage.
            self._pipeline = parallel.pipeline
            self._pipeline.times.around = self._around
        self._timeline: list[list[Computation]] = []
        self._steps_of_stages = 0
        # This rank's part of a shared sample.
        self._flops_per_sample = (
            None if flops_per_sample is None else flops_per_sample / self._sharing
        )
        self._measurement: FlopMeasurement | None = None
        self._measures = False
        self._forward_flops = 0
        self._since = _Counts()
        self._samples = 0.0
        self._tokens_known = True
        self._step = step
        self._sent = self._sent_bytes()

    @property
    def details(self) -> dict[str, Any]:
        """Return what the last report knows of ranks (seconds of their steps by part,
        on average) and of routers."""
        # Of many ranks, those that worked longest are told.
        longest = sorted(self._by_rank, key=lambda rank: -sum(self._by_rank[rank]))[
            :_MOST_RANKS
        ]
        times = {str(rank): self._by_rank[rank] for rank in sorted(longest)}
        details = {"seconds_by_rank": times, "routers": self._routers.by_router}
        return {name: value for name, value in details.items() if value}

    @property
    def counts_bytes(self) -> bool:
        """Return whether reports have bytes between nodes and inside them."""
        return self._meter is not None

    def measure_forward(self) -> None:
        """Count the FLOPs of the operations from here to :meth:`end_forward`, until
        those of a sample are known. With pipeline stages backward passes run in
        between; they do not count."""
        self._measures = self._flops_per_sample is None
        # Pipeline stages measure each forward pass by itself (`_around`).
        if self._measures and self._pipeline is None:
            # One that has not ended was of a forward that failed, or of a batch that a
            # hook has skipped.
            if self._measurement is not None:
                self._measurement.stop()
            self._measurement = FlopMeasurement()
            self._measurement.start()

    def end_forward(self) -> None:
        """End :meth:`measure_forward`, if it runs. A batch may have several forward
        passes."""
        self._measures = False
        # Several forward passes of one batch add up.
        if self._measurement is not None:
            self._forward_flops += self._measurement.stop().forward
            self._measurement = None

    @contextlib.contextmanager
    def _around(self, direction: Direction) -> Iterator[None]:
        """Take the time and the FLOPs of a pipeline stage's computation."""
        self.enter(direction)
        # Outside of the measurement a computation costs no extra time.
        if not (self._measures and direction == "forward"):
            yield
            return
        with FlopMeasurement() as measured:
            yield
        self._forward_flops += measured.flops.forward

    def count(
        self, samples: int, tokens: int | None, loss: Tensor | None = None
    ) -> None:
        """Count a batch of this rank.

        Args:
            samples: its samples; those that several ranks share count on each of them.
            tokens: its tokens on this rank; None: not known.
            loss: a scalar, which stays on its device until the report; None: not known.
        """
        self.end_forward()
        # Measured on the first batch, and then used for all.
        if self._flops_per_sample is None and samples:
            self._flops_per_sample = (
                ModelFlops({"forward": self._forward_flops}).training / samples
            )
        self._forward_flops = 0
        self._tokens_known = self._tokens_known and tokens is not None
        self._samples += samples
        self._since.samples += samples
        # Ranks that see the same tokens count a share each.
        self._since.tokens += (tokens or 0) / self._same_tokens
        self._since.flops += samples * (self._flops_per_sample or 0.0)
        if loss is not None:
            self._since.batches += 1
            # The loss stays on its device: reading it would stop the device. A sum of
            # many bfloat16 losses would stand still at some hundreds.
            self._since.loss = self._since.loss + loss.detach().float()

    def start_clock(self) -> None:
        """Start the clock, unless it runs. Call it after the first optimizer step,
        which has the warm-up in it."""
        # Everything until now belongs to warm-up.
        if not self._clock_runs:
            self._rates.start()
            if self._times is not None:
                self._times.take()
            if self._pipeline is not None:
                self._pipeline.times.take()
                self._steps_of_stages = 0
            since = self._since
            # Losses are no rates.
            self._since = _Counts(batches=since.batches, loss=since.loss)
            self._clock_runs, self._clocked = True, 0

    def pause(self) -> None:
        """Stop the clock until :meth:`resume`: for evaluations and saves."""
        self.end_forward()  # of a batch that a hook has skipped
        self._rates.pause()
        self.enter(None)

    def resume(self) -> None:
        """Let the clock run again."""
        self._rates.resume()
        self.enter("data")

    def enter(self, part: Part | None) -> None:
        """Begin a part of the step."""
        if self._times is not None:
            self._times.enter(part)

    def end_step(self) -> None:
        """End the optimizer step."""
        self._clocked += 1
        if self._times is not None:
            self._times.end_step()
        self._steps_of_stages += 1

    def report(self, step: int, highest: Mapping[str, float]) -> dict[str, float]:
        """Add up the counts since the last report. Collective: every rank calls it
        after the same optimizer step.

        Args:
            step: optimizer steps taken.
            highest: figures of which the highest of all ranks is reported.

        Returns:
            figures by name: ``samples`` since the start, the rates of
                :class:`smp_core.observe.monitoring.Throughput`
            and ``seconds_step`` once the clock runs, ``highest`` over all ranks, bytes
            per optimizer step and node, ``seconds_forward`` and the like: of a step,
            waits for other ranks apart, the mean of all ranks; ``seconds_waiting``, the
            rest of the step; ``straggler_rank`` if there is one; and of pipeline stages
            ``seconds_stage_0`` and the like, ``bubble_share_stage_0``,
            ``bubble_share``; and those of
            :meth:`smp_core.observe.router_loads.RouterLoads.report`.
        """
        self.enter(None)  # waiting for the others' reports is no work
        # The sums over all ranks.
        sent = self._sent_bytes()
        sent_since = [sent[link] - self._sent[link] for link in LINK_CLASSES]
        since = self._since
        own = [
            self._samples,
            since.samples,
            since.tokens,
            since.flops,
            since.batches,
            float(since.loss),
            *sent_since,
        ]
        # One sum for all of them: a report costs two small collectives.
        all_samples, samples, tokens, flops, batches, loss, *bytes_sent = (
            self._over_ranks(own, "sum")
        )
        # Shared samples were counted once for each rank that shares them.
        figures = {"samples": all_samples / self._sharing}
        self.loss = loss / batches if batches else None

        if self._clock_runs:
            known_tokens = round(tokens) if self._tokens_known else None
            # The sums become a step of one data rank.
            self._rates.step(
                round(samples / self._sharing), known_tokens, flops or None
            )
            throughput = self._rates.throughput()
            figures |= {} if throughput is None else throughput.as_dict()
            if throughput is not None and samples and self._clocked:
                seconds = samples / self._sharing / throughput.samples_per_second
                figures["seconds_step"] = seconds / self._clocked
            self._clocked = 0

        # Maxima, such as memory, are a second collective.
        maxima = self._over_ranks(list(highest.values()), "max")
        figures |= dict(zip(highest, maxima, strict=True))

        steps = max(step - self._step, 1)
        if self._meter is not None:
            # Bytes to other nodes are those of one node, for one step.
            for link, value in zip(LINK_CLASSES, bytes_sent, strict=True):
                figures[BYTES[link]] = value / self._nodes / steps
        self._step, self._sent, self._since = step, sent, _Counts()
        figures |= (
            self._report_times()
            | self._report_stages()
            | self._routers.report(self._over_ranks)
        )
        # The parts of the step, and what is left of it: waiting.
        if "seconds_step" in figures and "seconds_data" in figures:
            worked = sum(figures[f"seconds_{part}"] for part in PARTS)
            figures["seconds_waiting"] = max(figures["seconds_step"] - worked, 0.0)
        self.enter("data")
        return figures

    def _report_times(self) -> dict[str, float]:
        """Tell all ranks what the parts of this rank's steps took. Collective."""
        # On an accelerator no rank has times, and there is no table.
        own = [] if self._times is None else self._times.take()
        if self._parallel is None or not own:
            return {}
        # Each rank fills its own place of a table, which a sum makes whole: [ranks,
        # steps, parts].
        mesh, size = self._parallel.mesh, len(own) * len(PARTS)
        told = [0.0] * (self._world_size * size)
        told[mesh.rank * size : (mesh.rank + 1) * size] = [
            value for step in own for value in step
        ]
        everyone = torch.tensor(self._over_ranks(told, "sum")).view(
            self._world_size, len(own), len(PARTS)
        )
        figures = dict(
            zip(
                (f"seconds_{part}" for part in PARTS),
                everyone.mean((0, 1)).tolist(),
                strict=True,
            )
        )
        # A straggler is a warning when it is new.
        self._by_rank = dict(enumerate(everyone.mean(1).tolist()))
        before = self.straggler
        self.straggler = find_straggler(everyone.tolist())
        if self.straggler is None:
            return figures
        if mesh.rank == 0:
            is_new = before is None or (before.rank, before.part) != (
                self.straggler.rank,
                self.straggler.part,
            )
            node = (
                mesh.topology.node_of(self.straggler.rank) if self._nodes > 1 else None
            )
            logger.log(
                logging.WARNING if is_new else logging.INFO,
                self.straggler.in_words(node),
            )
        return figures | {"straggler_rank": float(self.straggler.rank)}

    def _report_stages(self) -> dict[str, float]:
        """Tell all ranks what the pipeline stages computed since the last report.
        Collective."""
        if self._pipeline is None or self._times is None or not self._clock_runs:
            return {}
        assert self._parallel is not None
        # Two numbers of each rank: seconds computed, and seconds that its batches took.
        times, mesh = self._pipeline.times, self._parallel.mesh
        told = [0.0] * (2 * self._world_size)
        told[2 * mesh.rank : 2 * mesh.rank + 2] = times.take()
        everyone = self._over_ranks(told, "sum")
        of_ranks = list(zip(everyone[::2], everyone[1::2], strict=True))
        # Stages of a column belong together; columns are averaged.
        columns = []
        for ranks in mesh.layout.groups(Axis.PIPELINE):
            columns.append([of_ranks[rank] for rank in ranks])
        shares = idle_shares(columns)
        steps, self._steps_of_stages = max(self._steps_of_stages, 1), 0
        figures = {"bubble_share": sum(shares) / len(shares)}
        for stage, share in enumerate(shares):
            seconds = [column[stage][0] for column in columns]
            figures[f"seconds_stage_{stage}"] = sum(seconds) / len(seconds) / steps
            figures[f"bubble_share_stage_{stage}"] = share
        # Objects: stages may have computed unlike numbers of chunks.
        self._timeline = of_all_ranks(times.last, mesh.column.host)
        return figures

    def end(self) -> None:
        """End the run: stages and routers are not measured for these figures any
        more."""
        self.end_forward()
        self._routers.end()
        # Another monitor may have taken over meanwhile.
        if self._pipeline is not None and self._pipeline.times.around == self._around:
            self._pipeline.times.around = unmeasured

    def save_timeline(self, path: str | Path) -> None:
        """Do what :meth:`DrawsTimeline.save_timeline` says."""
        if not any(self._timeline):
            raise ValueError(
                "no timeline of pipeline stages: it needs pipeline_parallel_degree above 1, CPU ranks, and a report "
                "after the second optimizer step"
            )
        draw_timeline(self._timeline, path)

    def _sent_bytes(self) -> dict[LinkClass, float]:
        """Return the bytes that this rank has sent in closed steps, by link class."""
        return (
            dict.fromkeys(LINK_CLASSES, 0.0)
            if self._meter is None
            else self._meter.totals_by_link()
        )


def check_peak(peak_tflops: float | None) -> None:
    """Refuse a peak that is not positive.

    Raises:
        ValueError: names the peak, and the fix.
    """
    if peak_tflops is not None and peak_tflops <= 0:
        raise ValueError(
            f"peak_tflops={peak_tflops} is no peak; give TFLOPS of one device, or leave it out"
        )


class DrawsTimeline:
    """A base of the monitors of both faces: a picture of what pipeline stages
    computed."""

    _figures: JobFigures | None = None

    def save_timeline(self, path: str | Path) -> None:
        """Draw when each pipeline stage computed in the last batch before the last
        report.

        Args:
            path: the picture's; the ending says which format (png, svg, pdf).

        Raises:
            ValueError: nothing was reported about stages, matplotlib is not installed.
        """
        if self._figures is None:
            raise ValueError(
                f"no timeline of pipeline stages: {type(self).__name__} has seen no training yet"
            )
        self._figures.save_timeline(path)

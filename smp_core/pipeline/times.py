"""StageTimes: when a pipeline stage computes, and how long it waits for other stages
with nothing to compute.

The bubble of a batch lies between its first forward pass and its last backward pass on
any stage. Stages begin a batch together
(:class:`smp_core.pipeline.batches.SameBatches`), so that seconds since then mean the
same on all of them. Times are the host's: on an accelerator, whose host runs ahead,
they say nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from smp_core.outside import matplotlibs_figure

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Computation:
    """A chunk of a stage that was computed for one micro-batch.

    Attributes:
        begin, end: seconds since the stage began the batch.
    """

    direction: Direction
    chunk: int
    micro_batch: int
    begin: float
    end: float


def unmeasured(_: Direction) -> AbstractContextManager[None]:
    """Measure nothing of a computation but its times."""
    return nullcontext()


class StageTimes:
    """The times of one stage.

    Attributes:
        last: the computations of the last batch, in order.
        around: entered around every computation, to measure more of it.
    """

    def __init__(self) -> None:
        self.last: list[Computation] = []
        self.around: Callable[[Direction], AbstractContextManager[None]] = unmeasured
        self._batch: list[Computation] | None = None
        self._began = self._computed = self._lasted = 0.0

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Note a batch: the computations inside are its own."""
        self._batch, self._began = [], time.perf_counter()
        try:
            yield
            self.last = self._batch
        finally:
            self._batch = None
        # A batch that failed counts in neither sum.
        self._computed += sum(each.end - each.begin for each in self.last)
        self._lasted += self.last[-1].end

    @contextlib.contextmanager
    def computing(
        self, direction: Direction, chunk: int, micro_batch: int
    ) -> Iterator[None]:
        """Note a computation; outside of :meth:`batch` (evaluation) it is none of a
        training step's."""
        if self._batch is None:
            yield
            return
        # Seconds since the batch began, which stages do together.
        begin = time.perf_counter() - self._began
        with self.around(direction):
            yield
        end = time.perf_counter() - self._began
        self._batch.append(Computation(direction, chunk, micro_batch, begin, end))

    def take(self) -> tuple[float, float]:
        """Return the seconds of computation since the last call, and those from the
        beginnings of batches to the ends of their last computations here."""
        taken = self._computed, self._lasted
        self._computed = self._lasted = 0.0
        return taken


def idle_shares(columns: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Return for each stage the share of a batch's time in which it computes nothing.

    Args:
        columns: for each set of ranks that take batches through all stages together,
            what :meth:`StageTimes.take` returned on each of its stages.
    """
    # A batch ends where the last of its stages ends.
    lasted, computed = 0.0, [0.0] * len(columns[0])
    for column in columns:
        lasted += max(seconds for _, seconds in column)
        for stage, (seconds, _) in enumerate(column):
            computed[stage] += seconds
    return [1.0 - seconds / lasted if lasted else 0.0 for seconds in computed]


def draw_timeline(stages: Sequence[Sequence[Computation]], path: str | Path) -> None:
    """Draw what each stage computed in one batch, by time.

    Args:
        stages: the computations of each.
        path: the picture's; the ending says which format (png, svg, pdf).

    Raises:
        ValueError: matplotlib is not installed.
    """
    # One bar for each computation, in the row of its stage.
    chunks = 1 + max(each.chunk for stage in stages for each in stage)
    figure = matplotlibs_figure()(
        figsize=(12, 0.8 + 0.6 * len(stages)), layout="constrained"
    )
    axes = figure.subplots()
    for number, stage in enumerate(stages):
        for each in stage:
            # Later chunks of a stage are darker.
            depth = 0.35 + 0.5 * (each.chunk // len(stages)) / max(
                chunks // len(stages) - 1, 1
            )
            colour = (
                (1 - depth, 1 - depth / 2, 1.0)
                if each.direction == "forward"
                else (1.0, 1 - depth / 2, 1 - depth)
            )
            axes.barh(
                number,
                each.end - each.begin,
                left=each.begin,
                color=colour,
                edgecolor="black",
                linewidth=0.5,
            )
            middle = (each.begin + each.end) / 2
            axes.text(
                middle,
                number,
                str(each.micro_batch),
                ha="center",
                va="center",
                fontsize=8,
            )
    axes.set_yticks(
        range(len(stages)), [f"stage {number}" for number in range(len(stages))]
    )
    axes.invert_yaxis()
    axes.set_xlabel(
        "seconds since the batch began; numbers are micro-batches, forward blue and backward orange"
    )
    figure.savefig(path)

"""StepTimes: the seconds of a rank's steps by part, without those in which it waits for
other ranks; and who is slow.

Ranks of one job take the same time for a step, because all wait for the slowest. What
tells them apart is the time in which they do not wait: the slowest has most of it.
Waits are those that :mod:`smp_core.watch.whereabouts` is told of, on the host; on an
accelerator, whose host runs ahead, they say nothing, and nothing is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from smp_core.watch import here

Part = Literal["data", "forward", "backward", "optimizer"]
PARTS: tuple[Part, ...] = ("data", "forward", "backward", "optimizer")
# Steps of which each rank tells its times in a report: the last ones.
KEPT = 20
# A rank is slow in a step when it works longer than the others by this share of what
# they work; it is named when it is so in more than half of the steps of a report, which
# has at least _FEWEST.
_SHARE = 0.1
_FEWEST = 3


class StepTimes:
    """The times of this rank. A part begins with :meth:`enter` and lasts until the next
    one begins."""

    def __init__(self) -> None:
        self._steps: list[list[float]] = []
        self._sums = [0.0] * len(PARTS)
        self._part: int | None = None
        self._since = self._waited = 0.0

    def enter(self, part: Part | None) -> None:
        """Begin a part of a step; None: what follows is part of no step (evaluations,
        saves)."""
        now, waited = time.perf_counter(), here.waited
        if self._part is not None:
            # Seconds of this part: all that passed, without waiting.
            self._sums[self._part] += (now - self._since) - (waited - self._waited)
        self._part = None if part is None else PARTS.index(part)
        self._since, self._waited = now, waited

    def end_step(self) -> None:
        """End an optimizer step; the data of the next one begin."""
        self.enter("data")
        self._steps.append(self._sums)
        # The last steps, which a report tells.
        del self._steps[:-KEPT]
        self._sums = [0.0] * len(PARTS)

    def take(self) -> list[list[float]]:
        """Return the seconds of the steps since the last call, at most KEPT: of each
        step by part."""
        taken, self._steps = self._steps, []
        return taken


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for.

    Attributes:
        rank: its number.
        part: of the step in which it takes longest beside the others.
        share: seconds of its work beyond the others', as a share of theirs.
        slow, steps: the steps in which it was the slowest, of how many.
    """

    rank: int
    part: Part
    share: float
    slow: int
    steps: int

    def in_words(self, node: int | None) -> str:
        """Return one line for people."""
        place = "" if node is None else f" (node {node})"
        return (
            f"straggler: rank {self.rank}{place}, {self.part}, +{100 * self.share:.0f} %, "
            f"{self.slow} of {self.steps} steps"
        )


def find_straggler(of_ranks: Sequence[Sequence[Sequence[float]]]) -> Straggler | None:
    """Find the rank that works longest in most steps, and in which part.

    Args:
        of_ranks: for each rank, for each step, seconds by part.

    Returns:
        None if there is none, or no other rank.
    """
    ranks, steps = len(of_ranks), len(of_ranks[0])
    if ranks < 2 or steps < _FEWEST:
        return None
    slow = [0] * ranks
    # The slowest of each step, and whether it stands out.
    for step in range(steps):
        worked = [sum(each[step]) for each in of_ranks]
        slowest = max(range(ranks), key=worked.__getitem__)
        others = statistics.median(worked[:slowest] + worked[slowest + 1 :])
        slow[slowest] += worked[slowest] > (1 + _SHARE) * others
    rank = max(range(ranks), key=slow.__getitem__)
    # Half of the steps and no more: a rank that is slow now and then is none.
    if slow[rank] * 2 <= steps:
        return None
    own = _by_part(of_ranks[rank])
    # In which part it works longer than the others usually do.
    others_by_part = [
        _by_part(each) for number, each in enumerate(of_ranks) if number != rank
    ]
    usual = [statistics.median(values) for values in zip(*others_by_part, strict=True)]
    more = [mine - theirs for mine, theirs in zip(own, usual, strict=True)]
    part = PARTS[max(range(len(PARTS)), key=more.__getitem__)]
    return Straggler(
        rank, part, sum(more) / sum(usual) if sum(usual) else 0.0, slow[rank], steps
    )


def _by_part(steps: Sequence[Sequence[float]]) -> list[float]:
    return [sum(values) for values in zip(*steps, strict=True)]

"""The interval between saves that loses the least time, from measured costs and a mean
time between failures.

With a save that costs d seconds and failures M seconds apart on average, the best time
between the end of one save and the start of the next is, to first order, sqrt(2 d M)
(Young, CACM 17(9), 1974); Daly (Future Generation Computer Systems 22(3), 2006, eq. 20)
adds the higher-order terms used here:

    sqrt(2 d M) * (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d     for d < 2M,      M otherwise

d is the time for which training stands still: with asynchronous saves that is staging,
not writing.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from datetime import timedelta

from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.ranks import Ranks

logger = logging.getLogger("smp")

_FIRST_STEPS = 10  # until the first save, which is the first measurement


def best_interval(save_seconds: float, seconds_between_failures: float) -> float:
    """Compute the seconds of training between two saves that lose the least time.

    Args:
        save_seconds: the time for which training stands still for a save.
        seconds_between_failures: mean time between failures of the whole job.

    Raises:
        CheckpointError: a time that is not above 0.
    """
    if not (save_seconds > 0 and seconds_between_failures > 0):
        raise CheckpointError(
            f"save_seconds={save_seconds} and seconds_between_failures={seconds_between_failures} must be above 0"
        )
    half = save_seconds / (2 * seconds_between_failures)
    # Failures come faster than two saves take: no interval helps, and M is the limit.
    if half >= 1:
        return seconds_between_failures
    return (
        math.sqrt(2 * save_seconds * seconds_between_failures)
        * (1 + math.sqrt(half) / 3 + half / 9)
        - save_seconds
    )


_HISTORY = 50  # steps, and saves, in the medians


class IntervalEstimate:
    """The interval in steps, from the medians of recent measurements.

    Args:
        seconds_between_failures: mean time between failures of the whole job. One
            node's, divided by the nodes.
    """

    def __init__(self, seconds_between_failures: float) -> None:
        best_interval(1.0, seconds_between_failures)  # refuses what is not a time
        self.seconds_between_failures = seconds_between_failures
        self._steps: deque[float] = deque(maxlen=_HISTORY)
        self._saves: deque[float] = deque(maxlen=_HISTORY)

    def add_step(self, seconds: float) -> None:
        """Record the time of an optimizer step."""
        self._steps.append(seconds)

    def add_save(self, seconds: float) -> None:
        """Record the seconds for which a save kept training waiting."""
        self._saves.append(seconds)

    def steps(self) -> int | None:
        """Return the steps between two saves, at least 1; None until a step and a save
        have been measured.

        Times differ a little from rank to rank: one rank decides and tells the others.
        """
        if not self._steps or not self._saves:
            return None
        # The floors keep a time that was measured as 0 from dividing.
        interval = best_interval(
            max(statistics.median(self._saves), 1e-6), self.seconds_between_failures
        )
        return max(1, round(interval / max(statistics.median(self._steps), 1e-9)))


class SaveSchedule:
    """A schedule of saves: every N optimizer steps, or at the best interval for the
    measurements so far.

    The interval is found anew after each save, by all ranks together, so that between
    two saves no rank has to ask another one.

    Args:
        interval: steps between two saves, or ``"auto"``.
        between_failures: mean time between failures of the whole job, in seconds or as
            a timedelta; needed for ``"auto"``. One node's, divided by the number of
            nodes.

    Attributes:
        interval: steps between the save before and the next one.

    Raises:
        CheckpointError: an interval below 1, or ``"auto"`` without a time between
            failures.
    """

    def __init__(
        self, interval: int | str, between_failures: float | timedelta | None = None
    ) -> None:
        self._estimate: IntervalEstimate | None = None
        if isinstance(between_failures, timedelta):
            between_failures = between_failures.total_seconds()
        if interval == "auto":
            if between_failures is None:
                raise CheckpointError(
                    "checkpoint_interval='auto' needs mean_time_between_failures of the whole job in seconds: of one "
                    "node, divided by the number of nodes; or write a number of steps"
                )
            self._estimate = IntervalEstimate(between_failures)
            interval = _FIRST_STEPS
        # True is an int in Python, and no number of steps.
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise CheckpointError(
                f"checkpoint_interval={interval!r} is neither 'auto' nor a number of steps from 1 on"
            )
        self.interval = interval
        self._since = 0
        self._clock: float | None = None

    def step(self) -> bool:
        """Count an optimizer step that has just ended; return whether to save now."""
        now = time.perf_counter()
        # The first step has no beginning that was measured, and compiles.
        if self._estimate is not None and self._clock is not None:
            self._estimate.add_step(now - self._clock)
        self._clock = now
        self._since += 1
        return self._since >= self.interval

    def saved(self, seconds: float) -> None:
        """Record a save, and decide when the next one is due. Collective with
        ``"auto"``.

        Args:
            seconds: for which this rank's training stood still.
        """
        self._since = 0
        if self._estimate is not None:
            # The slowest rank is what all wait for.
            self._estimate.add_save(max(Ranks().gather(seconds)))
            steps = self._estimate.steps()
            # Medians differ a little from rank to rank, and all have to save at the
            # same step.
            agreed = Ranks().on_first("checkpoint_interval='auto'", lambda: steps)
            if agreed is not None and agreed != self.interval:
                logger.info(
                    "checkpoint_interval='auto': %d steps until the next save", agreed
                )
            self.interval = agreed or self.interval
        # The save itself is no step.
        self._clock = time.perf_counter()

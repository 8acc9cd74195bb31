"""How often to save: the period that loses the least time, from measured costs and a mean time between failures.

With a save that costs d seconds and failures M seconds apart on average, the best time between the end of one save and
the start of the next is, to first order, sqrt(2 d M) (Young, CACM 17(9), 1974); Daly (Future Generation Computer
Systems 22(3), 2006, eq. 20) adds the higher-order terms used here:

    sqrt(2 d M) * (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d     for d < 2M,      M otherwise
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from smp_core.checkpoint.layout import CheckpointError


def best_interval(save_seconds: float, seconds_between_failures: float) -> float:
    """Seconds of training between two saves.

    Args:
        save_seconds: how long training stands still for a save.
        seconds_between_failures: mean time between failures of the whole job.

    Raises:
        CheckpointError: a time that is not above 0.
    """
    if not (save_seconds > 0 and seconds_between_failures > 0):
        raise CheckpointError(
            f"save_seconds={save_seconds} and seconds_between_failures={seconds_between_failures} must be above 0"
        )
    half = save_seconds / (2 * seconds_between_failures)
    if half >= 1:
        return seconds_between_failures
    return math.sqrt(2 * save_seconds * seconds_between_failures) * (1 + math.sqrt(half) / 3 + half / 9) - save_seconds


class IntervalEstimate:
    """The interval in steps, from the medians of what was measured lately.

    Args:
        seconds_between_failures: mean time between failures of the whole job. One node's, divided by the nodes.
        history: how many steps and saves the medians are over.
    """

    def __init__(self, seconds_between_failures: float, history: int = 50) -> None:
        best_interval(1.0, seconds_between_failures)  # refuses what is not a time
        self.seconds_between_failures = seconds_between_failures
        self._steps: deque[float] = deque(maxlen=history)
        self._saves: deque[float] = deque(maxlen=history)

    def add_step(self, seconds: float) -> None:
        """Record the time of an optimizer step."""
        self._steps.append(seconds)

    def add_save(self, seconds: float) -> None:
        """Record how long a save kept training waiting."""
        self._saves.append(seconds)

    def steps(self) -> int | None:
        """Steps between two saves, at least 1; None until a step and a save have been measured.

        Times differ a little from rank to rank: one rank decides and tells the others.
        """
        if not self._steps or not self._saves:
            return None
        interval = best_interval(max(statistics.median(self._saves), 1e-6), self.seconds_between_failures)
        return max(1, round(interval / max(statistics.median(self._steps), 1e-9)))

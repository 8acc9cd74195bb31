"""Where this rank is: what it waits for, and otherwise the innermost line of user code, for whoever waits for it.

Whoever communicates notes it here; the thread that gives signs of life
(:mod:`smp_core.liveness`) looks whether anything has happened since it last looked, and reads the main thread's stack
(``sys._current_frames``, the only way to that of another thread) only where nothing has.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

# Parts of file names of code that is not the user's.
_LIBRARIES = (
    *("site-packages", "dist-packages", os.path.dirname(os.__file__), "<frozen"),
    *(os.path.join(os.sep, name, "") for name in ("smp_core", "lightning_smp", "accelerate_smp")),
)
# Parts of file names, and what a rank does there that is not in user code. The innermost frame decides first.
_ACTIVITIES = {
    os.path.join("torch", "utils", "data", ""): "data loading",
    os.path.join("smp_core", "checkpoint", ""): "a checkpoint",
}
_COMMUNICATION = (
    *(os.path.join("torch", "distributed", name) for name in ("distributed_c10d", "_functional_collectives")),
    *(os.path.join("smp_core", name) for name in (f"comm{os.sep}", "meeting")),
)
# Numbers of collectives that a rank which waits shows to the others, to find where they went apart.
_SHOWN = 2048


class Whereabouts:
    """The place of this process: what it does, and since when.

    Attributes:
        least: seconds that nobody is said to wait below.
        recent: returns what was issued since all ranks last compared, as :mod:`smp_core.comm.issued` keeps it.
        describe: says in words what one of those numbers means.
        peers: the ranks that issue the same.
        micro_batch: of the present window, from 1.
        events: how often something was begun or ended that is noted.
        waited: seconds in all that the host waited.
        doing: says what this rank waits for; None: for nothing.
        window_began: when the first pass of the present window did; None: it has not.
    """

    def __init__(self) -> None:
        self.least = 5.0
        self.recent: Callable[[], list[int]] = list
        self.describe: Callable[[int | None], str] = str
        self.peers: tuple[int, ...] = ()
        self.micro_batch = 1
        self.events = 0
        self.waited = 0.0
        self.doing: Callable[[], str] | None = None
        self._windows: deque[float] = deque(maxlen=50)
        self.window_began: float | None = None
        self._seen: tuple[int, Callable[[], str] | None] = (-1, None)
        self._since = time.monotonic()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Note that this rank waits for others in the lines inside; ``what`` says in what."""
        outer, self.doing = self.doing, lambda: what
        self.events += 1
        began = perf_counter()
        try:
            yield
        finally:
            self.doing = outer
            if outer is None:
                self.waited += perf_counter() - began

    def in_window(self) -> None:
        """Note a forward or backward pass of a window."""
        if self.window_began is None:
            self.window_began = time.monotonic()

    def end_micro_batch(self) -> None:
        self.events += 1
        self.micro_batch += 1

    def end_window(self, measured: bool) -> None:
        """Note the end of a window, whose time counts for :meth:`patience` if it came to its end."""
        if measured and self.window_began is not None:
            self._windows.append(time.monotonic() - self.window_began)
        self.window_began, self.micro_batch = None, 1

    def patience(self) -> float:
        """Return the seconds of waiting after which something is said: ten times the slowest of the last windows."""
        return max(self.least, 10 * max(self._windows, default=0.0))

    def look(self) -> dict[str, Any] | None:
        """Return where this rank stands still, as JSON; None if anything has happened since the last look. Called by
        one thread."""
        now = time.monotonic()
        seen = self.events, self.doing
        if seen != self._seen:
            self._seen, self._since = seen, now
            return None
        doing, frames = seen[1], _main_stack()
        waits = doing is not None or _communicates(frames)
        place = f"{doing()}" if doing is not None else place_of(frames, waits)
        found = {"for": now - self._since, "after": self.patience(), "waits": waits, "place": place}
        found["micro_batch"] = self.micro_batch
        recent = self.recent()
        if len(recent) <= _SHOWN:
            found["recent"], found["peers"] = recent, self.peers
        return found


here = Whereabouts()
"""Of this process."""


def innermost_user_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """Return the innermost line of user code of a stack, outermost frame first, as ``train.py:12 in training_step``;
    "" if there is none."""
    for frame in reversed(list(frames)):
        if not any(part in frame.filename for part in _LIBRARIES):
            return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"
    return ""


def place_of(frames: list[traceback.FrameSummary], waits: bool) -> str:
    """Say what a thread with this stack does, and from which line of user code."""
    line = innermost_user_line(frames)
    kind = next((what for f in reversed(frames) for part, what in _ACTIVITIES.items() if part in f.filename), "")
    if waits:
        kind = _innermost(frames).name
    if kind and line:
        return f"{kind} ({line})"
    if kind or line:
        return kind or line
    return f"{frames[-1].name} of {os.path.basename(frames[-1].filename)}" if frames else "no Python code"


def _communicates(frames: list[traceback.FrameSummary]) -> bool:
    return bool(frames) and any(part in _innermost(frames).filename for part in _COMMUNICATION)


def _innermost(frames: list[traceback.FrameSummary]) -> traceback.FrameSummary:
    """Return the innermost frame; of one that waits for a thread, who waits."""
    return next((frame for frame in reversed(frames) if frame.filename != threading.__file__), frames[-1])


def _main_stack() -> list[traceback.FrameSummary]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return [] if frame is None else traceback.extract_stack(frame)


def went_apart(sequences: Mapping[int, Sequence[int]], describe: Callable[[int | None], str]) -> str:
    """Say where ranks first issued different collectives; "" if nowhere.

    Args:
        sequences: the numbers that each rank issued, 0 at the end of a micro-batch.
        describe: says in words what a number means; None: that a rank issued nothing more.
    """
    for position in range(max(map(len, sequences.values()), default=0)):
        sides: dict[int | None, list[int]] = {}
        for rank, numbers in sequences.items():
            sides.setdefault(numbers[position] if position < len(numbers) else None, []).append(rank)
        if len(sides) > 1:
            micro_batch = list(next(iter(sequences.values()))[:position]).count(0) + 1
            said = "; ".join(f"{ranks_in_words(ranks)}: {describe(number)}" for number, ranks in sides.items())
            return f"in micro-batch {micro_batch}, {said}"
    return ""


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ranks as ``rank 7`` or ``ranks 0-6, 9``."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][-1:] = [runs[-1][-1], rank] if len(runs[-1]) == 1 else [rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank{'s' * (len(ordered) > 1)} {text}"

"""Long waits: a line on stderr about work that takes more than ten seconds, on one
rank, while it goes on.

    torch-smp: planning: 10 s so far
    torch-smp: planning: 20 s so far
    torch-smp: planning: 31 s in all

Nothing is written about work that is done sooner. The times between lines double, so
that an hour has ten of them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

FIRST_LINE = 10.0
"""Seconds until the first line."""


@contextlib.contextmanager
def long_wait(
    what: str,
    *,
    here: bool = True,
    say: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[threading.Event, float], bool] = threading.Event.wait,
) -> Iterator[None]:
    """Write a line about the work inside while it takes long, and how long it took in
    all.

    Args:
        what: the work, in words that follow "torch-smp: ".
        here: whether this process is the one that writes, as rank 0 is.
        say: gets each line; default: stderr.
        clock: seconds that only grow.
        pause: waits for the event that the work has ended, at most that many seconds;
            returns whether it has.
    """
    if not here:
        yield
        return
    # The line comes from a thread: the work inside knows nothing of it.
    wait = _LongWait(what, say or _to_stderr, clock, pause)
    try:
        yield
    finally:
        wait.end()


class _LongWait:
    """The thread that looks at the clock from now on, and what it has said."""

    def __init__(
        self,
        what: str,
        say: Callable[[str], None],
        clock: Callable[[], float],
        pause: Callable[[threading.Event, float], bool],
    ) -> None:
        self._what = what
        self._say = say
        self._clock = clock
        self._pause = pause
        self._began = clock()
        self._ended = threading.Event()
        self._has_said = False
        # A daemon: an interpreter that ends inside the work does not wait for it.
        self._thread = threading.Thread(
            target=self._run, name="smp-long-wait", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        # The thread is through before the last line, so lines keep their order.
        self._ended.set()
        self._thread.join()
        if self._has_said:
            self._say(f"torch-smp: {self._what}: {self._seconds():.0f} s in all")

    def _run(self) -> None:
        due = FIRST_LINE
        while not self._pause(self._ended, due - self._seconds()):
            seconds = self._seconds()
            if seconds >= due:
                self._say(f"torch-smp: {self._what}: {seconds:.0f} s so far")
                self._has_said = True
            # Work that stood still for long skips the lines that it missed.
            while due <= seconds:
                due *= 2

    def _seconds(self) -> float:
        return self._clock() - self._began


def _to_stderr(line: str) -> None:
    # In one piece: other threads and ranks write there, too.
    sys.stderr.write(line + "\n")
    sys.stderr.flush()

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
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[threading.Event, float], bool] = threading.Event.wait,
) -> Iterator[None]:
    """Write a line about the work inside while it takes long, and how long it took in
    all.

    Args:
        what: the work, in words that follow "torch-smp: ".
        here: whether this process is the one that writes, as rank 0 is.
        clock: seconds that only grow.
        pause: waits for the event that the work has ended, at most that many seconds;
            returns whether it has.
    """
    if not here:
        yield
        return
    began = clock()
    ended = threading.Event()
    has_said = False

    def look() -> None:
        nonlocal has_said
        due = FIRST_LINE
        while not pause(ended, due - (clock() - began)):
            seconds = clock() - began
            if seconds >= due:
                _say(f"{what}: {seconds:.0f} s so far")
                has_said = True
            # Work that stood still for long skips the lines that it missed.
            while due <= seconds:
                due *= 2

    # The line comes from a thread: the work inside knows nothing of it. A daemon: an
    # interpreter that ends inside the work does not wait for it.
    thread = threading.Thread(target=look, name="smp-long-wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        # The thread is through before the last line, so lines keep their order.
        ended.set()
        thread.join()
        if has_said:
            _say(f"{what}: {clock() - began:.0f} s in all")


def _say(line: str) -> None:
    # In one piece: other threads and ranks write there, too.
    sys.stderr.write(f"torch-smp: {line}\n")
    sys.stderr.flush()

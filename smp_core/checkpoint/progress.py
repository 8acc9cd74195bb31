"""The progress of a run through its restarts: steps and times in shared memory, and what a failure has cost.

Each rank writes a few numbers into its node's memory after each optimizer step. They outlive the process, so that the
next one can say how many steps were lost, how long it took to the next step, and which share of the time since the
run's beginning trained (ETTR, effective training time ratio). Times are wall-clock times, because they are of
different processes; where clocks of nodes differ, the report is off by as much.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass

from smp_core.checkpoint.memory_folder import NodeMemory

_NUMBERS = struct.Struct("<ddddqq")
_NAME = re.compile(r"progress-\d{5,}")


@dataclass(frozen=True)
class Past:
    """The progress of the processes before.

    Attributes:
        began: when the run began, in seconds since the epoch, as the other times.
        trained: seconds of training before the last processes, of steps that were not lost.
        started: when the last processes began to train.
        ended: the end of their last step.
        first, last: their first step and their last one.
    """

    began: float
    trained: float
    started: float
    ended: float
    first: int
    last: int

    def trained_until(self, step: int) -> float:
        """Return the seconds of training whose result is in the state of a step."""
        done = self.last - self.first
        kept = 0.0 if done <= 0 else min(max((step - self.first) / done, 0.0), 1.0)
        return self.trained + kept * max(self.ended - self.started, 0.0)


class Progress:
    """The numbers of this rank in its node's memory.

    Args:
        folder: the node's.
        rank: of the run.
    """

    def __init__(self, folder: NodeMemory, rank: int) -> None:
        self._path = os.path.join(folder.path, f"progress-{rank:05d}")
        self._numbers: mmap.mmap | None = None
        self._past = Past(time.time(), 0.0, 0.0, 0.0, 0, 0)

    def begin(self, step: int, past: Past | None) -> None:
        """Note that training begins.

        Args:
            step: optimizer steps before this.
            past: of the processes before; None: the run begins here.
        """
        now = time.time()
        began = self._past.began if past is None else past.began
        trained = 0.0 if past is None else past.trained_until(step)
        self._past = Past(began, trained, now, now, step, step)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _NUMBERS.size)
            self._numbers = mmap.mmap(descriptor, _NUMBERS.size)
        finally:
            os.close(descriptor)
        self.step(step)

    def step(self, step: int) -> None:
        """Note the end of an optimizer step."""
        if self._numbers is not None:
            past = self._past
            _NUMBERS.pack_into(self._numbers, 0, past.began, past.trained, past.started, time.time(), past.first, step)


def pasts(folder: NodeMemory) -> list[Past]:
    """Read what earlier processes of this node have left."""
    found = []
    for name in sorted(filter(_NAME.fullmatch, os.listdir(folder.path))):
        with contextlib.suppress(OSError, struct.error, RuntimeError):
            numbers = _NUMBERS.unpack(folder.folder().read(name, _NUMBERS.size))
            found.append(Past(*numbers))
    return found


def last_of(found: Iterable[Past]) -> Past | None:
    """Return the one of the last processes that came furthest: earlier ones may have been of more ranks, whose numbers
    nobody has written over since."""
    found = list(found)
    latest = max((past.started for past in found), default=0.0)
    return max((past for past in found if past.ended >= latest), key=lambda past: past.last, default=None)


def report_of(past: Past, step: int, source: str, now: float) -> str:
    """Describe what a failure has cost, after the first step behind it.

    Args:
        past: of the processes before.
        step: the optimizer step that was gone on from.
        source: where the state came from.
        now: the end of the first step.
    """
    lost = max(past.last - step, 0)
    share = past.trained_until(step) / max(now - past.began, 1e-9)
    return (
        f"RESUMED at step {step} from {source}: {lost} {'step' if lost == 1 else 'steps'} lost, "
        f"{now - past.ended:.1f} s from the last step before to the next one, {min(share, 1.0):.1%} of the "
        f"{now - past.began:.0f} s since the run began have trained (ETTR)"
    )

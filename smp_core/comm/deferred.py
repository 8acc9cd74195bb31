"""Asynchronous gathers made of messages, in one stage or several, for backends without
streams.

FSDP2 waits for the ``Work`` that a communication object returns when it needs the
parameters. The first stage, over the slow link if the group has one, is under way by
then; what is left, stages inside the node and decoding, runs in ``wait``. All ranks of
a partition group wait for the same gathers in the same order, so later stages need no
thread of their own.

FSDP2 tells a ``Work`` from nothing by its class,
``torch.distributed.distributed_c10d.Work``; there is no public base.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from time import perf_counter

from torch.distributed.distributed_c10d import Work

from smp_core.watch import here

_AT_ONCE = timedelta(0)


class Deferred(Work):
    """Runs ``finish`` once, when it is waited for.

    Attributes:
        place: describes what is waited for, for ranks that wait for this one; None: it
            is not shown to them.
    """

    __slots__ = ("_finish", "place")

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish
        self.place: Callable[[], str] | None = None

    @property
    def has_failed(self) -> bool:
        """Return whether it was waited for and raised."""
        return self._finish is _failed_before

    def wait(self, timeout: timedelta = _AT_ONCE) -> bool:
        # Waiting again for what is done is allowed, for what has failed it is not.
        finish = self._finish
        if finish is None:
            return True
        # Unless it comes to its end: messages are not waited for twice.
        self._finish = _failed_before
        place, outer = self.place, here.doing
        # Not shown to other ranks, or a part of something that is.
        if place is None or outer is not None:
            finish()
        else:
            # What `here.waiting` does is written out: its calls take longer than that.
            here.doing = place
            here.events += 1
            began = perf_counter()
            try:
                finish()
            finally:
                here.doing = None
                here.waited += perf_counter() - began
        self._finish = None
        return True


def finish_later(finish: Callable[[], None], later: bool) -> Deferred | None:
    """Return something that runs ``finish`` when it is waited for; without ``later``
    run it now, and return None."""
    if later:
        return Deferred(finish)
    finish()
    return None


def _failed_before() -> None:
    raise RuntimeError(
        "this collective failed when it was waited for before: what it was to bring has not come"
    )

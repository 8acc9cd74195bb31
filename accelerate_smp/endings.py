"""However a run ends, its ranks end and the lost one is named.

A bare loop has no hook for exceptions, so the interpreter's own is used: what nobody catches is printed as ever, and
then :class:`smp_core.liveness.RankWatch` finds out which rank was lost or failed. There is one watch for each process
group, however many accelerators stand on it.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from smp_core.liveness import RankWatch

_watch: RankWatch | None = None
_watched: weakref.ref[dist.ProcessGroup] | None = None


def watch_ranks() -> RankWatch | None:
    """The watch over the ranks of the default process group, started if there is none yet. Collective then."""
    global _watch, _watched
    if _watched is not None and _watched() is dist.group.WORLD:
        return _watch
    if _watched is None:
        sys.excepthook = _Reporting(sys.excepthook)
        atexit.register(stop_watching)
    stop_watching()
    _watch, _watched = RankWatch.start(), weakref.ref(cast(dist.ProcessGroup, dist.group.WORLD))
    return _watch


def stop_watching() -> None:
    """This rank ends in good order; the others are not to miss it."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


def meet(place: str) -> None:
    """Wait until every rank has come to ``place``, a call as a user types it. Collective.

    Raises:
        RuntimeError: one is elsewhere, e.g. because only the main process makes the call.
    """
    if _watch is not None:
        _watch.meetings.meet(place)


def count_forwards(model: nn.Module, peers: Sequence[int]) -> None:
    """From here on a rank that waits sees by a forward pass of ``peers`` that they do not come."""

    def begun(*_: Any) -> None:
        if _watch is not None:
            _watch.meetings.forwards += 1

    if _watch is not None and len(peers) > 1:
        _watch.meetings.peers = peers
        model.register_forward_pre_hook(begun, prepend=True)


class _Reporting:
    """The interpreter's hook for uncaught exceptions, and then the report."""

    def __init__(self, before: object) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)  # type: ignore[operator]
        if _watch is not None and isinstance(error, Exception):
            _watch.report(error)

"""The watch over the ranks of this process's group, from its start to the end of the process, for both faces.

There is one :class:`smp_core.liveness.RankWatch` for each process group, however many accelerators and Trainers stand
on it. It outlives a run, because what scripts do after one (a prediction on rank 0 alone, another run) needs all ranks
as much. What nobody catches is printed as ever, and then the watch finds out which rank was lost or failed: a bare loop
has no hook for exceptions but the interpreter's own.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import cast

import torch.distributed as dist

from smp_core.compat import collective_timeout
from smp_core.liveness import ENDING, RankWatch, end_within, looks_like_a_lost_peer
from smp_core.preemption import Preempted

logger = logging.getLogger("smp")

_watch: RankWatch | None = None
_watched: weakref.ref[dist.ProcessGroup] | None = None
_met_behind: tuple[int, int] | None = None  # a watch, and a number of calls into models
_REPORTED = "_smp_reported"


def watch_ranks(limit: timedelta | None = None) -> RankWatch | None:
    """Return the watch over the ranks of the default process group, started if there is none yet. Collective then.

    Args:
        limit: how long a rank waits for others that live and do not come to a call; by default as long as collectives.
    """
    global _watch, _watched
    if not _is_current():
        if _watched is None:
            sys.excepthook = _Reporting(sys.excepthook)
            atexit.register(stop_watching)
        stop_watching()
        _warn_of_shared_store()
        limit = limit or collective_timeout()
        _watch, _watched = RankWatch.start(), weakref.ref(cast(dist.ProcessGroup, dist.group.WORLD))
    if _watch is not None and limit is not None:
        _watch.meetings.limit = limit.total_seconds()
    return _watch


def stop_watching() -> None:
    """Stop the watch in good order: the other ranks do not take the end of this one for a loss."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


def report(error: BaseException) -> None:
    """Find out, once for an error, what happened to the other ranks, and write it to stderr.

    A rank that leaves by ``SystemExit`` or Ctrl-C says so to the others, which wait for it.
    """
    if _watch is not None and not isinstance(error, Preempted) and not hasattr(error, _REPORTED):
        setattr(error, _REPORTED, True)
        _watch.report(error)


def meet(place: str, ranks: Sequence[int] | None = None) -> None:
    """Wait until every rank has come to ``place``, a call as a user types it. Collective.

    Args:
        ranks: those who make the call together; by default all.

    Raises:
        RuntimeError: one is elsewhere, e.g. because only the main process makes the call.
    """
    if _watch is not None and _is_current():
        _watch.meetings.meet(place, ranks)


def meet_between_calls(place: str, ranks: Sequence[int]) -> None:
    """Meet at ``place``, as :func:`meet` does, if it is the first such place since the last call into a model
    (:func:`count_call`)."""
    global _met_behind
    if _watch is not None and _met_behind != (behind := (id(_watch), _watch.meetings.forwards)):
        meet(place, ranks)
        _met_behind = behind


def meet_between_runs(place: str, ranks: Sequence[int] | None = None) -> None:
    """Meet in a script that lets a Trainer run, outside of its runs; inside them nothing waits.

    Args:
        ranks: those who make the call together; by default all, who then are in no call of a part of them either.
    """
    if _watch is None or not _watch.between_runs or not _is_current():
        return
    if ranks is None:
        _watch.meetings.meet_in_all_groups(place)
    else:
        _watch.meetings.meet(place, ranks)


def expect_calls(peers: Sequence[int]) -> None:
    """Take note of the ranks that make calls into a model together with this one."""
    if _watch is not None:
        _watch.meetings.peers = peers


def count_call() -> None:
    """Count a call into a model: a rank that waits for its peers elsewhere sees by one of them that they stay away."""
    if _watch is not None:
        _watch.meetings.forwards += 1


def _is_current() -> bool:
    return _watched is not None and _watched() is not None and _watched() is dist.group.WORLD


def _warn_of_shared_store() -> None:
    """Warn, on rank 0, where torchrun will start processes anew that meet in the store of the processes before them.

    torch (pytorch/pytorch#135712) gives all attempts one store and one set of keys: a rank may read the address that
    another one had before, and the attempt fails while connecting.
    """
    restarts, shared = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"), os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    if restarts != "0" and shared == "True" and os.environ.get("RANK") == "0":
        logger.warning(
            "torchrun --max-restarts=%s: a process that is started anew may read where another one listened before, "
            "and fail while connecting; export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun",
            restarts,
        )


class _Reporting:
    """The interpreter's hook for uncaught exceptions, and then the report."""

    def __init__(self, before: object) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)  # type: ignore[operator]
        if _watch is not None and looks_like_a_lost_peer(error):
            end_within(2 * ENDING)  # what runs at the end of a process may wait for the lost rank too
        report(error)

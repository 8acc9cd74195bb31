"""Ranks that fall silent, leave or fail while others watch."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import torch.distributed as dist

from smp_core.watch.rank_watch import RankWatch
from smp_core.watch.whereabouts import here

INTERVAL = 0.1
# Seconds for what surely comes.
LONG = timedelta(seconds=150)
PEER_LOST = RuntimeError(
    "[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"
)
Report = tuple[str | None, str]


def watch() -> RankWatch:
    here.least = LONG.total_seconds()  # nothing is said about waiting on a busy machine
    started = RankWatch.start(interval=INTERVAL)
    assert started is not None
    return started


def report(
    watching: RankWatch, alive: list[int], error: BaseException = PEER_LOST
) -> Report:
    """What was found, and what was written to stderr. A look ends when the ranks that
    are ``alive`` have given signs, two of them: the first may have been on its way when
    it began."""

    def beats() -> list[int]:
        seen = watching._look()
        return [] if seen is None else [seen[rank]["beats"] for rank in alive]

    def await_signs() -> None:
        before, deadline = beats(), time.monotonic() + LONG.total_seconds()
        while any(now < then + 2 for then, now in zip(before, beats(), strict=False)):
            assert time.monotonic() < deadline, f"no signs of life from ranks {alive}"
            time.sleep(INTERVAL / 4)

    patched = mock.patch.object(watching, "_await_signs", await_signs)
    with contextlib.redirect_stderr(io.StringIO()) as stderr, patched:
        found = watching.report(error)
    return found, stderr.getvalue()


def fall_silent(watching: RankWatch) -> None:
    watching._stopped.set()
    watching._thread.join()


def leave(watching: RankWatch) -> None:
    fall_silent(watching)
    for board in watching.boards:
        board.close()


def after(
    prepare: Callable[[RankWatch, int], None], reporting: list[int], alive: list[int]
) -> Report:
    """Every rank prepares, then the reporting ones report; the others wait until those
    are done."""
    watching, rank = watch(), dist.get_rank()
    prepare(watching, rank)
    dist.monitored_barrier(timeout=LONG)
    result = report(watching, alive) if rank in reporting else (None, "")
    dist.monitored_barrier(timeout=LONG)
    leave(watching)
    return result


def silence_rank_2(watching: RankWatch, rank: int) -> None:
    if rank == 2:
        watching.step = 7
        dist.barrier()
        fall_silent(watching)
        watching._beat()  # the last sign of life
    else:
        dist.barrier()

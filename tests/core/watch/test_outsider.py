"""Nobody but the ranks reads or writes the boards with their signs of life."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch.distributed as dist

import smp_core.watch.signs as signs
from smp_core.watch.rank_watch import RankWatch
from tests.core.watch.liveness_runs import INTERVAL, LONG, watch
from tests.core.watch.outsider import listening
from tests.harness import ROOT, run_ranks


def until(path: Path) -> None:
    deadline = time.monotonic() + LONG.total_seconds()
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def besieged(folder: str) -> dict[str, Any]:
    """Start a watch while a stranger crowds every port that is opened: rank 1 goes to
    the boards last of all."""
    place, rank = Path(folder), dist.get_rank()
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    before = listening([os.getpid()])
    if rank == 0:
        command = [
            sys.executable,
            "-m",
            "tests.core.watch.outsider",
            folder,
            *map(str, pids),
        ]
        outsider = subprocess.Popen(command, cwd=ROOT)
    until(place / "ready")
    dist.barrier()
    connect = signs._connect

    async def connect_last(invitation: signs.Invitation) -> Any:
        while rank == 1 and not (place / "met").exists():
            await asyncio.sleep(0.02)
        return await connect(invitation)

    with mock.patch.object(signs, "_connect", connect_last):
        watching = watch()
    opened = listening([os.getpid()]) - before
    watching.meetings.meet("a call of all ranks")
    first = watching._look()
    assert first is not None
    deadline = time.monotonic() + LONG.total_seconds()
    while any(
        state["beats"] < first[other]["beats"] + 3
        for other, state in (watching._look() or first).items()
    ):
        assert time.monotonic() < deadline
        time.sleep(INTERVAL / 4)
    found = watching._compare()
    (place / "enough").touch()
    if rank == 0:
        assert outsider.wait(LONG.total_seconds()) == 0
    dist.barrier()
    boards = len(watching.boards)
    watching.stop()
    return {
        "opened": opened,
        "boards": boards,
        "found": found,
        "files": psutil.Process().num_fds(),
    }


def test_a_stranger_who_crowds_every_port_neither_ends_nor_delays_nor_misleads_the_watch(
    tmp_path: Path,
) -> None:
    for report in run_ranks(besieged, 2, str(tmp_path)):
        assert report["boards"] == 2 and report["found"] == ""
        # Nothing of ours listens once all ranks are there.
        assert report["opened"] == set()
    met = json.loads((tmp_path / "met").read_text())
    # The interface of the rendezvous.
    assert met and {address for address, _ in met} == {"127.0.0.1"}


def stumbles() -> int:
    """What cannot be: a sign of life that is none. Returns the signs given after it."""
    watching: RankWatch = watch()
    if dist.get_rank() == 1:
        for board in watching.boards:
            board.ask("set", "beat/0", ["none"])
    dist.barrier()
    given = watching._beats
    while watching._thread.is_alive() and watching._beats < given + 3:
        time.sleep(INTERVAL / 4)
    dist.barrier()
    watching.stop()
    return watching._beats - given


def test_the_watch_outlives_what_it_cannot_read() -> None:
    assert all(given >= 3 for given in run_ranks(stumbles, 2))

"""The line about ranks that wait: who, in what, for how long, where the others are, and where they went apart.

Bounds are shortened; that the line comes within ten seconds at those of every run is in tests/accelerate.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import smp_core.stalls as stalls
from smp_core.config import SmpConfig
from smp_core.engine import parallelize
from smp_core.liveness import RankWatch
from smp_core.stalls import line_about
from smp_core.whereabouts import Whereabouts, here, place_of, ranks_in_words
from tests.core.branching import Branching, batch_of, loss_of
from tests.harness import run_ranks

LONG = 150.0  # seconds for what surely comes


class Line(io.StringIO):
    """What a rank writes to stderr; the others go on once a line has ``text``. (On a busy machine a rank may stand
    still on its way there, which is told as well.)"""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def write(self, text: str) -> int:
        if self.text in text:
            store().set("said", "1")
        return super().write(text)


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()  # apart from the watch's, and without a collective


def until_said() -> None:
    deadline = time.monotonic() + LONG
    while not store().check(["said"]) and time.monotonic() < deadline:
        time.sleep(0.02)


def in_user_code() -> None:
    until_said()


def in_data_loading() -> None:
    class Slow(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            until_said()
            return index

    next(iter(torch.utils.data.DataLoader(Slow())))


def in_another_collective() -> None:
    until_said()
    dist.barrier()


STALLS = {"user code": in_user_code, "data loading": in_data_loading}


# Where rank 1 is, and what is said about it.
CASES = {
    "user code": (in_user_code, "elsewhere: rank 1: test_stalls.py:{line} in until_said, step 1, micro-batch 2"),
    "data loading": (
        in_data_loading,
        "elsewhere: rank 1: data loading (test_stalls.py:{line} in until_said), step 1, m",
    ),
}


def stalled(kind: str) -> str:
    """Rank 1 is elsewhere while rank 0 runs a micro-batch; what rank 0 says."""
    watch = RankWatch.start(interval=0.05)
    assert watch is not None
    go_there, expected = CASES[kind]
    expected = expected.format(line=until_said.__code__.co_firstlineno + 3)
    try:
        torch.manual_seed(0)
        parallel = parallelize(Branching(), SmpConfig(units=["Block"], shard_degree=2))
        with contextlib.redirect_stderr(Line(expected)) as written, parallel.window.accumulate():
            loss_of(parallel.module, batch_of(0, 0, 0), "lr").backward()
            here.least = 0.4
            if dist.get_rank() == 1:
                go_there()
            loss_of(parallel.module, batch_of(0, 1, 0), "lr").backward()
        return written.getvalue()
    finally:
        here.least = 5.0
        dist.barrier()
        watch.stop()


@pytest.mark.parametrize("kind", CASES)
def test_who_waits_is_told_with_the_unit_and_where_the_other_is(kind: str) -> None:
    said, silent = run_ranks(stalled, 2, kind)
    assert silent == ""
    line = said.splitlines()[-1]
    assert "waiting: rank 0 " in line, said
    assert "s in all_gather of the root in forward, step 1, micro-batch 2 | elsewhere: rank 1: " in line, said
    assert "went apart" not in said, said

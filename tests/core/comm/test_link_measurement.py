"""Links are measured over ranks, and a rank that fails meanwhile leaves nobody
hanging."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from smp_core.cli import app, topology_command as commands
from smp_core.cluster.links import KINDS, Kind, LinkFit, Links, ring_bytes
from smp_core.comm import measuring
from smp_core.topology import Topology
from tests.harness import ROOT, free_port, run_ranks, run_script
from tests.rank_pool import base_environ

SHORT = measuring.SIZES[:3]


def command_here(path: str) -> str:
    """The command on this rank, with the three smallest sizes."""
    with mock.patch.object(commands, "SIZES", SHORT):
        done = CliRunner().invoke(
            app, ["topology", "--measure", "--store", path], env={"COLUMNS": "100"}
        )
    if done.exception is not None:
        raise done.exception
    return done.output


def check_measurement(shown: str, path: Path, largest: int) -> None:
    """Four ranks as two nodes. No bound on the figures: that they are there, positive,
    and of what was asked."""
    for text in (
        "inside a node",
        "between nodes",
        "over all ranks",
        *KINDS,
        "gloo on cpu",
        f"SMP_LINKS={path}",
    ):
        assert text in shown
    links = Links.load(path)
    assert (links.nodes, links.ranks_per_node) == (
        2,
        2,
    ) and torch.__version__ in links.measured_with
    for found, ranks in ((links.intra, 2), (links.inter, 2), (links.flat, 4)):
        assert found is not None and found.ranks == ranks
        for kind in KINDS:
            fit: LinkFit = getattr(found, kind)
            sent = [n for n, _ in fit.points]
            sizes = [size for size in measuring.SIZES if size <= largest]
            assert (
                sent == [ring_bytes(kind, ranks, size) for size in sizes][: len(sent)]
                and len(sent) >= 3
            )
            assert (
                all(seconds > 0 for _, seconds in fit.points)
                and fit.latency >= 0
                and fit.bandwidth > 0
            )
    assert links.inter is not None and links.flat is not None
    assert (links.inter.reduce_scatter.by, links.inter.all_gather.by) == (
        "messages",
        "messages",
    )
    assert (links.flat.reduce_scatter.by, links.flat.all_gather.by) == (
        "messages",
        "library",
    )
    assert json.loads(path.read_text())["version"] == 2


@pytest.mark.slow
def test_links_are_measured_through_the_command(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    shown, *others = run_ranks(command_here, 4, str(path), ranks_per_node=2)
    assert others == [""] * 3, "rank 0 prints"
    check_measurement(shown, path, SHORT[-1])


@pytest.mark.slow
def test_links_are_measured_under_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    command = [
        "-m",
        "smp_core.cli",
        "topology",
        "--measure",
        "--largest-mib",
        "1",
        "--store",
        path,
    ]
    done = run_script(
        command, nproc=4, env={"SMP_RANKS_PER_NODE": "2", "COLUMNS": "100"}
    )
    assert done.returncode == 0, done.stderr
    check_measurement(done.stdout, path, 1 << 20)


def measured_with_a_failure() -> str:
    """Rank 2 finds no memory for the second size."""
    prepared, calls = measuring._prepared, []

    def scarce(*arguments: Any) -> Any:
        calls.append(arguments)
        if dist.get_rank() == 2 and len(calls) == 2:
            raise MemoryError("no room")
        return prepared(*arguments)

    with (
        mock.patch.object(measuring, "_prepared", scarce),
        pytest.raises(RuntimeError) as caught,
    ):
        measuring.measure(
            Topology.discover(), torch.device("cpu"), sizes=(1 << 10, 1 << 12, 1 << 14)
        )
    return str(caught.value)


def test_a_rank_without_memory_ends_the_measurement_everywhere() -> None:
    said = run_ranks(measured_with_a_failure, 4, ranks_per_node=2)
    assert said == [said[0]] * 4 and "rank 2: MemoryError: no room" in said[0]


def sizes_measured(seconds_per_byte: float) -> list[int]:
    """How many sizes are timed in each place where a call takes this long: the clock is
    set, nothing is waited for."""
    clock = 0.0

    def all_reduce(bytes_: int) -> None:
        nonlocal clock
        clock += bytes_ * seconds_per_byte

    def prepared(kind: Kind, n_bytes: int, *_: Any) -> Any:
        return lambda: all_reduce(n_bytes), n_bytes

    with (
        mock.patch.object(measuring, "_prepared", prepared),
        mock.patch.object(time, "perf_counter", lambda: clock),
    ):
        links = measuring.measure(Topology.discover(), torch.device("cpu"))
    assert links.inter is not None
    return [len(getattr(links.inter, kind).points) for kind in KINDS]


def sizes_measured_at(speeds: list[float]) -> list[list[int]]:
    return [sizes_measured(seconds_per_byte) for seconds_per_byte in speeds]


def test_sizes_stop_growing_before_a_call_takes_longer_than_a_second() -> None:
    """At 1 s per MiB: 4, 16, 64, 256 KiB and 1 MiB. However slow, a line has three
    points."""
    for found in run_ranks(sizes_measured_at, 4, [1 / 2**20, 1e-3], ranks_per_node=1):
        assert found == [[5, 5, 5], [3, 3, 3]]


LOST_IN_THE_MIDDLE = """
import sys
from smp_core.cli import app
from smp_core.comm import measuring

prepared, calls = measuring._prepared, 0

def failing(*arguments):
    call, n_bytes = prepared(*arguments)
    def counted():
        global calls
        calls += 1
        if calls == 20:
            raise RuntimeError("this rank fails")
        call()
    return counted, n_bytes

if sys.argv.pop(1) == "1":
    measuring._prepared = failing
app(["topology", "--measure"])
"""


@pytest.mark.slow
def test_a_rank_that_fails_in_the_middle_leaves_nobody_hanging() -> None:
    """Without a launcher that would end the others: their connections to it close."""
    port, environ = (
        str(free_port()),
        {**base_environ(), "SMP_RANKS_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1"},
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LOST_IN_THE_MIDDLE, str(rank)],
            env={**environ, "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "4"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(4)
    ]
    try:
        said = [rank.communicate(timeout=600)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode != 0 for rank in ranks)
    assert "this rank fails" in said[1]

"""What the hop sends when ranks are connected at the start: what its sums will send,
and nothing else."""

from __future__ import annotations

from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from smp_core.codecs.codec import codec
from smp_core.comm import exchange, replica_hop
from smp_core.comm.background import Background
from smp_core.comm.meter import CommMeter
from smp_core.comm.replica_hop import ReplicaHop
from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.topology import Topology
from smp_core.watch.lost_peer import looks_like_a_lost_peer
from tests.harness import run_ranks

VERBS = ("all_to_all", "sum_rows", "gather_rows")


def sent(payload: str | None, sums: bool) -> set[str]:
    """The verbs of a hop's connection, or of one sum of float32 by it."""
    found: set[str] = set()

    def noting(name: str) -> Any:
        plain = getattr(replica_hop, name)

        def call(*args: Any) -> Any:
            found.add(name)
            return plain(*args)

        return call

    world = cast(dist.ProcessGroup, dist.group.WORLD)
    alone = next(
        group
        for group in map(dist.new_group, ([0], [1]))
        if isinstance(group, dist.ProcessGroup)
    )
    meter = CommMeter(Topology.uniform(2, 1), dist.get_rank())
    background = Background(torch.device("cpu"))
    hop = ReplicaHop(
        meter,
        world,
        (alone, world),
        background,
        None if payload is None else codec(payload),
    )  # type: ignore[arg-type]
    with mock.patch.multiple(replica_hop, **{name: noting(name) for name in VERBS}):
        if not sums:
            hop.connect(torch.float32)
        else:
            pending = hop(torch.ones(64))
            assert pending is not None
            pending.wait()
    return found


@pytest.mark.parametrize(
    "payload", [None, pytest.param("bf16", marks=pytest.mark.slow), "int8"]
)
def test_what_connects_ranks_is_what_sums_send(payload: str | None) -> None:
    """An all-to-all that no sum sends costs gigabytes on every rank:
    NVIDIA/nccl#1685."""
    connected = run_ranks(sent, 2, payload, False)[0]
    if payload is None:
        assert (
            connected
            == run_ranks(sent, 2, payload, True)[0]
            == {"sum_rows", "gather_rows"}
        )
    else:  # what is encoded goes through messages of comm/encoded_sum.py
        assert "all_to_all" in connected


def dtypes_sent(knobs: dict[str, Any]) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """The dtypes of sums at the connection of a bfloat16 model, and in its first
    step."""
    found: set[torch.dtype] = set()

    def sum_rows(out_N: torch.Tensor, *args: Any) -> None:
        found.add(out_N.dtype)
        exchange.sum_rows(out_N, *args)

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(torch.bfloat16)
    with mock.patch.object(replica_hop, "sum_rows", sum_rows):
        parallel = parallelize(
            layers, SmpConfig(shard_degree=1, optimizer_shard="world", **knobs)
        )
        connected = {*found}
        found.clear()
        parallel.prepare_optimizer(
            torch.optim.SGD(parallel.module.parameters(), lr=0.1)
        )
        parallel.module(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum().backward()
    return connected, {*found}


@pytest.mark.parametrize(
    ("knobs", "dtype"),
    [
        ({"reduce_dtype": None}, torch.bfloat16),
        pytest.param({}, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_ranks_are_connected_by_sums_of_the_dtypes_that_follow(
    knobs: dict[str, Any], dtype: torch.dtype
) -> None:
    """On NCCL half precision goes by all-to-all: a first one in backward would hold
    hosts that wait for each other."""
    assert run_ranks(dtypes_sent, 2, knobs) == [({dtype}, {dtype})] * 2


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (
            "NCCL error: unhandled system error, Failed to CUDA calloc async 536870912 bytes",
            False,
        ),
        ("CUDA out of memory. Tried to allocate 2.00 GiB (NCCL)", False),
        ("CUDA error: peer access is not supported between these two devices", False),
        ("NCCL error: invalid usage", False),
        ("NCCL error: remote process exited or there was a network error", True),
        ("Connection closed by peer", True),
    ],
)
def test_a_ranks_own_failure_is_not_the_loss_of_another(text: str, lost: bool) -> None:
    assert looks_like_a_lost_peer(RuntimeError(text)) is lost


def test_a_transport_that_a_users_own_line_waits_for_has_lost_its_peer() -> None:
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError(  # as `work.wait()` does, which has no frame of torch's
            "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5"
        )
    assert looks_like_a_lost_peer(caught.value)

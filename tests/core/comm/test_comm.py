"""Communication objects against torch's own collectives and plain sums.

An all-gather only moves bytes, so every variant has to agree bit for bit. A
reduce-scatter adds up: integers small enough to be exact in the type are compared bit
for bit, so that no tolerance can hide a missing or doubled part.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from smp_core.cluster.layout import PARTITION
from smp_core.comm import exchange as exchanges, hierarchical
from smp_core.comm.deferred import Deferred
from smp_core.comm.exchange import exchange, sum_in_order, sum_rows
from smp_core.comm.flat import FlatAllGather, FlatAllReduce, FlatReduceScatter
from smp_core.comm.hierarchical import HierarchicalAllGather, HierarchicalReduceScatter
from smp_core.comm.meter import CommMeter
from smp_core.comm.traffic import IssuedCollectives, NotedCollective
from smp_core.config import SmpConfig
from smp_core.entry import build_mesh
from smp_core.sharding.fsdp.param_group import ParamGroup
from smp_core.topology import Topology
from tests.harness import RanksFailed, run_ranks

SIZES = [0, 1, 3, 7, 64, 1001]
GATHERED = [torch.float32, torch.bfloat16, torch.uint8, torch.float64]
REDUCED = [torch.float32, torch.bfloat16, torch.float64]


class Cluster:
    """What a communication object needs: the whole world as one partition group that
    spans nodes."""

    def __init__(self) -> None:
        topology = Topology.discover()
        self.mesh, _ = build_mesh(SmpConfig(shard_degree="world"), topology, "cpu")
        self.meter = CommMeter(topology, self.mesh.rank)
        self.on_one_node = CommMeter(
            Topology.uniform(topology.world_size, topology.world_size), self.mesh.rank
        )
        self.group, self.size, self.rank = (
            self.mesh.shard_group,
            dist.get_world_size(),
            dist.get_rank(),
        )
        assert self.mesh.stages(*PARTITION) is not None
        self.stages = self.mesh.stages(*PARTITION)

    def all_gathers(self) -> dict[str, Callable[[torch.Tensor, torch.Tensor], Any]]:
        two_stage = HierarchicalAllGather(self.meter, *self.stages)
        flat = FlatAllGather(self.meter)

        def by_collectives(output: torch.Tensor, mine: torch.Tensor) -> None:
            two_stage._by_collectives(
                output.view(two_stage.nodes, two_stage.local_ranks, -1), mine
            )

        def in_one_launch(output: torch.Tensor, mine: torch.Tensor) -> None:
            with mock.patch.object(exchanges, "_has_one_launch", lambda _: True):
                by_collectives(output, mine)

        return {
            "flat": lambda output, mine: flat(output, mine, self.group),
            "two stages by messages": lambda output, mine: two_stage(
                output, mine, self.group
            ),
            "two stages by collectives": by_collectives,
            "two stages by collectives, each in one launch": in_one_launch,
            "one node": lambda output, mine: FlatAllGather(self.on_one_node)(
                output, mine, self.group
            ),
        }

    def reduce_scatters(
        self,
    ) -> dict[str, Callable[[torch.Tensor, torch.Tensor, Any], Any]]:
        two_stage = HierarchicalReduceScatter(self.meter, *self.stages)
        flat = FlatReduceScatter(self.meter)
        return {
            "flat": lambda output, whole, op: flat(output, whole, self.group, op),
            "two stages by messages": lambda output, whole, op: two_stage(
                output, whole, self.group, op
            ),
        }


def piece_of(rank: int, n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits for all-gathers: any pattern, nan included, has to arrive as it
    is."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    bits = torch.randint(
        256, (n * torch.empty((), dtype=dtype).element_size(),), generator=generator
    )
    return bits.to(torch.uint8).view(dtype)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def gather_everything() -> int:
    cluster, compared = Cluster(), 0
    for seed, (dtype, n) in enumerate((dtype, n) for dtype in GATHERED for n in SIZES):
        pieces = [piece_of(rank, n, dtype, seed) for rank in range(cluster.size)]
        mine, expected = pieces[cluster.rank], torch.cat(pieces)
        theirs = [torch.empty_like(mine) for _ in pieces]
        if n:
            dist.all_gather(theirs, mine)
        assert torch.equal(bits_of(torch.cat(theirs)), bits_of(expected))
        for name, gather in cluster.all_gathers().items():
            for in_place in (False, True):  # FSDP2 hands over a view into the output
                output = torch.zeros(cluster.size * n, dtype=dtype)
                own = (
                    output[cluster.rank * n : (cluster.rank + 1) * n]
                    if in_place
                    else mine.clone()
                )
                own.copy_(mine)
                gather(output, own)
                assert torch.equal(bits_of(output), bits_of(expected)), (
                    f"{name}, {dtype}, {n} elements, {in_place=}"
                )
                assert torch.equal(bits_of(own), bits_of(mine)), (
                    f"{name} changed its input"
                )
                compared += 1
    return compared


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node"),
    [
        (4, 2),
        pytest.param(8, 4, marks=pytest.mark.slow),
        pytest.param(8, 2, marks=pytest.mark.slow),
    ],
)
def test_every_all_gather_is_bit_identical_to_torch(
    world_size: int, ranks_per_node: int
) -> None:
    compared = run_ranks(gather_everything, world_size, ranks_per_node=ranks_per_node)
    assert compared == [len(GATHERED) * len(SIZES) * 5 * 2] * world_size


def whole_numbers(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Multiples of 8 up to 64: sums over 8 ranks and averages over 4 or 8 are exact
    even in bfloat16."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randint(-8, 9, (n,), generator=generator) * 8).to(dtype)


def reduce_everything(ops: list[Any]) -> int:
    cluster, compared = Cluster(), 0
    for op in ops:
        for dtype in REDUCED:
            for n in SIZES:
                everyone = [
                    whole_numbers(rank, cluster.size * n, dtype)
                    for rank in range(cluster.size)
                ]
                total = torch.stack(everyone).double().sum(0)
                expected = total[cluster.rank * n : (cluster.rank + 1) * n]
                if op == dist.ReduceOp.AVG:
                    expected = expected / cluster.size
                for name, reduce_scatter in cluster.reduce_scatters().items():
                    output, whole = (
                        torch.full((n,), 5.0, dtype=dtype),
                        everyone[cluster.rank].clone(),
                    )
                    reduce_scatter(output, whole, op)
                    assert torch.equal(output.double(), expected), (
                        f"{name}, {op}, {dtype}, {n} elements"
                    )
                    assert torch.equal(whole, everyone[cluster.rank]), (
                        f"{name} changed its input"
                    )
                    compared += 1
    return compared


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node"),
    [
        (4, 2),
        pytest.param(8, 4, marks=pytest.mark.slow),
        pytest.param(8, 2, marks=pytest.mark.slow),
    ],
)
def test_reduce_scatter_honours_sum_and_average(
    world_size: int, ranks_per_node: int
) -> None:
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.AVG]
    compared = run_ranks(
        reduce_everything, world_size, ops, ranks_per_node=ranks_per_node
    )
    assert compared == [len(ops) * len(REDUCED) * len(SIZES) * 2] * world_size


def reduce_by_collectives() -> None:
    """The path that NCCL takes; the library's own sums on gloo."""
    cluster = Cluster()
    two_stage = HierarchicalReduceScatter(cluster.meter, *cluster.stages)
    for dtype in (torch.float32, torch.float64):
        for n in [size for size in SIZES if size]:
            everyone = [
                whole_numbers(rank, cluster.size * n, dtype)
                for rank in range(cluster.size)
            ]
            expected = torch.stack(everyone).sum(0)[
                cluster.rank * n : (cluster.rank + 1) * n
            ]
            for one_launch in (False, True):
                whole, output = (
                    everyone[cluster.rank].clone(),
                    torch.empty(n, dtype=dtype),
                )
                with (
                    mock.patch.object(
                        hierarchical, "prefers_messages", lambda *_: False
                    ),
                    mock.patch.object(
                        exchanges,
                        "_has_one_launch",
                        lambda _, answer=one_launch: answer,
                    ),
                ):
                    two_stage(output, whole, cluster.group, dist.ReduceOp.SUM)
                assert torch.equal(output, expected), (
                    f"{dtype}, {n} elements, {one_launch=}"
                )


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node"),
    [
        (4, 2),
        pytest.param(8, 4, marks=pytest.mark.slow),
        pytest.param(8, 2, marks=pytest.mark.slow),
    ],
)
def test_reduce_scatter_by_collectives_adds_up(
    world_size: int, ranks_per_node: int
) -> None:
    run_ranks(reduce_by_collectives, world_size, ranks_per_node=ranks_per_node)


def reduce_fractions() -> list[float]:
    """Random float32 numbers: how far each variant is from the float64 sum, relative to
    the sum of magnitudes."""
    cluster, n = Cluster(), 257
    everyone = [
        torch.randn(cluster.size * n, generator=torch.Generator().manual_seed(r))
        for r in range(cluster.size)
    ]
    slot = slice(cluster.rank * n, (cluster.rank + 1) * n)
    exact = torch.stack(everyone).double().sum(0)[slot]
    scale = torch.stack(everyone).double().abs().sum(0)[slot]
    errors = []
    for reduce_scatter in cluster.reduce_scatters().values():
        output = torch.empty(n)
        reduce_scatter(output, everyone[cluster.rank], dist.ReduceOp.SUM)
        errors.append(((output.double() - exact).abs() / scale).max().item())
    return errors


def test_reduce_scatter_of_fractions_errs_by_rounding_only() -> None:
    """(g - 1) float32 additions: at most 3 half-units in the last place, 3 * 2**-24, of
    the sum of magnitudes."""
    for errors in run_ranks(reduce_fractions, 4, ranks_per_node=2):
        assert max(errors) <= 3 * 2**-24


def ask_for_other_reductions() -> list[str]:
    cluster, refused = Cluster(), []
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        for reduce_scatter in cluster.reduce_scatters().values():
            try:
                reduce_scatter(torch.empty(1), torch.empty(cluster.size), op)
            except NotImplementedError as error:
                refused.append(str(error))
    return refused


def test_other_reductions_than_sum_and_average_are_refused() -> None:
    for refused in run_ranks(ask_for_other_reductions, 4, ranks_per_node=2):
        assert len(refused) == 6
        assert all("SUM" in message and "AVG" in message for message in refused)


def call_with_wrong_group() -> list[str]:
    cluster, refused = Cluster(), []
    half = cluster.stages[0]
    try:
        HierarchicalReduceScatter(cluster.meter, *cluster.stages)(
            torch.empty(2), torch.empty(4), half, dist.ReduceOp.SUM
        )
    except ValueError as error:
        refused.append(str(error))
    return refused


def test_a_reduction_over_a_group_of_another_size_is_refused() -> None:
    for refused in run_ranks(call_with_wrong_group, 4, ranks_per_node=2):
        assert len(refused) == 1
        assert all(
            "2 nodes x 2 ranks" in message and "group of 2" in message
            for message in refused
        )


def gather_in_the_background() -> None:
    """Two gathers in flight at once; what is returned is either None (done) or
    something to wait for."""
    cluster, n = Cluster(), 4096
    for gather in (
        FlatAllGather(cluster.meter),
        HierarchicalAllGather(cluster.meter, *cluster.stages),
        HierarchicalAllGather(cluster.meter, *cluster.stages, deferred=True),
        FlatAllGather(cluster.on_one_node),
        FlatAllGather(cluster.on_one_node, deferred=True),
    ):
        outputs = [torch.zeros(cluster.size * n) for _ in range(2)]
        works = [
            gather(
                output,
                torch.full((n,), float(cluster.rank + 10 * number)),
                cluster.group,
                async_op=True,
            )
            for number, output in enumerate(outputs)
        ]
        for work in works:
            if work is not None:
                work.wait()
        for number, output in enumerate(outputs):
            expected = (
                torch.arange(cluster.size, dtype=torch.float32).repeat_interleave(n)
                + 10 * number
            )
            assert torch.equal(output, expected)
    total = torch.full((n,), float(cluster.rank))
    work = FlatAllReduce(cluster.meter)(total, cluster.group, async_op=True)
    assert work is not None
    work.wait()
    assert torch.equal(total, torch.full((n,), float(sum(range(cluster.size)))))


def test_asynchronous_calls_are_complete_after_wait() -> None:
    run_ranks(gather_in_the_background, 4, ranks_per_node=2)


def exchange_in_order() -> None:
    """Two messages to one destination keep their order; empty ones are not sent at
    all."""
    me, other = dist.get_rank(), 1 - dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    received = [torch.empty(3), torch.empty(0), torch.empty(5)]
    sent = [torch.full((3,), 1.0 + me), torch.empty(0), torch.full((5,), 10.0 + me)]
    exchange(
        [(tensor, other) for tensor in sent],
        [(tensor, other) for tensor in received],
        group,
    )
    assert received[0].tolist() == [1.0 + other] * 3
    assert received[2].tolist() == [10.0 + other] * 5


def test_messages_to_one_rank_keep_their_order() -> None:
    run_ranks(exchange_in_order, 2)


def test_half_precision_parts_are_rounded_once() -> None:
    """1 + 2**-8 + 2**-8 is 1.0 in bfloat16 when every addition rounds, and 1.0078125
    when only the last does."""
    parts = [
        torch.tensor([value], dtype=torch.bfloat16) for value in (1.0, 2.0**-8, 2.0**-8)
    ]
    out = torch.empty(1, dtype=torch.bfloat16)
    sum_in_order(parts, out)
    assert out.item() == 1.0078125
    for place in (0, 1):
        written = [part.clone() for part in parts]
        sum_in_order(written, written[place])
        assert written[place].item() == 1.0078125


@pytest.mark.parametrize("place", [0, 1])
def test_a_sum_may_be_written_over_one_of_the_first_two_parts(place: int) -> None:
    parts = [torch.tensor([float(10**n)]) for n in range(4)]
    sum_in_order(parts, parts[place])
    assert parts[place].item() == 1111.0


def sum_over_own_row() -> list[list[float]]:
    """Row i of rank r is 10**r + i; what rank i gets is the sum over r, written over
    its own row. By messages, by the library's sum and, in bfloat16, 1 + 2**-8 + 2**-8 +
    0 by the library's exchange."""
    me, found = dist.get_rank(), []
    assert dist.group.WORLD is not None
    for by_messages in (True, False):
        rows = torch.stack([torch.full((3,), 10.0**me + i) for i in range(4)])
        with mock.patch.object(
            exchanges, "prefers_messages", lambda *_, answer=by_messages: answer
        ):
            sum_rows(rows[me], rows, dist.group.WORLD)
        found.append(rows[me].tolist())
    halves = torch.full((4, 1), (1.0, 2.0**-8, 2.0**-8, 0.0)[me], dtype=torch.bfloat16)
    with mock.patch.object(exchanges, "prefers_messages", lambda *_: False):
        sum_rows(halves[me], halves, dist.group.WORLD)
    return [*found, halves[me].tolist()]


def test_rows_are_summed_over_the_own_one() -> None:
    for rank, (by_messages, by_the_library, in_bfloat16) in enumerate(
        run_ranks(sum_over_own_row, 4)
    ):
        assert by_messages == by_the_library == [1111.0 + 4 * rank] * 3
        assert in_bfloat16 == [1.0078125], "rounded once"


def leave_out_a_part(rank_left_out: int) -> None:
    cluster = Cluster()
    if cluster.rank == rank_left_out:
        # The proof that comparisons bite: one rank's message between nodes carries
        # zeros.
        original = dist.isend
        dist.isend = lambda tensor, **kwargs: original(
            torch.zeros_like(tensor), **kwargs
        )  # type: ignore[assignment]
    try:
        output = torch.zeros(4 * cluster.size)
        HierarchicalAllGather(cluster.meter, *cluster.stages)(
            output, torch.ones(4), cluster.group
        )
    finally:
        if cluster.rank == rank_left_out:
            dist.isend = original
    assert torch.equal(output, torch.ones_like(output))


def test_the_comparison_notices_a_lost_message() -> None:
    with pytest.raises(RanksFailed):
        run_ranks(leave_out_a_part, 4, 3, ranks_per_node=2)


def fail() -> None:
    raise RuntimeError("connection closed by peer")


def test_a_collective_that_failed_is_never_taken_for_one_that_came() -> None:
    works = [Deferred(lambda: None), Deferred(fail), Deferred(lambda: None)]
    issued = IssuedCollectives(range(2))
    made: Any = lambda *_, **__: works.pop(0)  # noqa: E731
    noted: Any = NotedCollective(issued, made, "all_gather", "blocks.0")
    assert noted.issue(None, None, None).wait()
    failed = noted.issue(None, None, None)
    with pytest.raises(RuntimeError, match="closed by peer"):
        failed.wait()
    assert noted.issue(None, None, None).wait()
    with pytest.raises(RuntimeError, match="failed when it was waited for before"):
        failed.wait()


def test_a_gather_that_failed_is_forgotten_without_being_waited_for_again() -> None:
    def lost() -> None:
        raise RuntimeError("Connection closed by peer")

    work = Deferred(lost)
    with pytest.raises(RuntimeError, match="closed by peer"):
        work.wait()
    group = SimpleNamespace(
        fsdp_params=[],
        _all_gather_result=SimpleNamespace(all_gather_event=None, all_gather_work=work),
    )
    ParamGroup(torch.nn.Linear(1, 1), group).drop_gather()
    assert work.has_failed and group._all_gather_result is None

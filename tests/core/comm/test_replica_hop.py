"""Sums across replicas: bit for bit on whole numbers, within the codec's bound when
encoded, and equal on all ranks."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from smp_core.cluster.layout import Axis
from smp_core.codecs.codec import BLOCK, Blockwise, CodeName, codec
from smp_core.comm import encoded_sum, replica_hop
from smp_core.comm.background import Background
from smp_core.comm.meter import CommMeter
from smp_core.comm.replica_hop import ReplicaHop
from smp_core.config import SmpConfig
from smp_core.entry import build_mesh
from smp_core.topology import Topology
from tests.harness import run_ranks

SIZES = [1, 3, 256, 1000, 4096]
# Largest error of one element over its block's largest magnitude (docs of
# smp_core.codecs.codec).
BOUNDS: dict[CodeName, float] = {
    "int8": 0.51 / 127,
    "int4": 0.51 / 7,
    "fp8": 2**-4,
    "bfloat16": 2**-8,
}


@pytest.mark.parametrize("name", list(BOUNDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("n", [1, 255, 256, 257, 1001])
def test_a_code_is_as_near_as_its_bound(
    name: CodeName, dtype: torch.dtype, n: int
) -> None:
    values = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    coder = codec(name)
    payload = torch.empty(coder.size(n), dtype=torch.uint8)
    given = values.clone()
    coder.encode(values, payload)
    assert torch.equal(values, given), "encode changed its input"
    decoded = torch.empty_like(values)
    coder.decode(payload, decoded)
    assert coder.finite_in(payload, n)
    # Rounding of the result to its own dtype.
    slack = 2**-8 if dtype == torch.bfloat16 else 1e-6
    for start in range(0, n, BLOCK):
        block, back = (
            values[start : start + BLOCK].double(),
            decoded[start : start + BLOCK].double(),
        )
        assert ((block - back).abs().max() / block.abs().max()).item() <= BOUNDS[
            name
        ] + slack


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_payload_shows_that_a_block_was_not_finite(
    name: CodeName, bad: float
) -> None:
    coder = codec(name)
    for place in (0, 255, 256, 300):
        values = torch.ones(301)
        values[place] = bad
        payload = torch.empty(coder.size(301), dtype=torch.uint8)
        coder.encode(values, payload)
        assert not coder.finite_in(payload, 301)
        decoded = torch.empty(301)
        coder.decode(payload, decoded)
        its_block = torch.arange(301) // BLOCK == place // BLOCK
        assert torch.equal(decoded.isnan(), its_block)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_zeros_and_very_small_values_stay_finite(name: CodeName) -> None:
    coder = codec(name)
    for values in (
        torch.zeros(300),
        torch.full((300,), 1e-45),
        torch.full((300,), 3e38),
        -torch.ones(300),
    ):
        payload, back = (
            torch.empty(coder.size(300), dtype=torch.uint8),
            torch.empty(300),
        )
        coder.encode(values, payload)
        coder.decode(payload, back)
        assert torch.allclose(back, values, rtol=1e-6, atol=1e-38)


def test_eight_bits_are_a_quarter_and_four_an_eighth_of_float32() -> None:
    n = 1 << 16
    assert Blockwise("int8").size(n) == n + 4 * n // BLOCK
    assert Blockwise("int4").size(n) == n // 2 + 4 * n // BLOCK


class Replicas:
    """Hops over four ranks that pose as two nodes: all of them (two stages), and one of
    each node (one stage)."""

    def __init__(self) -> None:
        topology = Topology.discover()
        self.mesh, _ = build_mesh(SmpConfig(shard_degree=1), topology, "cpu")
        pairs, _ = build_mesh(SmpConfig(shard_degree=2), topology, "cpu")
        self.meter = CommMeter(topology, self.mesh.rank)
        assert (
            self.mesh.stages(Axis.REPLICATE) is not None
            and pairs.stages(Axis.REPLICATE) is None
        )
        self.groups = {
            "world": (self.mesh.world_group, self.mesh.stages(Axis.REPLICATE)),
            "pair": (pairs.replicate_group, pairs.stages(Axis.REPLICATE)),
        }

    def hop(
        self, where: str, name: CodeName | None = None, error_feedback: bool = False
    ) -> ReplicaHop:
        group, stages = self.groups[where]
        return ReplicaHop(
            self.meter,
            group,
            stages,
            Background(self.mesh.device),
            codec(name) if name else None,
            error_feedback,
        )


def everyones(n: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-64, 65, (n,), generator=generator).to(dtype) for _ in range(4)
    ]


def same_everywhere(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    bits = tensor.view(torch.uint8)
    others = [torch.empty_like(bits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, bits, group=group)
    return all(torch.equal(bits, other) for other in others)


def sum_whole_numbers() -> int:
    replicas, compared = Replicas(), 0
    for where, (group, _) in replicas.groups.items():
        members = dist.get_process_group_ranks(group)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            hop, works = replicas.hop(where), []
            for n in SIZES:  # all in flight at once
                flat = everyones(n, dtype, n)[replicas.mesh.rank]
                works.append((n, flat, hop(flat)))
            for n, flat, work in works:
                assert work is not None
                work.wait()
                expected = sum(
                    everyones(n, dtype, n)[rank].double() for rank in members
                )
                assert torch.equal(flat.double(), expected), f"{where}, {dtype}, {n}"
                compared += 1
    for thread in threading.enumerate():
        if thread.name == "smp-background":
            # It ends soon after the last task, not before the caller hears of that.
            thread.join(120)
            assert not thread.is_alive(), "a thread is left behind"
    return compared


def test_exact_hops_add_up_exactly() -> None:
    assert run_ranks(sum_whole_numbers, 4, ranks_per_node=2) == [2 * 3 * len(SIZES)] * 4


def sum_encoded(names: list[CodeName]) -> dict[str, float]:
    """Worst error over the bound's unit (the largest magnitude anywhere), and equality
    on all ranks."""
    replicas, worst = Replicas(), {}
    for where, (group, _) in replicas.groups.items():
        members = dist.get_process_group_ranks(group)
        for name in names:
            for n in SIZES:
                parts = [
                    torch.randn(n, generator=torch.Generator().manual_seed(7 * r + n))
                    for r in range(4)
                ]
                flat = parts[replicas.mesh.rank].clone()
                work = replicas.hop(where, name)(flat)
                assert work is not None
                work.wait()
                assert same_everywhere(flat, group), f"{where}, {name}, {n}"
                exact = torch.stack([parts[rank] for rank in members]).double().sum(0)
                error = (flat.double() - exact).abs().max() / sum(
                    part.abs().max() for part in parts
                )
                worst[f"{where} {name}"] = max(
                    worst.get(f"{where} {name}", 0.0), error.item()
                )
    return worst


def test_encoded_hops_stay_within_two_roundings_and_leave_replicas_bit_equal() -> None:
    """A term is rounded on its way to the owner and the sum on its way back, each
    within the codec's bound of the largest magnitude; the sums of all magnitudes bound
    both."""
    for worst in run_ranks(sum_encoded, 4, list(BOUNDS), ranks_per_node=2):
        for case, error in worst.items():
            assert 0 < error <= 2 * BOUNDS[case.split()[1]], case


def sum_with_one_bad_value(bad_rank: int, bad: float) -> list[int]:
    replicas, fallbacks, n = Replicas(), [], 1000
    for where, (group, _) in replicas.groups.items():
        members = dist.get_process_group_ranks(group)
        for name in ("int8", "int4"):
            parts = everyones(n, torch.float32)
            parts[bad_rank][17] = bad
            hop, flat = (
                replicas.hop(where, name, error_feedback=True),
                parts[replicas.mesh.rank].clone(),
            )
            work = hop(flat, "unit")
            assert work is not None
            work.wait()
            assert same_everywhere(flat, group)
            if bad_rank in members:
                exact = sum(parts[rank] for rank in members)
                # The part with the bad value (the first) came exactly, on both ways;
                # the others are codes.
                first = slice(0, 250 if where == "world" else 500)
                assert torch.equal(flat[first].nan_to_num(), exact[first].nan_to_num())
                assert flat.isfinite().sum() == n - 1
            assert all(
                kept.isfinite().all()
                for pair in hop.residuals.values()
                for kept in pair
            )
            fallbacks.append(hop.fallbacks)
    return fallbacks


@pytest.mark.parametrize(
    "bad", [float("nan"), pytest.param(-float("inf"), marks=pytest.mark.slow)]
)
def test_a_bad_value_on_one_rank_is_sent_exactly_and_by_nobody_else(bad: float) -> None:
    """Rank 2 is the second node's: its part goes exactly to rank 0, which sends the sum
    exactly to all."""
    fallbacks = run_ranks(sum_with_one_bad_value, 4, 2, bad, ranks_per_node=2)
    assert fallbacks[2] == [1, 1, 1, 1], "to the owner"
    assert fallbacks[0] == [1, 1, 1, 1], "from the owner"
    assert fallbacks[1] == fallbacks[3] == [0, 0, 0, 0]


def sum_with_one_bad_value_behind_the_host(bad: float) -> list[int]:
    """As on accelerators, where nobody asks whether a part is finite."""
    replicas, counted, n = Replicas(), [], 1000
    behind = SimpleNamespace(run_behind=lambda device: True)
    with (
        mock.patch.object(encoded_sum, "streams", behind),
        mock.patch.object(replica_hop, "streams", behind),
    ):
        for where, (group, _) in replicas.groups.items():
            for name in ("int8", "int4"):
                parts = everyones(n, torch.float32)
                parts[2][17] = bad
                hop, flat = (
                    replicas.hop(where, name, error_feedback=True),
                    parts[replicas.mesh.rank].clone(),
                )
                work = hop(flat, "unit")
                assert work is not None
                work.wait()
                assert same_everywhere(flat, group)
                is_member = 2 in dist.get_process_group_ranks(group)
                # The first part's first block holds the value; blocks do not reach over
                # the end of a part.
                lost = min(BLOCK, 250 if where == "world" else 500) if is_member else 0
                assert flat[:lost].isnan().all() and flat[lost:].isfinite().all()
                assert all(
                    kept.isfinite().all()
                    for pair in hop.residuals.values()
                    for kept in pair
                )
                counted.append(int(hop.fallbacks))
    return counted


@pytest.mark.parametrize(
    "bad", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)]
)
def test_on_accelerators_a_block_with_a_bad_value_is_nan_for_all_and_nobody_asks(
    bad: float,
) -> None:
    """Rank 2 meets it on the way to the owner, rank 0, and that on the way to all."""
    assert run_ranks(
        sum_with_one_bad_value_behind_the_host, 4, bad, ranks_per_node=2
    ) == [
        [1, 1, 1, 1],
        [0, 0, 0, 0],
        [1, 1, 1, 1],
        [0, 0, 0, 0],
    ]


def sum_again_and_again(error_feedback: bool, rounds: int) -> float:
    """How far the mean of many sums of the same numbers is from the exact sum."""
    replicas, n = Replicas(), 512
    parts = [
        torch.randn(n, generator=torch.Generator().manual_seed(r)) for r in range(4)
    ]
    hop, total = (
        replicas.hop("world", "int4", error_feedback),
        torch.zeros(n, dtype=torch.float64),
    )
    for _ in range(rounds):
        flat = parts[replicas.mesh.rank].clone()
        work = hop(flat, "unit")
        assert work is not None
        work.wait()
        total += flat
    return (total / rounds - torch.stack(parts).double().sum(0)).abs().max().item()


def test_error_feedback_makes_up_for_what_was_rounded_off() -> None:
    """What is owed is never more than one rounding, so the mean of 40 sums is 40 times
    nearer than one (bounded here by 10); without feedback each sum is wrong the same
    way."""
    without = run_ranks(sum_again_and_again, 4, False, 40, ranks_per_node=2)[0]
    with_it = run_ranks(sum_again_and_again, 4, True, 40, ranks_per_node=2)[0]
    assert with_it < without / 10


def count_bytes() -> dict[str, float]:
    replicas, n, found = Replicas(), 1 << 14, {}
    for where in replicas.groups:
        for name in (None, "bfloat16", "int8", "int4"):
            work = replicas.hop(where, name)(torch.ones(n))
            assert work is not None
            work.wait()
            replicas.meter.close_step()
            found[f"{where} {name}"] = replicas.meter.per_step()["inter_bytes"]
    return found


def test_bytes_between_nodes_follow_the_formula() -> None:
    """2 (M - 1) / M x n e = n e over two nodes per rank of the column: with two stages
    each rank has half of it."""
    n = 1 << 14
    sizes = {
        "None": 4 * n,
        "bfloat16": 2 * n,
        "int8": n + n // 64,
        "int4": n // 2 + n // 64,
    }
    for rank, found in enumerate(run_ranks(count_bytes, 4, ranks_per_node=2)):
        for name, n_bytes in sizes.items():
            assert found[f"world {name}"] == n_bytes / 2, f"rank {rank}, {name}"
            assert found[f"pair {name}"] == n_bytes


def fail_behind() -> str:
    background = Background(torch.device("cpu"))

    def fails() -> None:
        raise RuntimeError("lost")

    seen: list[int] = []
    works = [background.submit(fails), background.submit(lambda: seen.append(1))]
    try:
        works[0].wait()
    except RuntimeError as error:
        works[1].wait()
        return f"{error} {seen}"
    return "nothing"


def test_an_error_behind_the_caller_is_raised_where_it_waits() -> None:
    assert fail_behind() == "lost [1]"

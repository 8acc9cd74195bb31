"""256 and 1,024 ranks, one of them at a time: the groups the real code makes, its calls
and its bytes."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.core.comm.metered import LAYERS, gathered_and_reduced, unit_bytes
from tests.core.fake_world import MICRO_BATCHES
from tests.harness import run_script

K = 8
UNITS = 1 + LAYERS
GATHERS, REDUCTIONS = MICRO_BATCHES * (1 + 2 * LAYERS), MICRO_BATCHES * UNITS


def one_rank(world: int, rank: int, **knobs: Any) -> dict[str, Any]:
    arguments = [str(world), str(K), str(rank), json.dumps(knobs)]
    done = run_script(["-m", "tests.core.fake_world", *arguments], timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(world: int, rank: int, degree: int) -> dict[str, Any]:
    """Groups, calls and bytes of partition groups over m = degree / K nodes; every
    figure a formula."""
    seen = one_rank(world, rank, shard_degree=degree)
    first, replicas, m = rank - rank % degree, world // degree, degree // K
    assert seen["groups"]["shard"] == list(range(first, first + degree))
    assert seen["groups"]["replicate"] == list(range(rank % degree, world, degree))
    assert seen["groups_made_later"] == 0, "no group per unit or step"
    assert seen["groups_made"] <= 8
    gathered, reduced = gathered_and_reduced(degree, MICRO_BATCHES)
    meter = seen["meter"]
    assert (
        meter["all_gather/calls"] == GATHERS
        and meter["reduce_scatter/calls"] == REDUCTIONS
    )
    # A sum: as many nodes as ranks on one make both stages' calls look alike.
    calls: Counter[str] = Counter()
    if degree > K:
        node = rank - rank % K
        assert seen["groups"]["intra"] == list(range(node, node + K))
        assert seen["groups"]["inter"] == list(
            range(first + rank % K, first + degree, K)
        )
        # Between nodes (p - k) / p x M by K ranks of a node, each 1 / K of it; inside,
        # one collective per node's part.
        calls.update(
            {f"all_gather over {m}": GATHERS, f"reduce_scatter over {m}": REDUCTIONS}
        )
        # The m of the stage inside nodes are launched as one.
        calls.update(
            {f"all_gather over {K}": GATHERS, f"reduce_scatter over {K}": REDUCTIONS}
        )
        assert meter["all_gather/inter_bytes"] == pytest.approx(
            gathered * (degree - K) / degree / K
        )
        assert meter["reduce_scatter/inter_bytes"] == pytest.approx(
            reduced * (degree - K) / degree / K
        )
    else:
        calls.update(
            {
                f"all_gather over {degree}": GATHERS,
                f"reduce_scatter over {degree}": REDUCTIONS,
            }
        )
        assert meter["all_gather/intra_bytes"] == pytest.approx(
            gathered * (degree - 1) / degree
        )
        assert meter["reduce_scatter/intra_bytes"] == pytest.approx(
            reduced * (degree - 1) / degree
        )
        assert (
            meter[
                "all_gather/inter_bytes"
                if "all_gather/inter_bytes" in meter
                else "inter_bytes"
            ]
            >= 0
        )
    if replicas > 1:
        calls[f"all_reduce over {replicas}"] += UNITS
        shard = sum(unit_bytes(degree)) / degree
        assert meter["all_reduce/inter_bytes"] == pytest.approx(
            2 * (replicas - 1) / replicas * shard
        )
    assert seen["calls"] == calls
    return seen


@pytest.mark.parametrize("degree", [K, 2 * K])
@pytest.mark.slow
def test_a_rank_of_256_does_what_the_formulas_say(degree: int) -> None:
    check(256, 100, degree)


@pytest.mark.slow
@pytest.mark.parametrize("world", [256, 1024])
@pytest.mark.parametrize("degree", [K, 2 * K, 8 * K, "world"])
def test_ranks_of_large_worlds_do_what_the_formulas_say(
    world: int, degree: Any
) -> None:
    for rank in (0, world // 2 + 3, world - 1):
        check(world, rank, world if degree == "world" else degree)


@pytest.mark.slow
def test_whole_replicas_of_1024_ranks_reduce_inside_nodes_first() -> None:
    """Per unit: one sum inside the node, one between 128 nodes, each there and back; 2
    (m - 1) / m of 1 / K of it."""
    seen, m = one_rank(1024, 515, shard_degree=1), 1024 // K
    assert seen["groups"]["replicas_here"] == list(range(512, 520))
    assert seen["groups"]["replicas_across"] == list(range(3, 1024, K))
    padded = sum(-(-unit // (4 * 1024)) * 4 * 1024 for unit in unit_bytes(1))
    assert seen["meter"]["all_reduce/inter_bytes"] == pytest.approx(
        2 * (m - 1) / m * padded / K
    )
    assert seen["meter"]["all_reduce/calls"] == UNITS

"""Every rank of a communicator asks for the same collectives in the same order, also
where replicas take different branches (`tests.core.comm.collective_order`)."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from tests.core.comm.collective_order import WITHOUT, Asked, Case, mismatches
from tests.harness import run_script

# (ranks, ranks of a node, shard degree)
LAYOUTS = [
    *((2, 2, degree) for degree in (1, 2)),
    *((2, 1, degree) for degree in (1, 2)),
    *((4, 2, degree) for degree in (1, 2, 4)),
    *((8, 2, degree) for degree in (2, 4, 8)),
    *((8, 4, degree) for degree in (1, 4, 8)),
]
KNOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"param_dtype": "bfloat16"},
    "one stage": {"collectives": {"hierarchical": False}, "param_dtype": "bfloat16"},
    "bfloat16 between replicas": {"compression": "bf16"},
    "states over the world": {"optimizer_shard": "world", "param_dtype": "bfloat16"},
    "8 bits": {"compression": "int8"},
    "4 bits, states over the world": {
        "compression": "int4",
        "optimizer_shard": "world",
    },
    "once a step": {"keep_between_micro_batches": "gradients"},
    "gathered ahead": {"collectives": {"forward_prefetch": 2}},
    "non-finite steps skipped": {"on_nonfinite_grad_norm": "skip"},
    "states on the host": {"state_offload": "optimizer"},
}
SPLIT = {
    "tensor_parallel_degree": 2,
    "tensor_parallel": {"plan": {"first": "column", "branches.*": "row"}},
}
OWN_COMMUNICATOR = next(iter(WITHOUT))
# What else there is on any of the layouts is played by the slow tests.
SAMPLE = {
    "nodes": Case(4, 2, {"shard_degree": 2}, branches=True),
    "layers over two ranks": Case(
        4, 2, {"shard_degree": 1, "param_dtype": "bfloat16", **SPLIT}, branches=True
    ),
}
BROKEN = Case(
    2,
    1,
    {"shard_degree": 1, "param_dtype": "bfloat16"},
    branches=True,
    without=OWN_COMMUNICATOR,
)


def played(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    argument = json.dumps([asdict(case) for case in cases.values()])
    done = run_script(
        ["-m", "tests.core.comm.collective_order", argument], timeout=3600
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_ranks_of_a_communicator_ask_for_the_same() -> None:
    results = played({**SAMPLE, "broken": BROKEN})
    for name in SAMPLE:
        assert results[name]["mismatches"] == [] and results[name]["calls"] > 20, (
            name,
            results[name],
        )
    # Control messages and sums on one communicator: a replica sends its sum before it
    # has told what it used.
    found = results["broken"]["mismatches"]
    assert any(
        "rank 0 asks" in text and "rank 1 asks" in text and "int32" in text
        for text in found
    ), found


@pytest.mark.slow
def test_with_layers_over_two_ranks() -> None:
    cases = {
        f"{world}/{per_node}, groups of {degree}": Case(
            world, per_node, {"shard_degree": degree, **SPLIT}, branches=True
        )
        for world, per_node, degree in LAYOUTS
        if per_node > 1 and 2 * degree < world
    }
    for layout, result in played(cases).items():
        assert result["mismatches"] == [] and result["calls"] > 0, (layout, result)


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOBS)
def test_on_every_layout(name: str) -> None:
    cases = {
        f"{world}/{per_node}, groups of {degree}, {'branches' if branches else 'together'}": Case(
            world, per_node, {"shard_degree": degree, **KNOBS[name]}, branches=branches
        )
        for world, per_node, degree in LAYOUTS
        for branches in (False, True)[: 1 + (degree < world)]
    }
    for layout, result in played(cases).items():
        assert result["mismatches"] == [] and result["calls"] > 0, (layout, result)


def test_a_mismatch_names_both_sides() -> None:
    one, other = (
        Asked("all_gather", 8, "float32", "a.py:1"),
        Asked("all_reduce", 8, "float32", "b.py:2"),
    )
    key, rest = ("7", (0, 1)), ("8", (0, 1))
    assert (
        mismatches([{key: [one, other], rest: [one]}, {key: [one, other], rest: [one]}])
        == []
    )
    [text] = mismatches([{key: [one, other]}, {key: [one, one]}])
    assert text == (
        "communicator 7 of ranks [0, 1], call 1: rank 0 asks all_reduce of 8 float32 at b.py:2; "
        "rank 1 asks all_gather of 8 float32 at a.py:1"
    )
    [text] = mismatches([{key: [one]}, {}])
    assert text.endswith("rank 1 asks nothing more")

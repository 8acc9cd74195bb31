"""Checkpoints that an earlier commit wrote, on four ranks that posed as two nodes, go
on in this one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.core.checkpoint.training_on import KINDS, train
from tests.harness import ROOT, run_ranks

WRITTEN = ROOT / "tests" / "data" / "checkpoints"


def go_on(
    kind: str, path: str, cases: list[dict[str, Any]]
) -> list[dict[str, list[float]]]:
    return [train(kind, path, True, **knobs) for knobs in cases]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_goes_on_on_other_ranks_and_degrees(kind: str, world: int) -> None:
    cases: list[dict[str, Any]] = [
        {"shard_degree": degree} for degree in (1, 2, 4) if degree <= world
    ]
    check(kind, world, cases, ranks_per_node=2)


def test_a_training_goes_on_over_tensor_ranks() -> None:
    """Of its sizes three is what ranks can divide: the outputs of the second layer."""
    layout = {
        "shard_degree": 1,
        "tensor_parallel_degree": 3,
        "tensor_parallel": {"plan": {"1": "column_gather"}},
    }
    check("sharded in nodes", 3, [layout], ranks_per_node=3)


def check(
    kind: str, world: int, cases: list[dict[str, Any]], ranks_per_node: int
) -> None:
    path = WRITTEN / kind.replace(" ", "-")
    expected = json.loads(Path(f"{path}.json").read_text())
    # All ranks compute the same batch, and means of equal numbers over 1, 2 and 4 ranks
    # are exact. What is left is the order of sums inside products, which processors
    # differ in: the last bit of float32.
    for rank in run_ranks(
        go_on, world, kind, str(path), cases, ranks_per_node=ranks_per_node
    ):
        for knobs, weights in zip(cases, rank, strict=True):
            assert weights.keys() == expected.keys()
            for name, values in weights.items():
                assert values == pytest.approx(expected[name], rel=0, abs=3e-7), (
                    knobs,
                    name,
                )

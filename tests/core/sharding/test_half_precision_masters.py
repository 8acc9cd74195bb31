"""Parameters in half precision with float32 masters over all replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.core.scenarios import (
    parallel_model,
)
from tests.core.sharding.optimizer_shard_runs import (
    BF16_STEPS,
    HalfPrecisionRun,
    assert_near,
    half_precision_run,
    one_process_with_masters,
)
from tests.harness import run_ranks


def half_precision(steps: int) -> list[float]:
    """Master values after many steps too small for bfloat16 to add up, and the
    parameters."""
    torch.manual_seed(0)
    parallel = parallel_model(
        nn.Linear(64, 4, bias=False).bfloat16(), shard_degree=1, optimizer_shard="world"
    )
    before = parallel.module.weight.detach().float().clone()
    optimizer = torch.optim.SGD(parallel.module.parameters(), lr=1.0)
    parallel.prepare_optimizer(optimizer)
    for _ in range(steps):
        (
            parallel.module(torch.ones(1, 64, dtype=torch.bfloat16)).sum() * 4e-5
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = optimizer.state_dict()["state"]
    moved = (before - parallel.module.weight.float()).mean().item()
    return [moved, float(len(saved))]


def test_half_precision_parameters_have_float32_masters() -> None:
    """100 steps of 4e-5 move weights of up to 1/8 by 4e-3; in bfloat16 itself most
    would not move at all."""
    for moved, _ in run_ranks(half_precision, 2, 100):
        assert moved == pytest.approx(4e-3, rel=0.05)


def half_precision_runs(
    recipe: str, cases: list[dict[str, Any]]
) -> list[HalfPrecisionRun]:
    return [half_precision_run(recipe, knobs, (0, BF16_STEPS)) for knobs in cases]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bfloat16 model", "mixed"])
def test_half_precision_training_equals_one_process_with_float32_masters(
    recipe: str,
) -> None:
    world = [{"shard_degree": degree, "optimizer_shard": "world"} for degree in (2, 1)]
    expected = one_process_with_masters(recipe)
    for runs in run_ranks(half_precision_runs, 4, recipe, world, ranks_per_node=2):
        for run in runs:
            assert run.stored == {
                torch.bfloat16 if recipe == "mixed" else torch.float32
            }
            assert_near(run.weights, expected)
        if recipe == "mixed":
            assert "stored in bfloat16" in runs[0].said


def test_updated_parameters_travel_in_half_the_bytes() -> None:
    """Partition groups of a node: what is gathered between nodes is what the optimizer
    has updated."""
    knobs = {"shard_degree": 2, "optimizer_shard": "world"}
    mixed = run_ranks(half_precision_runs, 4, "mixed", [knobs], ranks_per_node=2)
    whole = run_ranks(
        half_precision_runs,
        4,
        "mixed",
        [{**knobs, "param_dtype": None}],
        ranks_per_node=2,
    )
    for (half,), (full,) in zip(mixed, whole, strict=True):
        assert full.stored == {torch.float32}
        assert half.gathered_between_nodes == full.gathered_between_nodes / 2 > 0


def moved(save: str, before: dict[str, Any], later: dict[str, Any]) -> HalfPrecisionRun:
    half_precision_run("mixed", before, (0, 2), save=save)
    return half_precision_run("mixed", later, (2, BF16_STEPS), load=save)


@pytest.mark.slow
def test_half_precision_checkpoints_are_elastic(tmp_path: Path) -> None:
    """To other degrees, to float32 parameters and back: the weights in them are
    float32."""
    world, expected = {"optimizer_shard": "world"}, one_process_with_masters("mixed")
    moves: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"shard_degree": 2, **world}, {"shard_degree": 1, **world}),
        ({"shard_degree": 2, **world}, {"shard_degree": 4}),
        ({"shard_degree": 4}, {"shard_degree": 2, **world}),
    ]
    for number, (before, later) in enumerate(moves):
        saved = str(tmp_path / str(number))
        for run in run_ranks(moved, 4, saved, before, later, ranks_per_node=2):
            assert_near(run.weights, expected)

"""Parameters in half precision with float32 masters over all replicas."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import load_checkpoint, save_checkpoint
from smp_core.checkpoint.optimizers import load_named_optimizer_state, named_optimizer_state
from tests.core.optimizer_shard_runs import RECIPES, bf16_model, momentum
from tests.core.scenarios import (
    parallel_model,
)
from tests.harness import run_ranks


def half_precision(steps: int) -> list[float]:
    """Master values after many steps too small for bfloat16 to add up, and the parameters."""
    torch.manual_seed(0)
    parallel = parallel_model(nn.Linear(64, 4, bias=False).bfloat16(), shard_degree=1, optimizer_shard="world")
    before = parallel.module.weight.detach().float().clone()
    optimizer = torch.optim.SGD(parallel.module.parameters(), lr=1.0)
    parallel.prepare_optimizer(optimizer)
    for _ in range(steps):
        (parallel.module(torch.ones(1, 64, dtype=torch.bfloat16)).sum() * 4e-5).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = optimizer.state_dict()["state"]
    moved = (before - parallel.module.weight.float()).mean().item()
    return [moved, float(len(saved))]


def test_half_precision_parameters_have_float32_masters() -> None:
    """100 steps of 4e-5 move weights of up to 1/8 by 4e-3; in bfloat16 itself most would not move at all."""
    for moved, _ in run_ranks(half_precision, 2, 100):
        assert moved == pytest.approx(4e-3, rel=0.05)


BF16_STEPS, BF16_MICRO = 4, 2


def bf16_tokens(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(101, (2, 9), generator=generator)


def one_process_with_masters(recipe: str) -> dict[str, torch.Tensor]:
    computing = bf16_model(recipe).bfloat16()
    masters = {name: nn.Parameter(p.detach().float()) for name, p in bf16_model(recipe).named_parameters()}
    optimizer = momentum(masters.values())
    for step in range(BF16_STEPS):
        for name, parameter in computing.named_parameters():
            parameter.data.copy_(masters[name].data)
        sums = {name: torch.zeros_like(master) for name, master in masters.items()}
        for micro, rank in itertools.product(range(BF16_MICRO), range(4)):
            computing.zero_grad()
            (computing(bf16_tokens(step, micro, rank)) / BF16_MICRO).backward()
            for name, parameter in computing.named_parameters():
                assert parameter.grad is not None
                sums[name] += parameter.grad.float()
        for name, master in masters.items():
            master.grad = sums[name] / 4
        optimizer.step()
    return {name: master.detach() for name, master in masters.items()}


@dataclass
class HalfPrecisionRun:
    weights: dict[str, torch.Tensor]
    stored: set[torch.dtype]
    gathered_between_nodes: float
    said: str


def half_precision_run(
    recipe: str, knobs: dict[str, Any], steps: tuple[int, int], load: str | None = None, save: str | None = None
) -> HalfPrecisionRun:
    parallel = parallel_model(bf16_model(recipe), **{**RECIPES[recipe], **knobs})
    optimizer = momentum(parallel.module.parameters())
    parallel.prepare_optimizer(optimizer)
    if load is not None:
        state = parallel.model_state()
        load_checkpoint(load, {"model": state})
        parallel.take_model_state(state)
        load_named_optimizer_state(load, ("optimizer",), parallel.module, optimizer)
    for step in range(*steps):
        for micro in range(BF16_MICRO):
            with parallel.window.accumulate(micro < BF16_MICRO - 1):
                (parallel.module(bf16_tokens(step, micro, dist.get_rank())) / BF16_MICRO).backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = parallel.meter.unfinished().get("all_gather/inter_bytes", 0.0)
    state, named = parallel.model_state(), named_optimizer_state(parallel.module, optimizer)
    if save is not None:
        save_checkpoint(save, {"model": state, "optimizer": named})
    # For a bfloat16 model the weights are those of its optimizer state.
    names = [name for name, _ in parallel.module.named_parameters()]
    fine = {name: named["state"][name].get("smp_master", state[name]) for name in names}
    weights = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in fine.items()}
    stored = {parameter.dtype for parameter in parallel.module.parameters()}
    return HalfPrecisionRun(weights, stored, sent, str(parallel.config.why("optimizer_shard")))


def half_precision_runs(recipe: str, cases: list[dict[str, Any]]) -> list[HalfPrecisionRun]:
    return [half_precision_run(recipe, knobs, (0, BF16_STEPS)) for knobs in cases]


def assert_near(seen: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """float32 sums of eight gradients in another order, through four steps; an update that was lost to bfloat16 would
    be 2**-9 of a weight off."""
    for name, value in expected.items():
        assert seen[name].dtype == torch.float32
        assert (seen[name] - value).abs().max() <= 2e-6, name


@pytest.mark.parametrize("recipe", [pytest.param("bfloat16 model", marks=pytest.mark.slow), "mixed"])
def test_half_precision_training_equals_one_process_with_float32_masters(recipe: str) -> None:
    world = [{"shard_degree": degree, "optimizer_shard": "world"} for degree in (2, 1)]
    expected = one_process_with_masters(recipe)
    for runs in run_ranks(half_precision_runs, 4, recipe, world, ranks_per_node=2):
        for run in runs:
            assert run.stored == {torch.bfloat16}
            assert_near(run.weights, expected)
        if recipe == "mixed":
            assert "stored in bfloat16" in runs[0].said


def test_updated_parameters_travel_in_half_the_bytes() -> None:
    """Partition groups of a node: what is gathered between nodes is what the optimizer has updated."""
    knobs = {"shard_degree": 2, "optimizer_shard": "world"}
    mixed = run_ranks(half_precision_runs, 4, "mixed", [knobs], ranks_per_node=2)
    whole = run_ranks(half_precision_runs, 4, "mixed", [{**knobs, "param_dtype": None}], ranks_per_node=2)
    for (half,), (full,) in zip(mixed, whole, strict=True):
        assert full.stored == {torch.float32}
        assert half.gathered_between_nodes == full.gathered_between_nodes / 2 > 0


def moved(save: str, before: dict[str, Any], later: dict[str, Any]) -> HalfPrecisionRun:
    half_precision_run("mixed", before, (0, 2), save=save)
    return half_precision_run("mixed", later, (2, BF16_STEPS), load=save)


@pytest.mark.slow
def test_half_precision_checkpoints_are_elastic(tmp_path: Path) -> None:
    """To other degrees, to float32 parameters and back: the weights in them are float32."""
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

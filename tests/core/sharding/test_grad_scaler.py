"""Dynamic loss scaling sees every non-finite gradient, on whatever rank and in whatever
kind of tensor it is."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from smp_core.sharding.optimizer.grad_scaler import ShardedGradScaler
from tests.core.equivalence import build, full_weights
from tests.core.models import global_batches, loss_of
from tests.core.sharding.prepared_runs import (
    LAYOUTS,
    WORLD,
    batch,
    difference,
    net,
    own_batch,
    sharded,
    weights,
)
from tests.harness import run_ranks


def scaled_step(
    spoil: str,
) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    parallel = build(torch.float64, shard_degree=2)
    model = parallel.module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=1024.0)
    before = full_weights(model)
    tokens = global_batches(1, 1, 4)[0][0].chunk(2)[dist.get_rank()]
    scaler.scale(loss_of(model, tokens)).backward()
    if spoil == "sharded" and dist.get_rank() == 1:
        model.embed.weight.grad.to_local()[0] = float("inf")
    if spoil == "plain":
        model.gain.grad.fill_(float("nan"))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), before, full_weights(model)


@pytest.mark.parametrize(
    "spoil", [pytest.param("sharded", marks=pytest.mark.slow), "plain"]
)
def test_a_non_finite_gradient_skips_the_step_on_all_ranks(spoil: str) -> None:
    for scale, before, after in run_ranks(scaled_step, 2, spoil):
        assert scale == 512.0
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_finite_gradients_are_unscaled_once() -> None:
    def plain() -> dict[str, torch.Tensor]:
        from tests.core.models import TroubledModel

        torch.manual_seed(0)
        model = TroubledModel().double()
        loss_of(model, global_batches(1, 1, 4)[0][0]).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return {name: value.detach() for name, value in model.state_dict().items()}

    expected = plain()
    for scale, _, after in run_ranks(scaled_step, 2, "nothing"):
        assert scale == 1024.0
        assert all(
            (after[name] - value).abs().max() <= 1e-12
            for name, value in expected.items()
        )


class _Counting(torch.amp.GradScaler):
    """A class of the user's, which does something besides."""

    steps = 0

    def step(self, optimizer: torch.optim.Optimizer, *args, **kwargs) -> float | None:
        self.steps += 1
        return super().step(optimizer, *args, **kwargs)


def scaled_run(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, ranks: range | list[int]
) -> tuple[dict[str, torch.Tensor], float, int]:
    scaler = _Counting("cpu", init_scale=8.0, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        for rank in ranks:
            loss = model(batch(step, rank)) / len(ranks)
            # One rank's loss overflows, whose step all of them skip.
            spoilt = step == 1 and rank == 0
            scaler.scale(loss * float("inf") if spoilt else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return weights(model), scaler.get_scale(), scaler.steps


def scalers_of_ones_own() -> list[str]:
    model = net()
    kept = torch.optim.SGD(model.parameters(), lr=0.1)
    expected, scale, steps = scaled_run(model, kept, range(WORLD))
    wrong = []
    for knobs in LAYOUTS:
        parallel = sharded(knobs)
        optimizer = torch.optim.SGD(parallel.module.parameters(), lr=0.1)
        parallel.prepare_optimizer(optimizer)
        own = scaled_run(parallel.module, optimizer, own_batch(parallel))
        apart = difference(own[0], expected)
        if not apart <= 1e-12 or own[1:] != (scale, steps):
            wrong.append(f"{knobs}: {apart}, {own[1:]}")
    return wrong


def test_a_scaler_that_a_loop_makes_unscales_what_is_stepped() -> None:
    """Masters and 0-d parameters together, sharded and whole ones, and parts on the
    host."""
    assert run_ranks(scalers_of_ones_own, WORLD) == [[]] * WORLD


def scaled_windows(model: torch.nn.Module, optimizer: Any, parallel: Any) -> Any:
    """Windows whose passes all run inside of ``accumulate``."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    ranks = range(WORLD) if parallel is None else own_batch(parallel)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        held = nullcontext() if parallel is None else parallel.window.accumulate()
        with held:
            for rank in ranks:
                scaler.scale(model(batch(step, rank)) / len(ranks)).backward()
        if step == 1:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return weights(model)


def windows_that_a_scaler_closes() -> list[str]:
    model = net()
    kept = torch.optim.SGD(model.parameters(), lr=0.1)
    expected, wrong = scaled_windows(model, kept, None), []
    for knobs in LAYOUTS:
        parallel = sharded(knobs)
        optimizer = torch.optim.SGD(parallel.module.parameters(), lr=0.1)
        parallel.prepare_optimizer(optimizer)
        own = scaled_windows(parallel.module, optimizer, parallel)
        apart = difference(own, expected)
        if not apart <= 1e-12:
            wrong.append(f"{knobs}: {apart}")
    return wrong


def test_a_scaler_unscales_what_a_window_holds() -> None:
    """A window that the step closed added gradients with the scale in them."""
    assert run_ranks(windows_that_a_scaler_closes, WORLD) == [[]] * WORLD


class _WithAWayOfItsOwn(torch.amp.GradScaler):
    def _unscale_grads_(self, *args):
        return super()._unscale_grads_(*args)


def foreign_scaler() -> str:
    parallel = sharded({"shard_degree": 1, "optimizer_shard": "world"})
    optimizer = torch.optim.SGD(parallel.module.parameters(), lr=0.1)
    parallel.prepare_optimizer(optimizer)
    scaler = _WithAWayOfItsOwn("cpu")
    scaler.scale(parallel.module(batch(0, dist.get_rank()))).backward()
    with pytest.raises(ValueError, match="class _WithAWayOfItsOwn unscales in a way"):
        scaler.step(optimizer)
    return "refused"


def test_a_scaler_that_cannot_find_masters_is_refused() -> None:
    assert run_ranks(foreign_scaler, WORLD) == ["refused"] * WORLD

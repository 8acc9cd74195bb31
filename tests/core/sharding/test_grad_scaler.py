"""Dynamic loss scaling sees every non-finite gradient, on whatever rank and in whatever
kind of tensor it is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from smp_core.sharding.optimizer.grad_scaler import ShardedGradScaler
from tests.core.equivalence import build, full_weights
from tests.core.models import global_batches, loss_of
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

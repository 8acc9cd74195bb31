"""BatchNorm over all ranks equals BatchNorm of the whole batch in one process (float64:
1e-12 for the sums' order; half precision: its outputs rounded once)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from smp_core.sharding.batch_norm import sync_batch_norm_on_cpu
from tests.harness import run_ranks


def convnet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.LazyLinear(5)
    ).double()


def step(model: nn.Module, images: torch.Tensor) -> None:
    for _ in range(2):
        model(images).square().sum().backward()


def results(model: nn.Module) -> dict[str, torch.Tensor]:
    gradients = {
        f"grad.{name}": parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    return gradients | {name: buffer.clone() for name, buffer in model.named_buffers()}


def batch() -> torch.Tensor:
    return torch.randn(
        8, 2, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def run_synced() -> dict[str, torch.Tensor]:
    model = convnet()
    model(batch())
    model = convnet_with_weights(model)
    mine = batch().chunk(dist.get_world_size())[dist.get_rank()]
    step(sync_batch_norm_on_cpu(model), mine)
    seen = results(model)
    for name, value in seen.items():
        if name.startswith("grad."):
            dist.all_reduce(value)
    return seen


def convnet_with_weights(model: nn.Module) -> nn.Module:
    for name, buffer in model.named_buffers():
        buffer.fill_(1.0 if "var" in name else 0.0)
    return model


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_gradients_and_running_statistics_are_those_of_the_global_batch(
    world: int,
) -> None:
    model = convnet()
    model(batch())
    model = convnet_with_weights(model)
    step(model, batch())
    expected = results(model)
    for seen in run_ranks(run_synced, world):
        for name, value in expected.items():
            assert (seen[name] - value).abs().max() <= 1e-12 * max(
                1.0, value.abs().max().item()
            ), name


def half_precision_batch(dtype: torch.dtype) -> torch.Tensor:
    """Return 65,536 elements of each channel on each of two ranks, around 5."""
    generator = torch.Generator().manual_seed(2)
    return (torch.randn(4, 2, 256, 128, generator=generator) + 5.0).to(dtype)


def run_half_precision(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    norm = sync_batch_norm_on_cpu(nn.BatchNorm2d(2))
    mine = half_precision_batch(dtype).chunk(dist.get_world_size())[dist.get_rank()]
    output = norm(mine)
    return {"output": output.detach(), **dict(norm.named_buffers())}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    norm = nn.BatchNorm2d(2)
    expected = norm(half_precision_batch(dtype)).detach().chunk(2)
    for rank, seen in enumerate(run_ranks(run_half_precision, 2, dtype)):
        assert seen["output"].dtype == dtype
        # A unit in the last place of the largest outputs, which are near 4.
        rounding = 4 * torch.finfo(dtype).eps
        off = (seen["output"].float() - expected[rank].float()).abs().max()
        assert off <= rounding
        # Sums of 131,072 elements in another order, in float32.
        torch.testing.assert_close(
            seen["running_mean"], norm.running_mean, rtol=1e-5, atol=0
        )
        torch.testing.assert_close(
            seen["running_var"], norm.running_var, rtol=1e-4, atol=0
        )


class _WithActivation(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(x))


def test_a_batch_norm_that_computes_something_else_besides_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), _WithActivation(4))
    with pytest.raises(ValueError, match="1 is a _WithActivation, whose forward"):
        sync_batch_norm_on_cpu(model)
    assert type(model[1]) is _WithActivation


def test_hooks_and_references_of_a_batch_norm_are_kept() -> None:
    """Code that holds the layer, and what was registered on it."""
    norm, seen = nn.BatchNorm1d(4), []
    norm.register_forward_hook(lambda *_: seen.append(True))
    model = nn.Sequential(norm, nn.Tanh(), norm)
    synced = sync_batch_norm_on_cpu(model)
    synced(torch.ones(2, 4))
    assert seen == [True, True] and synced[0] is synced[2] is norm

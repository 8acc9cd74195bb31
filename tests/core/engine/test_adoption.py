"""A pre-sharded model is asked what any other model is asked."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from tests.harness import run_ranks


def looked_up_in(two_dimensional: bool) -> str:
    if two_dimensional:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model = nn.Sequential(nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 4))
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError) as refused:
        parallelize(model, SmpConfig())
    return str(refused.value)


@pytest.mark.parametrize("two_dimensional", [False, True])
def test_embeddings_that_ranks_would_change_apart_are_refused(
    two_dimensional: bool,
) -> None:
    for said in run_ranks(looked_up_in, 2, two_dimensional):
        assert said.startswith("Embedding 0 has max_norm=1.0")


def dropped_in_a_window(first: bool, second: bool) -> dict[str, torch.Tensor] | str:
    """Train in windows of two passes, between which optimizers drop gradients."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).double()
    x = torch.arange(4.0).double() + dist.get_rank()
    alone = copy.deepcopy(model)
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    parallel = parallelize(model, SmpConfig())
    # The model's first layer is a unit, the others are one.
    optimizers = [
        torch.optim.SGD(model[number].parameters(), lr=0.1) for number in range(3)
    ]
    for optimizer in optimizers:
        parallel.prepare_optimizer(optimizer)
    try:
        with parallel.window.accumulate():
            model(x).sum().backward()
        if first:
            optimizers[0].zero_grad()
        if second:
            optimizers[1].zero_grad()
        model(x).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    both = [torch.arange(4.0).double() + rank for rank in range(2)]
    alone(torch.stack(both)).sum().div(2).backward()
    off = 0.0
    for (name, now), before in zip(
        model.named_parameters(), alone.parameters(), strict=True
    ):
        passes = 1 if first and name.startswith("0.") else 2
        expected = before - 0.1 * passes * before.grad
        off = max(off, float((now.full_tensor() - expected).detach().abs().max()))
    return {"off": torch.tensor(off)}


def test_gradients_that_torch_holds_are_dropped_by_the_unit() -> None:
    """Those of a part of a unit are refused: they came back in the step."""
    for found in run_ranks(dropped_in_a_window, 2, True, False):
        assert found["off"] <= 1e-12
    for found in run_ranks(dropped_in_a_window, 2, False, True):
        assert "zero_grad dropped gradients of 1.weight" in found

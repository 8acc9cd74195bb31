"""Adapters that are attached after a model was sharded, or to one that came sharded, are one adapter on all ranks, and
train as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import load_checkpoint, save_checkpoint
from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.topology import Topology
from tests.core.sharding.frozen_runs import with_decoded_base
from tests.harness import run_ranks

WORLD = 4
WIDTH = 16
# Sums of float64 gradients in another order.
EXACT = 1e-12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        return (y if not hasattr(self, "adapter") else y + self.adapter(x) - 2 * self.other(x)).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net().double().requires_grad_(False)


def attach(model: Any, seed: int, width: int = 2, swapped: bool = False) -> None:
    """Attach two adapters to each block, of other values for each seed."""
    torch.manual_seed(seed)
    for block in model.blocks:
        for name in ("other", "adapter") if swapped else ("adapter", "other"):
            setattr(block, name, nn.Sequential(nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)).double())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int]) -> None:
    for step in range(3):
        optimizer.zero_grad()
        for rank in ranks:
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
            (model(x) / len(ranks)).backward()
        optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def alone(coded: str | None) -> dict[str, torch.Tensor]:
    model = net() if coded is None else with_decoded_base(net(), coded)
    attach(model, 0)
    train(model, adamw(model), list(range(WORLD)))
    return dict(model.named_parameters())


def attached(order: str, knobs: dict[str, Any]) -> float:
    """The largest difference of a parameter from one process's."""
    rank, model = dist.get_rank(), net()
    asked = SmpConfig(units=["Block"], **knobs)
    if order == "came sharded":
        asked, mesh = SmpConfig(**knobs), init_device_mesh("cpu", (2, 2), mesh_dim_names=("others", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
    if order in ("before", "came sharded"):
        attach(model, rank)
    parallel = parallelize(model, asked, topology=Topology.discover())
    if order == "after":
        attach(model, rank, swapped=rank % 2 == 1)
    # Frozen parameters have no gradients, and are not stepped.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if order == "in a group" else adamw(model)
    parallel.prepare_optimizer(optimizer)
    if order == "in a group":
        attach(model, rank)
        optimizer.add_param_group({"params": [each for each in model.parameters() if each.requires_grad]})
    train(model, optimizer, [rank])
    expected = alone(knobs.get("frozen_storage"))
    pairs = [(value, expected[name]) for name, value in model.named_parameters()]
    return max(
        ((value.full_tensor() if isinstance(value, DTensor) else value) - other).abs().max().item()
        for value, other in pairs
    )


@pytest.mark.parametrize(
    ("order", "knobs"),
    [
        ("before", {"shard_degree": 2}),
        ("after", {"shard_degree": 2}),
        ("after", {"shard_degree": 1}),
        ("after", {"shard_degree": 4, "frozen_storage": "int8"}),
        ("after", {"shard_degree": 2, "keep_between_micro_batches": "gradients"}),
        ("in a group", {"shard_degree": 2}),
        ("came sharded", {}),
    ],
    ids=str,
)
def test_adapters_train_like_one_process_whenever_they_are_attached(order: str, knobs: dict[str, Any]) -> None:
    for seen in run_ranks(attached, WORLD, order, knobs, ranks_per_node=2):
        assert seen <= EXACT


def others_on_a_rank() -> str:
    parallel = parallelize(net(), SmpConfig(units=["Block"], shard_degree=2), topology=Topology.discover())
    attach(parallel.module, 0, width=2 + dist.get_rank() // 3)
    with pytest.raises(ValueError) as caught:
        parallel.prepare_optimizer(adamw(parallel.module))
    return str(caught.value)


def test_other_adapters_on_a_rank_are_refused_on_all_ranks() -> None:
    for seen in run_ranks(others_on_a_rank, WORLD, ranks_per_node=2):
        assert "ranks 0 and 3 attached different parameters to the model: blocks.0.adapter.0.bias" in seen


def saved_and_loaded(folder: Any) -> list[bool]:
    """From one attached after to one attached before, which is sharded."""
    found = []
    late = parallelize(net(), SmpConfig(units=["Block"], shard_degree=2), topology=Topology.discover())
    attach(late.module, 0)
    late.prepare_optimizer(adamw(late.module))
    save_checkpoint(folder, {"model": late.model_state()})
    model = net()
    attach(model, 1)
    early = parallelize(model, SmpConfig(units=["Block"], shard_degree=2), topology=Topology.discover())
    load_checkpoint(folder, {"model": early.model_state()})
    for name, value in early.module.named_parameters():
        assert isinstance(value, DTensor)
        other = late.module.get_parameter(name)
        whole = other.full_tensor() if isinstance(other, DTensor) else other
        found.append(torch.equal(value.full_tensor(), whole))
    return found


def test_checkpoints_hold_what_was_attached(tmp_path: Any) -> None:
    for seen in run_ranks(saved_and_loaded, 2, tmp_path):
        assert all(seen) and len(seen) == 20

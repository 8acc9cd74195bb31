"""Nets of two blocks that optimizers of this folder step with given gradients, on
shards and in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smp_core.checkpoint import shard_like
from smp_core.config import SmpConfig
from smp_core.engine import ParallelModel
from smp_core.entry import parallelize
from smp_core.topology import Topology


class Net(nn.Module):
    """Two blocks, and a 0-d parameter."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.gain = nn.Parameter(torch.tensor(1.5))


def net_of(block: Callable[[], nn.Module], seed: int, dtype: torch.dtype) -> Net:
    torch.manual_seed(seed)
    return Net(block).to(dtype)


def parallel(model: Net, **knobs: Any) -> ParallelModel:
    """Shard a net, each block by itself."""
    blocks = type(model.blocks[0]).__name__
    return parallelize(
        model, SmpConfig(units=[blocks], **knobs), topology=Topology.discover()
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Step with gradients that every process draws alike; some parameters have none in
    some steps."""
    generator = torch.Generator().manual_seed(number)
    optimizer.zero_grad()
    for place, parameter in enumerate(model.parameters()):
        gradient = torch.randn(
            parameter.shape, generator=generator, dtype=torch.float64
        ) * 10.0 ** -(place % 4)
        if (place + number) % 5:
            parameter.grad = shard_like(parameter, gradient.to(parameter.dtype))
    optimizer.step()

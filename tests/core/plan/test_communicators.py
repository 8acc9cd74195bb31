"""How many communicators a layout takes, as it was decided and as they are made; up to
1,024 ranks of torch's fake groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

# Torch's only way to the fake backend.
from torch.testing._internal.distributed.fake_pg import FakeStore

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.plan import communicators
from smp_core.topology import Topology

PIPELINE = {"pipeline_parallel_degree": 4, "pipeline": {"microbatches": 4}}
TENSOR = {"plan": {"blocks.*.up": "column", "blocks.*.down": "row"}}

# ranks in nodes of 8, knobs, ranks of each communicator
CASES: list[tuple[int, dict[str, Any], list[int]]] = [
    (8, {"shard_degree": "world"}, [8]),
    (64, {"shard_degree": "node"}, [8, 8, 64]),
    (1024, {"shard_degree": "node"}, [8, 128, 1024]),
    (64, {"shard_degree": "world"}, [8, 8, 64]),
    (64, {"shard_degree": "world", "collectives": {"hierarchical": False}}, [64]),
    (1024, {"shard_degree": 64}, [8, 8, 16, 64, 1024]),
    (64, {"shard_degree": 1}, [8, 8, 64, 64]),
    (64, {"shard_degree": 16, "reshard_after_forward": 4}, [2, 4, 4, 8, 16, 64]),
    (
        64,
        {"shard_degree": 4, "tensor_parallel_degree": 2, "tensor_parallel": TENSOR},
        [2, 4, 8, 32, 64],
    ),
    (64, {"shard_degree": 4, **PIPELINE}, [2, 2, 4, 4, 4, 4, 16, 64]),
    (
        64,
        {
            "shard_degree": 4,
            "tensor_parallel_degree": 2,
            "tensor_parallel": TENSOR,
            **PIPELINE,
        },
        [2, 2, 4, 4, 4, 8, 16, 64],
    ),
    (
        1024,
        {
            "shard_degree": 8,
            "tensor_parallel_degree": 8,
            "tensor_parallel": TENSOR,
            **PIPELINE,
        },
        [4, 4, 4, 8, 8, 32, 256, 1024],
    ),
    (64, {"shard_degree": 8, "context_parallel_degree": 8}, [8, 8, 64]),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dummy_inputs = {"x": torch.zeros(2, 16)}
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize(("world", "knobs", "expected"), CASES)
def test_a_layout_takes_as_many_communicators_as_was_decided(
    world: int, knobs: dict[str, Any], expected: list[int]
) -> None:
    topology = Topology.uniform(world, 8)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        parallel = parallelize(Model(), SmpConfig(**knobs), topology=topology)
        assert parallel.mesh.communicators == expected
        assert communicators(parallel.plan) == expected
        assert _made() == expected
    finally:
        dist.destroy_process_group()


def _made() -> list[int]:
    """Return the ranks of every group that torch knows of with rank 0 and others in it;
    no public name lists them."""
    groups = dist.distributed_c10d._world.pg_group_ranks.values()
    return sorted(len(ranks) for ranks in groups if 0 in ranks and len(ranks) > 1)

"""Small models whose memory is counted by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smp_core.config import SmpConfig
from smp_core.engine.auto_degree import (
    decide_with_smallest_degree,
    plans_of_all_degrees,
)
from smp_core.engine.decide import decide
from smp_core.plan.memory import MemoryEstimate, estimate as estimate_of
from smp_core.plan.plan import Plan
from smp_core.plan.shapes import Cluster, Shapes
from smp_core.plan.units import PlannedUnit, WrapPlan
from smp_core.topology import Topology


class TwoBlocks(nn.Module):
    """Embedding 10x8 (tied head), blocks of 7x8 + 7 and 16x8 (frozen), a 0-d parameter,
    a buffer of 5 int64."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.first = nn.Linear(8, 7)
        self.second = nn.Linear(8, 16, bias=False).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("counts", torch.zeros(5, dtype=torch.int64))


Units = list[list[str]]
UNITS: Units = [["first.weight", "first.bias"], ["second.weight"]]


def shapes_of(model: nn.Module, units: Units | None = None) -> Shapes:
    """With these units and a root that has the rest."""
    units = units or []
    inside = {name for unit in units for name in unit}
    rest = tuple(
        name
        for name, parameter in model.named_parameters()
        if name not in inside and parameter.ndim
    )
    planned = [
        PlannedUnit(str(number), tuple(unit), False)
        for number, unit in enumerate(units)
    ]
    scalars = tuple(
        name for name, parameter in model.named_parameters() if not parameter.ndim
    )
    return Shapes.with_units(
        model, WrapPlan((*planned, PlannedUnit("", rest, True)), scalars, "as told")
    )


def plan_of(
    model: nn.Module,
    shard_degree: int = 1,
    world_size: int = 0,
    units: Units | None = None,
    **knobs: Any,
) -> Plan:
    cluster = Cluster(
        Topology.uniform(world_size or shard_degree, world_size or shard_degree)
    )
    return decide(
        shapes_of(model, units), SmpConfig(shard_degree=shard_degree, **knobs), cluster
    )


def plans(
    model: nn.Module,
    topology: Topology,
    device_memory: int,
    units: Units | None = None,
    **knobs: Any,
) -> list[Plan]:
    return plans_of_all_degrees(
        shapes_of(model, units),
        SmpConfig(**knobs),
        Cluster(topology, "cpu", device_memory),
    )


def estimate(
    shard_degree: int, dtype: torch.dtype = torch.float32, **knobs: Any
) -> MemoryEstimate:
    with torch.device("meta"):
        model = TwoBlocks().to(dtype)
    return estimate_of(plan_of(model, shard_degree, units=UNITS, **knobs))


def auto(
    optimizers: list[torch.optim.Optimizer], optimizer: str = "auto", **knobs: Any
) -> Plan:
    model = nn.Linear(1024, 1024, bias=False, device="meta")
    # 4 MiB each of parameters, gradients and every state; degree 2 has half of them,
    # and 4 MiB of gathered parameters.
    planner = {
        "memory_headroom": 0.0,
        "device_memory_gib": 12 / 1024,
        "optimizer": optimizer,
    }
    config = SmpConfig(planner=planner, **knobs)
    cluster = Cluster(Topology.uniform(4, 4))
    return decide_with_smallest_degree(
        shapes_of(model), config, cluster, optimizers=optimizers
    )

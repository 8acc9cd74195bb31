"""What sharding costs on the host beside FSDP2 alone: processor time of a training
step, by the size of the group.

    python benchmarks/host_time.py [--pairs 30] [--out
    benchmarks/results/host_time.json]

One process is rank 0 of torch's fake process group, whose collectives do nothing, with
small layers: what is left is Python and dispatch. Steps of `smp_core` (meter and
divergence check on) and of bare `fully_shard` take turns in one process; a figure is
the median, over the pairs, of the ratio of their processor times. Garbage is collected
between steps only.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from machine import about
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

# Torch's only way to the fake backend.
from torch.testing._internal.distributed.fake_pg import FakeStore

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.topology import Topology

GOAL = 1.05
BLOCKS, WIDTH, RANKS_PER_NODE = 8, 8, 8
# ranks of the group, parameters of a unit
CASES = [(8, 9), (8, 16), (512, 9), (512, 16)]


class Block(nn.Module):
    """Layers with as many parameters as asked, of which two are those of norms."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(parameters - 2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, *self.norms):
            x = x + layer(x)
        return x


class Model(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(parameters) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def stepping(
    model: nn.Module, after: Callable[[], None], optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    x = torch.randn(2, 4, WIDTH)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        after()

    return step


def ours(world: int, parameters: int) -> Callable[[], None]:
    knobs = {
        "shard_degree": world,
        "param_dtype": "bfloat16",
        "reshard_after_forward": True,
        "units": ["Block"],
    }
    config = SmpConfig(**knobs, collectives={"hierarchical": False})
    parallel = parallelize(
        Model(parameters), config, topology=Topology.uniform(world, RANKS_PER_NODE)
    )
    optimizer = torch.optim.AdamW(parallel.module.parameters())
    parallel.prepare_optimizer(optimizer)
    return stepping(parallel.module, parallel.meter.close_step, optimizer)


def bare(world: int, parameters: int) -> Callable[[], None]:
    model, mesh = Model(parameters), init_device_mesh("cpu", (world,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return stepping(model, lambda: None, torch.optim.AdamW(model.parameters()))


def measure(world: int, parameters: int, pairs: int) -> dict[str, Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    sides = {"ours": ours(world, parameters), "bare": bare(world, parameters)}
    for step in sides.values():
        for _ in range(3):
            step()
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(pairs):
        for side, step in sides.items():
            gc.collect()
            gc.disable()
            began = time.process_time()
            step()
            seconds[side].append(time.process_time() - began)
            gc.enable()
    dist.destroy_process_group()
    ratios = [
        own / other for own, other in zip(seconds["ours"], seconds["bare"], strict=True)
    ]
    per_unit = {
        side: 1e6 * statistics.median(each) / (BLOCKS + 1)
        for side, each in seconds.items()
    }
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "ranks": world,
        "parameters": parameters,
        "us_per_unit": per_unit,
        "ratio": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        **about("host_time"),
        "goal": GOAL,
        "pairs": args.pairs,
        "results": [],
    }
    for world, parameters in CASES:
        row = measure(world, parameters, args.pairs)
        result["results"].append(row)
        low, high = row["quartiles"]
        spent = ", ".join(
            f"{side} {us:.0f} us" for side, us in row["us_per_unit"].items()
        )
        print(
            f"{world} ranks, {parameters} parameters: {spent} a unit and step, ratio {row['ratio']:.3f}",
            end=" ",
        )
        print(f"({low:.3f} to {high:.3f})", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(args.out)


if __name__ == "__main__":
    main()

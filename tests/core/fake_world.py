"""One rank of a large world, alone: the real code on torch's fake process group, whose
collectives do nothing.

    python -m tests.core.fake_world WORLD RANKS_PER_NODE RANK KNOBS(JSON)

Prints as JSON which groups the mesh made, what one training step asked of them, and
what the meter counted. Numbers that are computed are meaningless here; what is sent,
how often and to whom is not.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

# Torch's only way to the fake backend.
from torch.testing._internal.distributed.fake_pg import FakeStore

from smp_core.cluster.layout import PARTITION, Axis
from smp_core.config import SmpConfig
from smp_core.entry import build_mesh, parallelize
from smp_core.topology import Topology
from tests.core.gpt import SmallGpt
from tests.core.recording import CallRecorder

MICRO_BATCHES = 2


def main(world: int, ranks_per_node: int, rank: int, knobs: dict[str, Any]) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    topology = Topology.uniform(world, ranks_per_node)
    mesh, config = build_mesh(SmpConfig(**knobs), topology, "cpu")
    torch.manual_seed(0)
    parallel = parallelize(SmallGpt(), config, mesh=mesh)
    optimizer = torch.optim.SGD(parallel.module.parameters(), lr=0.0)
    parallel.prepare_optimizer(optimizer)
    groups_made = len(dist.distributed_c10d._world.pg_map)
    parallel.meter.close_step()
    with CallRecorder() as recorder:
        for micro in range(MICRO_BATCHES):
            with parallel.window.accumulate(micro < MICRO_BATCHES - 1):
                parallel.module(torch.zeros(1, 9, dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()
    parallel.meter.close_step()
    named = {"shard": mesh.shard_group, "replicate": mesh.replicate_group}
    if mesh.stages(*PARTITION) is not None:
        named.update(intra=mesh.stages(*PARTITION)[0], inter=mesh.stages(*PARTITION)[1])
    if mesh.stages(Axis.REPLICATE) is not None:
        named.update(
            replicas_here=mesh.stages(Axis.REPLICATE)[0],
            replicas_across=mesh.stages(Axis.REPLICATE)[1],
        )
    calls = Counter(
        (call.kind, len(call.ranks)) for call in recorder.calls if call.dtype != "int32"
    )
    print(
        json.dumps(
            {
                "groups": {
                    name: dist.get_process_group_ranks(group)
                    for name, group in named.items()
                },
                "groups_made": groups_made,
                "groups_made_later": len(dist.distributed_c10d._world.pg_map)
                - groups_made,
                "calls": {
                    f"{kind} over {size}": count
                    for (kind, size), count in sorted(calls.items())
                },
                "meter": parallel.meter.per_step(),
                "topology": asdict(topology)["nodes"][:2],
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))

"""What error feedback has rounded off and not made up for yet, in checkpoints.

Every rank has its own remainders, of equal sizes, so that each of them is saved as one tensor sharded over the world. A
run on another number of ranks, or with other degrees, has no use for them and starts without.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from smp_core.checkpoint import load_checkpoint, read_rest
from smp_core.checkpoint.opening import open_checkpoint
from smp_core.checkpoint.reader import read_index
from smp_core.comm.traffic import Traffic

logger = logging.getLogger("smp")

KEY = "smp_error_feedback"
"""Where a checkpoint's state has them."""


def remainder_state(traffic: Traffic) -> dict[str, Any]:
    """Return ``{KEY: ...}`` to be saved with the rest of the state, or nothing. Collective."""
    remainders = traffic.error_feedback()
    if not remainders:
        return {}
    device = next(iter(remainders.values())).device.type
    mesh = DeviceMesh.from_group(traffic.of_replicated.group, device)
    tensors = {name: DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for name, t in remainders.items()}
    return {KEY: {"layout": traffic.layout(), "remainders": tensors}}


def load_remainder_state(traffic: Traffic, path: str | os.PathLike[str]) -> None:
    """Take up what a checkpoint folder has of them, if it was saved on the same layout. Collective."""
    if not traffic.keeps_remainders:
        return
    path = open_checkpoint(path)
    if KEY not in read_rest(path):
        return
    if read_rest(path, KEY)["layout"] != traffic.layout():
        logger.warning("%s: remainders of error feedback are of another layout of ranks and are left out", path.address)
        return
    index, world = read_index(path), dist.get_world_size()
    device = traffic.device
    mesh = DeviceMesh.from_group(traffic.of_replicated.group, device.type)
    template = {}
    for place, name in index.by_path().items():
        if place[:2] == (KEY, "remainders"):
            record = index.record(name)
            local = torch.zeros(record.shape[0] // world, dtype=record.dtype, device=device)
            template[place[2]] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    load_checkpoint(path, {KEY: {"remainders": template}}, strict=False, verify="sizes")
    traffic.load_error_feedback({name: tensor.to_local() for name, tensor in template.items()})

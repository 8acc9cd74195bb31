"""What error feedback has rounded off and not made up for yet, in checkpoints.

Every rank has its own remainders, of equal sizes inside a pipeline stage, so that each
of them is saved as one tensor sharded over the world. Stages have other units: with
several of them a rank's remainders are saved one behind the other in one tensor, filled
up to the length of the longest, and a table of each stage says which they are. A run on
another number of ranks, or with other degrees, has no use for them and starts without.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from smp_core.checkpoint import load_checkpoint, open_checkpoint, read_index, read_rest
from smp_core.cluster import of_all_ranks
from smp_core.comm.traffic import Traffic

logger = logging.getLogger("smp")

KEY = "smp_error_feedback"
"""Where a checkpoint's state has them."""
_JOINED = "of all units"
_Table = list[tuple[str, int, str]]
"""Names, elements and dtypes of a stage's remainders."""


def remainder_state(traffic: Traffic) -> dict[str, Any]:
    """Return ``{KEY: ...}`` to be saved with the rest of the state, or nothing.
    Collective."""
    if not traffic.keeps_remainders:
        return {}
    # Stages hold other units, so their remainders are joined into one tensor each.
    remainders, tables = traffic.error_feedback(), None
    if traffic.mesh.pipeline_degree > 1:
        remainders, tables = _joined(remainders, traffic)
    if not remainders:
        return {}
    # Every rank has its own: rows of one tensor over the world.
    mesh = _world_mesh(traffic)
    tensors = {
        name: DTensor.from_local(t, mesh, [Shard(0)], run_check=False)
        for name, t in remainders.items()
    }
    return {KEY: {"layout": traffic.layout(), "tables": tables, "remainders": tensors}}


def load_remainder_state(traffic: Traffic, path: str | os.PathLike[str]) -> None:
    """Take up what a checkpoint folder has of them, if it was saved on the same layout.
    Collective."""
    if not traffic.keeps_remainders:
        return
    # A checkpoint of a run without error feedback has none.
    path = open_checkpoint(path)
    if KEY not in read_rest(path):
        return
    saved = read_rest(path, KEY)
    if saved["layout"] != traffic.layout():
        logger.warning(
            "%s: remainders of error feedback are of another layout of ranks and are left out",
            path.address,
        )
        return
    # Each rank reads its own part of the joined tensors.
    index, world = read_index(path), dist.get_world_size()
    mesh = _world_mesh(traffic)
    template = {}
    for place, name in index.by_path().items():
        if place[:2] == (KEY, "remainders"):
            record = index.record(name)
            local = torch.zeros(
                record.shape[0] // world, dtype=record.dtype, device=traffic.device
            )
            template[place[2]] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False
            )
    load_checkpoint(path, {KEY: {"remainders": template}}, strict=False, verify="sizes")
    remainders = {name: tensor.to_local() for name, tensor in template.items()}
    # The joined tensor is cut by the table of this rank's own stage.
    if saved["tables"] is not None:
        remainders = _split(remainders[_JOINED], saved["tables"][traffic.mesh.stage])
    traffic.load_error_feedback(remainders)


def _world_mesh(traffic: Traffic) -> DeviceMesh:
    return DeviceMesh.from_group(traffic.mesh.world_group, traffic.device.type)


def _joined(
    remainders: dict[str, Tensor], traffic: Traffic
) -> tuple[dict[str, Tensor], list[_Table]]:
    """Join this rank's remainders; the tables are those of all stages. Collective over
    the stages."""
    own = [
        (name, tensor.numel(), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in remainders.items()
    ]
    tables = of_all_ranks(own, traffic.mesh.column.host)
    # All stages have to bring equally long tensors.
    longest = 0
    for table in tables:
        longest = max(longest, sum(size for _, size, _ in table))
    if longest == 0:
        return {}, tables
    # In float64, which holds every dtype of remainders exactly.
    kept = [tensor.double() for tensor in remainders.values()] or [
        torch.zeros(0, dtype=torch.float64, device=traffic.device)
    ]
    flat = torch.cat(kept)
    return {_JOINED: F.pad(flat, (0, longest - flat.numel()))}, tables


def _split(joined: Tensor, table: _Table) -> dict[str, Tensor]:
    sizes = [size for _, size, _ in table]
    parts = joined[: sum(sizes)].split(sizes)
    return {
        name: part.to(getattr(torch, dtype))
        for (name, _, dtype), part in zip(table, parts, strict=True)
    }

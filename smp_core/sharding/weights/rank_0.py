"""Rank 0's values on every rank: initial weights, buffers, and states of optimizers
that were made before sharding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from smp_core.cluster import Axis, SmpMesh


@torch.no_grad()
def broadcast_from_rank_0(
    tensors: Iterable[Tensor],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    source: int = 0,
) -> None:
    """Give all ranks of a group the values of its first one, one tensor at a time.

    Args:
        group: the ranks that hold the same tensors; default the world. Collective over
            it.
        source: the place in the group of another rank than its first, whose values they
            get.
    """
    if dist.get_world_size(group) == 1:
        return
    for tensor in tensors:
        if not _has_values(tensor):
            continue
        # A strided or host tensor is sent as a copy, and copied back.
        there = tensor.detach().to(device).contiguous()
        dist.broadcast(there, group_src=source, group=group)
        if there.data_ptr() != tensor.data_ptr():
            tensor.copy_(there)


@torch.no_grad()
def send_to_stages(
    tensors: Iterable[tuple[Tensor, Sequence[int]]], mesh: SmpMesh
) -> None:
    """Give the first rank of each pipeline stage the values that rank 0 has of what the
    stage holds, one tensor at a time. Collective over these ranks; the others do
    nothing.

    Args:
        tensors: with the stages that hold each; the same on all ranks.
    """
    firsts = mesh.layout.ranks(0, Axis.PIPELINE)
    # Ranks behind the first of a stage get the values from that one, when units are
    # sharded.
    if mesh.rank not in firsts:
        return
    group = mesh.group(Axis.PIPELINE)
    for tensor, stages in tensors:
        if not _has_values(tensor):
            continue
        # One after another, in the same order on both sides: messages carry no names.
        if mesh.rank == 0:
            there = tensor.detach().to(mesh.device).contiguous()
            for stage in stages:
                if stage > 0:
                    dist.send(there, firsts[stage], group)
        elif mesh.stage in stages:
            arrived = torch.empty(tensor.shape, dtype=tensor.dtype, device=mesh.device)
            dist.recv(arrived, 0, group)
            tensor.copy_(arrived)


def _has_values(tensor: Tensor) -> bool:
    """Return whether there is something to send: meta tensors have no values yet, and
    DTensors, which layers that are split over ranks have, were cut from rank 0's."""
    return not tensor.is_meta and tensor.numel() > 0 and not isinstance(tensor, DTensor)

"""Rank 0's values on every rank: initial weights, buffers, and states of optimizers that were made before sharding."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


@torch.no_grad()
def broadcast_from_rank_0(
    tensors: Iterable[torch.Tensor], device: torch.device, group: dist.ProcessGroup | None = None, source: int = 0
) -> None:
    """Give all ranks of a group the values of its first one, one tensor at a time; meta tensors have none yet, and
    DTensors, which layers that are split over ranks have, were cut from its values.

    Args:
        group: the ranks that hold the same tensors; default the world. Collective over it.
        source: the place in the group of another rank than its first, whose values they get.
    """
    if dist.get_world_size(group) == 1:
        return
    for tensor in tensors:
        if tensor.is_meta or tensor.numel() == 0 or isinstance(tensor, DTensor):
            continue
        there = tensor.detach().to(device).contiguous()
        dist.broadcast(there, group_src=source, group=group)
        if there.data_ptr() != tensor.data_ptr():
            tensor.copy_(there)

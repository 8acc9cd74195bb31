"""Rank 0's values on every rank: initial weights, buffers, and states of optimizers that were made before sharding."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist


@torch.no_grad()
def broadcast_from_rank_0(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Rank 0's values everywhere, one tensor at a time; meta tensors have none yet. Collective over the world."""
    if dist.get_world_size() == 1:
        return
    for tensor in tensors:
        if tensor.is_meta or tensor.numel() == 0:
            continue
        there = tensor.detach().to(device).contiguous()
        dist.broadcast(there, src=0)
        if there.data_ptr() != tensor.data_ptr():
            tensor.copy_(there)

"""Differences between torch versions (>= 2.11), in one place."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

# torch 2.13 renamed these two and warns at the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def fsdp_has(method: str) -> bool:
    """Whether this torch's FSDP2 has a method of its modules: ``set_separate_reduce_scatter_group``,
    ``set_reduce_scatter_max_input_buffers`` (2.13), ``set_symm_mem_for_comm``."""
    return hasattr(FSDPModule, method)

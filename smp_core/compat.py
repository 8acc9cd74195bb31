"""Differences between torch versions (>= 2.11), in one place."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

# torch 2.13 renamed these two and warns at the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Knob -> method of FSDP2's modules that not every version has (the first two: 2.13).
FSDP_METHODS = {
    "reduce_scatter_buffers": "set_reduce_scatter_max_input_buffers",
    "separate_reduce_scatter_group": "set_separate_reduce_scatter_group",
    "symmetric_memory": "set_symm_mem_for_comm",
}


def fsdp_has(method: str) -> bool:
    """Tell whether this torch's FSDP2 has a method of its modules."""
    return hasattr(FSDPModule, method)

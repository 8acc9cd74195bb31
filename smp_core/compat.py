"""Differences between torch versions (>= 2.11), in one place; and what torch has no public way to ask.

Private names: a group's timeout can be set but not read (``_device_types``, ``_get_backend``, and ``_timeout`` of its
options).
"""

from __future__ import annotations

from datetime import timedelta

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


def collective_timeout(group: dist.ProcessGroup | None = None) -> timedelta | None:
    """Return the limit of a group's collectives, by default the default group's; None where its backend has none."""
    group = group or dist.group.WORLD
    assert group is not None
    for device in group._device_types:
        timeout = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None

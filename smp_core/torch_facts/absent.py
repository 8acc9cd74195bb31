"""Tensors of which this rank has nothing: parameters of other pipeline stages, and states like them. They are DTensors
on a mesh that this rank is not in."""

from __future__ import annotations

from torch.distributed.tensor import DTensor

ABSENT = (
    "a tensor %s lies on other pipeline stages, and this rank has nothing of it; for whole tensors save a sharded "
    "checkpoint on all ranks and bring it together with `smp checkpoint consolidate`"
)


def is_absent(tensor: object) -> bool:
    """Return whether it is a tensor of which this rank has nothing."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None

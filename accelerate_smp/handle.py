"""The handle that a sharded model carries, and the search for it."""

from __future__ import annotations

from torch import nn

from smp_core.engine import ParallelModel
from smp_core.torch_facts import uncompiled

_ATTACHED = "_smp_parallel"


def attach(model: nn.Module, handle: ParallelModel) -> None:
    """Let ``model`` carry its handle; not as a submodule, whose tensors would be saved
    twice."""
    object.__setattr__(uncompiled(model), _ATTACHED, handle)


def parallel_of(model: nn.Module | None) -> ParallelModel | None:
    """Return the handle of a model that :class:`SmpAccelerator` sharded, compiled or
    not; None for any other."""
    return None if model is None else getattr(uncompiled(model), _ATTACHED, None)

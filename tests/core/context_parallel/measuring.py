"""Bytes that a forward pass keeps, and batches split by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from smp_core.context_parallel.batch import BatchLayout, ContextParallel
from smp_core.context_parallel.key_value_exchange import ContextGroup
from smp_core.context_parallel.replaced_attention import SplitBatch


def saved_bytes(compute: Callable[[], torch.Tensor]) -> int:
    """Bytes of the different tensors that autograd keeps for backward."""
    storages: dict[int, int] = {}
    kept = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        compute()
    return sum(storages.values())


DEGREE = 2


def split_on(
    rank: int,
    batch: Any,
    layout: BatchLayout | None = None,
    degree: int = DEGREE,
    **options: Any,
) -> SplitBatch:
    """What ``rank`` gets; no communication."""
    group = ContextGroup(None, 0, tuple(range(DEGREE)), rank)
    return ContextParallel(group).split(batch, layout, count=False, **options)

"""Context parallelism: sequences that several ranks hold together (docs/context-parallelism.md).

``share_sequences`` (build) is the one call of a conversion; it gives a ContextParallel (batch), which splits batches
and gathers outputs. Attention exchanges keys and values (attention, key_value_exchange, kernels), and a trial on the
first call shows whether a model computes over parts of the tokens what it does over all of them (trial).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.context_parallel.active import (
        SplitBatch,
        active_split,
        enabled,
        part_of_mean,
        positions,
        try_call,
        weighted_mean,
    )
    from smp_core.context_parallel.batch import BatchLayout, ContextParallel
    from smp_core.context_parallel.build import share_sequences
    from smp_core.context_parallel.chunked_loss import IGNORED
    from smp_core.context_parallel.chunked_models import chunk_losses, loss_only, smoothed
    from smp_core.context_parallel.documents import labels_within_documents
    from smp_core.context_parallel.flash import FLASH
    from smp_core.context_parallel.rules import CONTEXT_PARALLELISM
    from smp_core.context_parallel.transformers_models import shifts_labels
    from smp_core.context_parallel.trial import Trial

_PLACES = {
    "active_split": "active",
    "BatchLayout": "batch",
    "chunk_losses": "chunked_models",
    "CONTEXT_PARALLELISM": "rules",
    "ContextParallel": "batch",
    "enabled": "active",
    "FLASH": "flash",
    "IGNORED": "chunked_loss",
    "labels_within_documents": "documents",
    "loss_only": "chunked_models",
    "part_of_mean": "active",
    "positions": "active",
    "share_sequences": "build",
    "shifts_labels": "transformers_models",
    "smoothed": "chunked_models",
    "SplitBatch": "active",
    "Trial": "trial",
    "try_call": "active",
    "weighted_mean": "active",
}

__all__ = [
    "active_split",
    "BatchLayout",
    "chunk_losses",
    "CONTEXT_PARALLELISM",
    "ContextParallel",
    "enabled",
    "FLASH",
    "IGNORED",
    "labels_within_documents",
    "loss_only",
    "part_of_mean",
    "positions",
    "share_sequences",
    "shifts_labels",
    "smoothed",
    "SplitBatch",
    "Trial",
    "try_call",
    "weighted_mean",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

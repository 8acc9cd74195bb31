"""Sharding: where parameters, gradients and optimizer states live.

fsdp/ puts FSDP2 units on the partition group; gradients/ adds their gradients up over the micro-batches of a window
and across replicas; optimizer/ steps shards, masters and states on the host; weights/ brings values into shards.
Here are the rules for dtypes and pre-sharded models, and what surrounds a sharded module: its forward methods, its
replaced parameters, pickling, BatchNorm.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.sharding.batch_norm import CpuSyncBatchNorm, sync_batch_norm_on_cpu
    from smp_core.sharding.dtype_rules import settle_precision
    from smp_core.sharding.forward_methods import register_forward_methods
    from smp_core.sharding.fsdp_options import apply_fsdp_options
    from smp_core.sharding.given import NativeWindow, given_sharding
    from smp_core.sharding.given_rules import settle_given
    from smp_core.sharding.mixed_operands import compute_with_unsharded_tensors
    from smp_core.sharding.pickling import is_a_part, refuse_to_pickle_shards
    from smp_core.sharding.replaced import ReplacedParameters, of_replaced
    from smp_core.sharding.rules import SHARDING
    from smp_core.sharding.scalars import reduce_scalars

_PLACES = {
    "apply_fsdp_options": "fsdp_options",
    "compute_with_unsharded_tensors": "mixed_operands",
    "CpuSyncBatchNorm": "batch_norm",
    "given_sharding": "given",
    "is_a_part": "pickling",
    "NativeWindow": "given",
    "of_replaced": "replaced",
    "reduce_scalars": "scalars",
    "refuse_to_pickle_shards": "pickling",
    "register_forward_methods": "forward_methods",
    "ReplacedParameters": "replaced",
    "settle_given": "given_rules",
    "settle_precision": "dtype_rules",
    "SHARDING": "rules",
    "sync_batch_norm_on_cpu": "batch_norm",
}

__all__ = [
    "apply_fsdp_options",
    "compute_with_unsharded_tensors",
    "CpuSyncBatchNorm",
    "given_sharding",
    "is_a_part",
    "NativeWindow",
    "of_replaced",
    "reduce_scalars",
    "refuse_to_pickle_shards",
    "register_forward_methods",
    "ReplacedParameters",
    "settle_given",
    "settle_precision",
    "SHARDING",
    "sync_batch_norm_on_cpu",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

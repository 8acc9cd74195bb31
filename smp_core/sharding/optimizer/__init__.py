"""Optimizers over shards: which may step them, their norms, scales and states.

A trial on small parameters decides whether an optimizer may step shards (trial). ``prepare_optimizer`` (prepared)
replaces its parameters by shards over all replicas (shards) or on the host (host). Norms and loss scaling see every
mesh axis.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.sharding.optimizer.grad_norm import clip_grad_norm_, clip_grad_value_, settle_nonfinite
    from smp_core.sharding.optimizer.grad_scaler import ShardedGradScaler, scale_in_stages
    from smp_core.sharding.optimizer.kinds import register_elementwise, register_tensorwise
    from smp_core.sharding.optimizer.prepared import prepare_optimizer
    from smp_core.sharding.optimizer.shards import FlatShard, WorldSharding, like, local_of, master_dtype
    from smp_core.sharding.optimizer.zero_grad import drop_with_zero_grad

_PLACES = {
    "clip_grad_norm_": "grad_norm",
    "clip_grad_value_": "grad_norm",
    "drop_with_zero_grad": "zero_grad",
    "FlatShard": "shards",
    "like": "shards",
    "local_of": "shards",
    "master_dtype": "shards",
    "prepare_optimizer": "prepared",
    "register_elementwise": "kinds",
    "register_tensorwise": "kinds",
    "scale_in_stages": "grad_scaler",
    "settle_nonfinite": "grad_norm",
    "ShardedGradScaler": "grad_scaler",
    "WorldSharding": "shards",
}

__all__ = [
    "clip_grad_norm_",
    "clip_grad_value_",
    "drop_with_zero_grad",
    "FlatShard",
    "like",
    "local_of",
    "master_dtype",
    "prepare_optimizer",
    "register_elementwise",
    "register_tensorwise",
    "scale_in_stages",
    "settle_nonfinite",
    "ShardedGradScaler",
    "WorldSharding",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

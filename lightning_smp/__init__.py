"""torch-smp for Lightning: ``import lightning_smp; Trainer(strategy="smp_sharded")``.

Importing registers the strategy's names, and lets ``load_from_checkpoint`` read
checkpoint folders:

    smp_sharded         shard degree "auto": the smallest partition group that holds the model's states
    smp_sharded_node    one node is one partition group
    smp_sharded_world   all ranks are one partition group (what plain FSDP does)
    smp_sharded_auto    all knobs that were not given are planned (plan="auto")
    smp_sharded_fp8     as smp_sharded, linear layers in FP8
"""

# ruff: noqa: E402 - the version is looked at before anything is imported that older ones lack

from __future__ import annotations

import functools
from typing import Any

from smp_core.outside import require

require("lightning", "lightning_smp")

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies import StrategyRegistry

from lightning_smp.callbacks import Fp8Monitor, SmpMonitor
from lightning_smp.loading import read_folders
from lightning_smp.precision import Fp8Precision
from lightning_smp.saving import SmpCheckpoint
from lightning_smp.strategy import NOT_FOR_FABRIC, SmpShardedStrategy
from smp_core.config import Fp8Recipe
from smp_core.watch import JoinedLoader

# "smp_sharded" sets nothing, so that SMP_SHARD_DEGREE counts.
_STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "smp_sharded": ("MiCS sharding on FSDP2", {}),
    "smp_sharded_node": (
        "smp_sharded, one node is one partition group",
        {"shard_degree": "node"},
    ),
    "smp_sharded_world": (
        "smp_sharded, all ranks are one partition group",
        {"shard_degree": "world"},
    ),
    "smp_sharded_auto": ("smp_sharded with all knobs planned", {"plan": "auto"}),
    "smp_sharded_fp8": ("smp_sharded with FP8 linear layers", {"fp8": True}),
}


def _refuse_fabric(name: str) -> None:
    raise ValueError(
        f"Fabric(strategy={name!r}): allowed is Lightning's Trainer(strategy={name!r}); {NOT_FOR_FABRIC}"
    )


# A module that is imported again (a notebook's reload) finds its names taken.
for _name, (_description, _knobs) in _STRATEGIES.items():
    if _name not in StrategyRegistry:
        StrategyRegistry.register(
            _name, SmpShardedStrategy, description=_description, **_knobs
        )
    # Fabric would answer with a list of its own names.
    if _name not in STRATEGY_REGISTRY:
        STRATEGY_REGISTRY.register(_name, functools.partial(_refuse_fabric, _name))

# Both classes have a classmethod of their own.
for _kind in (LightningModule, LightningDataModule):
    read_folders(_kind)


def __getattr__(name: str) -> Any:
    """Import `verify` when it is asked for: a training needs nothing of it."""
    if name == "verify":
        from lightning_smp.verification import verify

        return verify
    raise AttributeError(f"module 'lightning_smp' has no attribute {name!r}")


__all__ = [
    "Fp8Monitor",
    "Fp8Precision",
    "Fp8Recipe",
    "JoinedLoader",
    "SmpCheckpoint",
    "SmpMonitor",
    "SmpShardedStrategy",
    "verify",
]

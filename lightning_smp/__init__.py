"""torch-smp for Lightning: ``import lightning_smp; Trainer(strategy="smp_sharded")``.

Importing registers the strategy's names, and lets ``load_from_checkpoint`` read checkpoint folders:

    smp_sharded         shard degree "auto": the smallest partition group that holds the model's states
    smp_sharded_node    one node is one partition group
    smp_sharded_world   all ranks are one partition group (what plain FSDP does)
    smp_sharded_auto    all knobs that were not given are planned (plan="auto")
    smp_sharded_fp8     as smp_sharded, linear layers in FP8
"""

# ruff: noqa: E402 - the version is looked at before anything is imported that older ones lack

from __future__ import annotations

from smp_core.floors import require

require("lightning", "lightning_smp")

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies import StrategyRegistry

from lightning_smp.callbacks import SmpMonitor
from lightning_smp.fp8_monitor import Fp8Monitor
from lightning_smp.from_folder import read_folders
from lightning_smp.precision import Fp8Precision
from lightning_smp.saving import SmpCheckpoint
from lightning_smp.strategy import SmpShardedStrategy
from smp_core.fp8.recipe import Fp8Recipe
from smp_core.joined import JoinedLoader

for _name, _degree in (("smp_sharded", "auto"), ("smp_sharded_node", "node"), ("smp_sharded_world", "world")):
    if _name not in StrategyRegistry:
        StrategyRegistry.register(
            _name,
            SmpShardedStrategy,
            description=f"MiCS sharding on FSDP2, shard_degree={_degree!r}",
            shard_degree=_degree,
        )

if "smp_sharded_auto" not in StrategyRegistry:
    StrategyRegistry.register(
        "smp_sharded_auto", SmpShardedStrategy, description="smp_sharded with all knobs planned", plan="auto"
    )

if "smp_sharded_fp8" not in StrategyRegistry:
    StrategyRegistry.register(
        "smp_sharded_fp8", SmpShardedStrategy, description="smp_sharded with FP8 linear layers", fp8=True
    )

for _kind in (LightningModule, LightningDataModule):
    read_folders(_kind)

__all__ = [
    "Fp8Monitor",
    "Fp8Precision",
    "Fp8Recipe",
    "JoinedLoader",
    "SmpCheckpoint",
    "SmpMonitor",
    "SmpShardedStrategy",
]

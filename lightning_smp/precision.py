"""Lightning's precision plugins on sharded parameters.

The plugins are Lightning's own; what they cannot do is clip and unscale gradients of which each rank holds a part, some
of them plain tensors (0-d parameters), some DTensors. So the two clipping methods of the instance and the class of its
gradient scaler are ours. (FP8 comes here later.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch.optim import Optimizer

from smp_core.sharding.grad_norm import clip_grad_value_
from smp_core.sharding.grad_scaler import ShardedGradScaler

if TYPE_CHECKING:
    from lightning_smp.strategy import SmpShardedStrategy


def adapt_precision(plugin: Precision, strategy: SmpShardedStrategy) -> Precision:
    """Give ``plugin`` clipping by the norm over all ranks and by value, and unscaling of both
    kinds of tensors; returns the same object."""

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        strategy.parallel.clip_grad_norm_(clip_val, parameters=list(plugin.main_params(optimizer)))

    def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
        strategy.window.close()
        clip_grad_value_(plugin.main_params(optimizer), clip_val)

    if isinstance(plugin, MixedPrecision) and type(plugin.scaler) is torch.amp.GradScaler:
        plugin.scaler.__class__ = ShardedGradScaler  # the same state; a scaler of the user's own class is left alone
    plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign, assignment]
    plugin.clip_grad_by_value = clip_grad_by_value  # type: ignore[method-assign, assignment]
    return plugin

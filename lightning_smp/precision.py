"""The precision plugins of Lightning on sharded parameters.

The plugins are Lightning's own; what they cannot do is clip and unscale gradients of
which each rank holds a part, some of them plain tensors (0-d parameters), some
DTensors. So the two clipping methods of the instance and the class of its gradient
scaler are ours. FP8 is a plugin of its own: it says how layers outside FP8 compute and
brings the recipe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, Literal

import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from smp_core.config import Fp8Recipe
from smp_core.engine import ParallelModel
from smp_core.sharding.optimizer import ShardedGradScaler, clip_grad_value_


class Fp8Precision(Precision):
    """A precision plugin for linear layers in FP8: ``Trainer(strategy="smp_sharded",
    plugins=[Fp8Precision(recipe)])``.

    Args:
        recipe: an :class:`~smp_core.fp8.Fp8Recipe`, or a value of the knob ``fp8``;
            default delayed scaling.
        compute_dtype: what everything else computes in: ``torch.bfloat16`` (default;
            autocast, as ``"bf16-mixed"``) or ``torch.float32``. Parameters and
            optimizer states stay in their own dtype.

    Raises:
        ValueError: a bad recipe or dtype; when training starts, another strategy than
            torch-smp's.
    """

    precision: Any = "fp8"

    def __init__(
        self,
        recipe: Fp8Recipe | Any = None,
        compute_dtype: torch.dtype | Literal["bfloat16", "float32"] = "bfloat16",
    ) -> None:
        # Text as well as dtypes, since configuration files have text.
        dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
        name = str(compute_dtype).removeprefix("torch.")
        if name not in dtypes:
            raise ValueError(
                f"Fp8Precision: compute_dtype={compute_dtype!r} is not allowed; allowed: {', '.join(dtypes)}"
            )
        self.recipe = Fp8Recipe.read(True if recipe is None else recipe) or Fp8Recipe()
        self.compute_dtype = dtypes[name]
        self.precision = f"fp8 ({name})"
        self.device_type: str | None = None
        """Set by the strategy that has taken this plugin."""

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if self.device_type is None:
            raise ValueError(
                "Fp8Precision works with torch-smp's strategies; write strategy='smp_sharded'"
            )
        return module

    @override
    @contextlib.contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        if self.compute_dtype == torch.float32 or self.device_type is None:
            yield
            return
        with torch.autocast(
            self.device_type, dtype=self.compute_dtype, cache_enabled=False
        ):
            yield


def adapt_precision(
    plugin: Precision, parallel: Callable[[], ParallelModel]
) -> Precision:
    """Give ``plugin`` clipping by the norm over all ranks and by value, and unscaling
    of both kinds of tensors; returns the same object.

    Args:
        parallel: asked when gradients are clipped: the model is not sharded yet.
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        parallel().clip_grad_norm_(
            clip_val, parameters=list(plugin.main_params(optimizer))
        )

    def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
        # Values are clipped of complete gradients: the sum over replicas has to be
        # over.
        parallel().window.close()
        clip_grad_value_(parallel().stepped(plugin.main_params(optimizer)), clip_val)

    if (
        isinstance(plugin, MixedPrecision)
        and type(plugin.scaler) is torch.amp.GradScaler
    ):
        # The same state; a scaler of the user's own class is left alone.
        plugin.scaler.__class__ = ShardedGradScaler
    plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign, assignment]
    plugin.clip_grad_by_value = clip_grad_by_value  # type: ignore[method-assign, assignment]
    return plugin

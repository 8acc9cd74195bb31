"""The linear layers of Transformer Engine behind our recipe:
``backend="transformer_engine"``.

    scaling="delayed"   its ``DelayedScaling``; amaxes are agreed on over all ranks, forward ones at the end of the
                        outermost forward pass and backward ones at the end of backward, so once per micro-batch
    scaling="dynamic"   its ``Float8CurrentScaling``

Its layers compute in FP8 inside a context around the outermost forward pass;
:func:`convert` returns a function that makes one, and the caller of the model enters
it. Outside, as in recomputed activations, they would compute in high precision, so
activation checkpointing is refused.

Its layers lack some features of ours: they run on CUDA only; a non-finite amax drops no
step; amax histories stay in the layers (state dicts show parameters only), so that a
resumed run of delayed scaling starts without them, with one warning.
``Fp8Monitor`` sees the native layers only.

Signatures as in Transformer Engine 2.2 to 2.20; ``autocast`` is ``fp8_autocast`` before
2.9.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp_core.config import Fp8Recipe

logger = logging.getLogger("smp")

_DEVICES = ("cuda",)

Region = Callable[[], contextlib.AbstractContextManager[Any]]


def convert(
    model: nn.Module,
    linears: Mapping[str, nn.Module],
    recipe: Fp8Recipe,
    device: torch.device,
    amax_group: dist.ProcessGroup | None,
) -> Region:
    """Replace ``linears`` (by name) in ``model`` by Transformer Engine's.

    Returns:
        a function that makes the context of an outermost forward pass. ``model``'s own
        forward enters one by itself.

    Raises:
        ValueError: on a device other than CUDA.
    """
    if device.type not in _DEVICES:
        raise ValueError(
            f"fp8: backend='transformer_engine' computes on CUDA only and the device is {device.type!r}; write "
            "backend='native', which emulates FP8 elsewhere"
        )
    import transformer_engine.pytorch as te

    # Layers are replaced in their parents, parameters move over.
    for name, linear in linears.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, _counterpart(te, linear))
    if recipe.scaling == "delayed":
        logger.warning(
            "fp8: Transformer Engine keeps its amax histories to itself: a resumed run starts with scales of 1. "
            "backend='native' resumes exactly"
        )
    # One context for the whole forward, which the model's own forward enters.
    region = _region(te, recipe_for(recipe), amax_group)
    _enclose(model, region)
    return region


def recipe_for(recipe: Fp8Recipe) -> Any:
    """Return Transformer Engine's recipe of the same meaning."""
    from transformer_engine.common.recipe import (
        DelayedScaling,
        Float8CurrentScaling,
        Format,
    )

    fp8_format = {"hybrid": Format.HYBRID, "e4m3": Format.E4M3}[recipe.fp8_format]
    if recipe.scaling == "dynamic":
        return Float8CurrentScaling(fp8_format=fp8_format)
    return DelayedScaling(
        margin=recipe.margin,
        fp8_format=fp8_format,
        amax_history_len=recipe.amax_history_len,
        amax_compute_algo=recipe.amax_compute_algo,
        reduce_amax=recipe.reduce_amax,
    )


def _counterpart(te: Any, linear: nn.Module) -> nn.Module:
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, torch.Tensor)
    out_features, in_features = weight.shape
    # On meta nothing is allocated or initialised; the parameters that are there move
    # over.
    made = _linear_class(te)(
        in_features,
        out_features,
        bias=bias is not None,
        params_dtype=weight.dtype,
        device="meta",
    )
    made.weight = weight
    if bias is not None:
        made.bias = bias
    return made.train(linear.training)


@functools.cache
def _linear_class(te: Any) -> Any:
    class Linear(te.Linear):
        """A linear layer of Transformer Engine with ``nn.Linear``'s initial values and
        state dict."""

        def reset_parameters(self, defer_init: bool | None = False) -> None:
            if not defer_init:
                nn.Linear.reset_parameters(self)  # type: ignore[arg-type]

        # nn.Module asks for extra state where a class has its own methods for it.
        get_extra_state = nn.Module.get_extra_state
        set_extra_state = nn.Module.set_extra_state

    return Linear


def _region(te: Any, recipe: Any, amax_group: dist.ProcessGroup | None) -> Region:
    if hasattr(te, "autocast"):
        return lambda: te.autocast(
            enabled=True, recipe=recipe, amax_reduction_group=amax_group
        )
    return lambda: te.fp8_autocast(
        enabled=True, fp8_recipe=recipe, fp8_group=amax_group
    )


def _enclose(model: nn.Module, region: Region) -> None:
    """Run ``model``'s forward inside a region of its own; a region inside another one
    changes nothing."""
    entered: list[contextlib.AbstractContextManager[Any]] = []

    def enter(*_: Any) -> None:
        context = region()
        context.__enter__()
        entered.append(context)

    def leave(*_: Any) -> None:
        if entered:  # not so if another hook failed before ours
            entered.pop().__exit__(None, None, None)

    model.register_forward_pre_hook(enter, prepend=True)
    model.register_forward_hook(leave, always_call=True)

"""Shapes of the outputs of modules before the blocks, on stages that do not hold them:
copies run on the meta device. They are made before the model is converted: FSDP2's
modules cannot be copied, and split layers return parts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from smp_core.checkpoint import map_tensors
from smp_core.plan.chain import Chain

Played = Callable[..., Any]
"""Arguments of a module -> what it gives, with tensors on the meta device."""


def played_of(model: nn.Module, chain: Chain) -> dict[str, Played]:
    """Return copies without values of the modules that are played, by name."""
    names = [stand_in.name for stand_in in chain.stand_ins if stand_in.played]
    return {name: _on_meta(model.get_submodule(name)) for name in names}


def _on_meta(module: nn.Module) -> Played:
    tensors = [*module.parameters(), *module.buffers()]
    # The copy shares no tensor with the model: deepcopy puts these in their places.
    on_meta = {
        id(tensor): torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for tensor in tensors
    }
    parameters = {id(tensor) for tensor in module.parameters()}
    memo = {
        key: nn.Parameter(made, False) if key in parameters else made
        for key, made in on_meta.items()
    }
    copied = copy.deepcopy(module, memo)
    dtype = next(module.parameters()).dtype

    # Arguments come in the dtype that activations are computed in; the copy has the
    # model's own.
    def taken(tensor: Tensor) -> Tensor:
        return tensor.to("meta", dtype if tensor.is_floating_point() else tensor.dtype)

    @torch.no_grad()
    def played(*args: Any, **kwargs: Any) -> Any:
        positions, keywords = map_tensors([args, kwargs], taken)
        with torch.device("meta"):  # what it makes itself
            return copied(*positions, **keywords)

    return played

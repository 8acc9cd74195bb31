"""``load_state_dict`` of a sharded model, or of a module in it, with whole tensors: each rank takes its part.

A hook before each module's own parameters are loaded; it runs on every rank alike and sends nothing, so every rank has
to have the tensors, as after ``torch.load`` on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import shard_like
from smp_core.sharding.optimizer.shards import WorldSharding

World = Callable[[], WorldSharding | None]


def load_own_parts(model: nn.Module, world: World) -> None:
    """Let ``load_state_dict`` of the model and of every module in it take unsharded tensors.

    Args:
        world: gives the masters that take up the values too, where there are any.
    """
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_load_state_dict_pre_hook(_TakingOwnParts(world))


class _TakingOwnParts:
    """The hook; a copy of the module has one that does nothing."""

    def __init__(self, world: World) -> None:
        self._world = world

    @torch.no_grad()
    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            value = state_dict.get(prefix + name)
            if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                continue  # torch says what does not fit
            if not isinstance(value, DTensor):
                value = state_dict[prefix + name] = shard_like(parameter, value)
            world = self._world()
            if world is not None:
                world.take_weights({id(parameter): value})

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _inert, ()


def _inert() -> Callable[..., None]:
    return _nothing


def _nothing(*_: Any) -> None:
    pass

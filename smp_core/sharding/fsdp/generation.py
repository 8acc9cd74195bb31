"""The FSDP2 that is installed: which of the generations that this room knows, found by names and not by versions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from smp_core.sharding.fsdp import param_group, param_group_2_11, param_group_2_13
from smp_core.sharding.fsdp.internals import generation
from smp_core.sharding.fsdp.param_group import ParamGroup
from smp_core.sharding.fsdp.param_group_2_11 import ParamGroup211
from smp_core.sharding.fsdp.param_group_2_13 import ParamGroup213


def state_of(module: nn.Module | FSDPModule) -> Any:
    """Return FSDP2's state of a module that ``fully_shard`` was called on."""
    return module._get_fsdp_state()  # type: ignore[operator]


def group_of(module: Any) -> ParamGroup | None:
    """Return the parameters of a module that ``fully_shard`` was called on; None: it has none of its own."""
    group = state_of(module)._fsdp_param_group
    return None if group is None else _kind()(module, group)


def groups_of(model: nn.Module) -> Iterator[ParamGroup]:
    """Yield the groups of a model's units."""
    for module in model.modules():
        group = group_of(module) if isinstance(module, FSDPModule) else None
        if group is not None:
            yield group


@functools.cache
def _kind() -> type[ParamGroup]:
    return {"2.11": ParamGroup211, "2.13": ParamGroup213}.get(generation(), ParamGroup)


def queue_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the present backward pass is over."""
    queue = getattr(torch.autograd.graph, "queue_callback", param_group_2_13.queue_callback)
    queue(callback)


def reset_passes(modules: Iterable[FSDPModule]) -> None:
    """Discard what a failed forward or backward left in FSDP2, of all modules of a model that it manages."""
    of_this_torch = param_group_2_11 if generation() == "2.11" else param_group
    of_this_torch.reset_passes(modules)

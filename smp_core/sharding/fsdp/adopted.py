"""Units of a model to which ``fully_shard`` was applied before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor

from smp_core.comm.traffic import Traffic
from smp_core.planning.units import PlannedUnit, WrapPlan
from smp_core.sharding.fsdp.internals import group_of, state_of
from smp_core.sharding.fsdp.reduction_order import ReductionOrder
from smp_core.sharding.fsdp.units import ShardedUnit


@dataclass(frozen=True)
class GivenPolicy:
    """The dtypes that a model that came sharded computes and reduces in (None: the parameters' own), and whether its
    shards live in host memory."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    offloads: bool


def given_policy(model: nn.Module) -> GivenPolicy:
    """Return the policy of the first unit that has parameters."""
    group = next(_groups(model))
    offloads = type(group.offload_policy) is not OffloadPolicy
    return GivenPolicy(group.mp_policy.param_dtype, group.mp_policy.reduce_dtype, offloads)


def given_units(model: nn.Module) -> WrapPlan:
    """Return the units of a model to which ``fully_shard`` was applied before. Modules that were sharded together are
    one unit, named after the last of them."""
    _see_parameters_of_now(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    inner = {m for outer in model.modules() if isinstance(outer, FSDPModule) for m in outer.modules() if m is not outer}
    units, known = [], set()
    for name, module in reversed(list(model.named_modules())):
        if not isinstance(module, FSDPModule):
            continue
        state = state_of(module)
        if state in known:
            continue
        known.add(state)
        group = group_of(module)
        own = [] if group is None else [names[parameter.sharded_param] for parameter in group.fsdp_params]
        units.append(PlannedUnit(name, tuple(own), module not in inner))
    plain = tuple(name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor))
    return WrapPlan(tuple(units), plain, "as it came")


def adopt_units(model: nn.Module, planned: Iterable[PlannedUnit], traffic: Traffic) -> list[ShardedUnit]:
    """Give the units of :func:`given_units` our communication objects."""
    units, reductions = [], ReductionOrder()
    for each in planned:
        module: Any = model.get_submodule(each.name)
        unit = ShardedUnit(each.name, module, each.parameters, each.is_root, reductions, in_order=True)
        module.set_custom_all_gather(traffic.all_gather(unit).for_fsdp2())
        module.set_custom_reduce_scatter(traffic.reduce_scatter(unit).for_fsdp2())
        units.append(unit)
    return units


def _see_parameters_of_now(model: nn.Module) -> None:
    """Let the units see the model's parameters as they are now.

    A parameter that two units manage, because it was tied after they were sharded, has to have one shard: where its
    rows do not divide evenly each unit would pad a copy of its own, and gather that one for ever.
    """
    shards: dict[nn.Parameter, torch.Tensor] = {}
    parameters = [parameter for group in _groups(model) for parameter in group.fsdp_params]
    for parameter in parameters:
        parameter.reset_sharded_param()
        shards[parameter.sharded_param] = parameter._sharded_param_data
    for parameter in parameters:
        parameter._sharded_param_data = shards[parameter.sharded_param]


def partial_sum_bytes(model: nn.Module) -> int:
    """Return the bytes of gradients that FSDP2's own replica all-reduce holds and has not reduced yet."""
    held = (group._partial_reduce_output for group in _groups(model))
    return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)


def forget_partial_sums(model: nn.Module) -> None:
    """Drop what FSDP2's own replica all-reduce holds."""
    for group in _groups(model):
        group._partial_reduce_output = None


def _groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = group_of(module)
            if group is not None:
                yield group

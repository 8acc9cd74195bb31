"""Units of a model that somebody else gave to ``fully_shard``.

What is read here beyond the public API, and why no public one will do: of ``module._get_fsdp_state()`` and its
``_fsdp_param_group``

- ``fsdp_params``: which modules were sharded together;
- ``mp_policy`` and ``offload_policy``: what the model computes in;
- ``reset_sharded_param`` and ``_sharded_param_data``: parameters that were exchanged since (FSDP2 takes note at the
  first forward);
- ``_partial_reduce_output``: what torch's own two-hop holds between micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, OffloadPolicy

from smp_core.comm.flat import CommObject
from smp_core.sharding.fsdp.units import ShardedUnit


@dataclass(frozen=True)
class GivenPolicy:
    """What a model that came sharded computes and reduces in (None: the parameters' own dtype), and whether its shards
    live in host memory."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    offloads: bool


def given_policy(model: nn.Module) -> GivenPolicy:
    """The policy of the first unit that has parameters."""
    group = next(_groups(model))
    offloads = type(group.offload_policy) is not OffloadPolicy
    return GivenPolicy(group.mp_policy.param_dtype, group.mp_policy.reduce_dtype, offloads)


def adopt_units(
    model: nn.Module,
    all_gather: Callable[[ShardedUnit], CommObject],
    reduce_scatter: Callable[[ShardedUnit], CommObject],
) -> list[ShardedUnit]:
    """The units of a model that somebody else gave to ``fully_shard``, with our communication objects. Modules that
    were sharded together are one unit, named after the last of them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    inner = {m for outer in model.modules() if isinstance(outer, FSDPModule) for m in outer.modules() if m is not outer}
    units, known = [], set()
    for name, module in reversed(list(model.named_modules())):
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        if state in known:
            continue
        known.add(state)
        group = state._fsdp_param_group
        own = [] if group is None else [names[parameter.sharded_param] for parameter in group.fsdp_params]
        unit = ShardedUnit(name, cast(nn.Module, module), own, module not in inner, in_order=True)
        module.set_custom_all_gather(all_gather(unit))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(reduce_scatter(unit))  # type: ignore[arg-type]
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        units.append(unit)
    return units


def settle_given_parameters(model: nn.Module) -> None:
    """Let the units of a model that came sharded see its parameters as they are now.

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


def holds_partial_sums(model: nn.Module) -> bool:
    """Whether torch's own two-hop holds gradients that are not reduced across replicas yet."""
    return any(group._partial_reduce_output is not None for group in _groups(model))


def forget_partial_sums(model: nn.Module) -> None:
    """Drop what torch's own two-hop holds."""
    for group in _groups(model):
        group._partial_reduce_output = None


def _groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group: Any = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                yield group

"""Units of a model to which ``fully_shard`` was applied before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from smp_core.comm import Traffic
from smp_core.plan import PlannedUnit, WrapPlan
from smp_core.sharding.fsdp.internals import group_of, groups_of, state_of
from smp_core.sharding.fsdp.param_group import GivenPolicy, one_shard_each
from smp_core.sharding.fsdp.passes import Passes
from smp_core.sharding.fsdp.units import ShardedUnit


def given_policy(model: nn.Module) -> GivenPolicy:
    """Return the policy of the first unit that has parameters."""
    return next(groups_of(model)).policy()


def given_units(model: nn.Module) -> WrapPlan:
    """Return the units of a model to which ``fully_shard`` was applied before. Modules
    that were sharded together are one unit, named after the last of them."""
    # Tied after they were sharded, a parameter has a shard in each group.
    one_shard_each(list(groups_of(model)))
    names = {parameter: name for name, parameter in model.named_parameters()}
    # Modules inside of another sharded one are no roots.
    inner = {
        m
        for outer in model.modules()
        if isinstance(outer, FSDPModule)
        for m in outer.modules()
        if m is not outer
    }
    units, known = [], set()
    # From the innermost out, the last of modules that share a state names the unit.
    for name, module in reversed(list(model.named_modules())):
        if not isinstance(module, FSDPModule):
            continue
        state = state_of(module)
        if state in known:
            continue
        known.add(state)
        group = group_of(module)
        own = (
            []
            if group is None
            else [names[parameter] for parameter in group.parameters()]
        )
        units.append(PlannedUnit(name, tuple(own), module not in inner))
    # Not sharded by FSDP2: every rank holds these whole.
    plain = tuple(
        name
        for name, parameter in model.named_parameters()
        if not isinstance(parameter, DTensor)
    )
    return WrapPlan(tuple(units), plain, "as it came")


def adopt_units(
    model: nn.Module,
    planned: Iterable[PlannedUnit],
    traffic: Traffic,
    meshes: Mapping[str, DeviceMesh],
) -> list[ShardedUnit]:
    """Give the units of :func:`given_units` our communication objects.

    Args:
        meshes: what units are sharded over by their names, if not the partition group.
    """
    units = []
    passes = Passes()
    for each in planned:
        module: Any = model.get_submodule(each.name)
        unit = ShardedUnit(
            each.name,
            module,
            each.parameters,
            each.is_root,
            passes,
            in_order=True,
        )
        # Over one rank FSDP2's factor of 1 would cost a copy.
        if each.name in meshes and meshes[each.name].size() == 1:
            unit.leave_undivided()
        # FSDP2's own collectives give way to ours, which the plan may compress or
        # stage.
        module.set_custom_all_gather(traffic.all_gather(unit).for_fsdp2())
        module.set_custom_reduce_scatter(traffic.reduce_scatter(unit).for_fsdp2())
        units.append(unit)
    return units


def partial_sum_bytes(model: nn.Module) -> int:
    """Return the bytes of gradients that FSDP2's own replica all-reduce holds and has
    not reduced yet."""
    return sum(group.partial_sum_bytes() for group in groups_of(model))


def forget_partial_sums(
    model: nn.Module, dropped: Set[int] | None = None
) -> list[nn.Parameter]:
    """Drop what FSDP2's own replica all-reduce holds, of units of which all trainable
    parameters are dropped.

    Args:
        dropped: ids of parameters; None: all.

    Returns:
        dropped parameters whose sum is still held, because others share it.
    """
    kept = []
    for group in groups_of(model):
        trained = [each for each in group.parameters() if each.requires_grad]
        gone = [each for each in trained if dropped is None or id(each) in dropped]
        if dropped is None or len(gone) == len(trained):
            group.forget_partial_sum()
        elif group.partial_sum_bytes():
            kept += gone
    return kept

"""``fully_shard`` of the planned units, with our communication objects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping
from types import MappingProxyType

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from smp_core.cluster import SmpMesh
from smp_core.comm import Traffic
from smp_core.fp8 import WeightGather
from smp_core.plan import Plan
from smp_core.sharding.fsdp.passes import Passes
from smp_core.sharding.fsdp.reduction_order import ReductionOrder
from smp_core.sharding.fsdp.travelling import travel
from smp_core.sharding.fsdp.units import ShardedUnit
from smp_core.sharding.weights.rank_0 import broadcast_from_rank_0
from smp_core.torch_facts import is_absent


def shard_units(
    model: nn.Module,
    plan: Plan,
    mesh: SmpMesh,
    traffic: Traffic,
    recomputed: Container[str],
    gather_of: Callable[[nn.Module, str], WeightGather | None] | None,
    meshes: Mapping[str, DeviceMesh] = MappingProxyType({}),
) -> list[ShardedUnit]:
    """Apply ``fully_shard`` to every planned unit over the partition group, innermost first, with our communication
    objects. Each gets rank 0's weights just before, and is stored as codes just after, where it is frozen and
    ``frozen_storage`` says so.

    Args:
        traffic: makes the units' communication objects.
        recomputed: names of units that lie inside checkpointed modules.
        gather_of: (module, parameter's name in it) -> how the parameter is communicated, if not as it is.
        meshes: what units are sharded over by their names, if not the partition group.

    Returns:
        the units in the plan's order; roots keep their parameters unsharded after forward, as FSDP2 does.
    """
    knobs, keep = plan.knobs, plan.knobs.reshard_after_forward
    on_host = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")  # elsewhere no driver could use pinned pages
    modules, by_name = dict(model.named_modules()), dict(model.named_parameters())
    ignored = {p for name, p in by_name.items() if name in plan.replicated or is_absent(p)}
    units, reductions, passes = [], ReductionOrder(), Passes()
    for planned in plan.sharded_units:
        unit_module: nn.Module = modules[planned.name]
        broadcast_from_rank_0((by_name[name] for name in planned.parameters), mesh.device, mesh.model_group)
        policy = MixedPrecisionPolicy(
            param_dtype=plan.computed_in(planned),
            reduce_dtype=plan.dtypes.reduced,
            cast_forward_inputs=plan.precision.cast_forward_inputs,
        )
        over = meshes.get(planned.name, mesh.shard_mesh)
        fully_shard(
            unit_module,
            mesh=over,
            reshard_after_forward=None if planned.is_root and keep else bool(keep),
            mp_policy=policy,
            offload_policy=on_host if knobs.state_offload == "all" else OffloadPolicy(),
            ignored_params=ignored,
            shard_placement_fn=functools.partial(_evenly, over.size()) if planned.name in meshes else None,
        )
        assert isinstance(unit_module, FSDPModule)
        unit = ShardedUnit(planned.name, unit_module, planned.parameters, planned.is_root, reductions, passes)
        if over.size() == 1:
            # Of one rank nothing is divided by default; FSDP2 would divide into one more copy of the gradients.
            unit_module.set_gradient_divide_factor(None)  # type: ignore[arg-type]
        if knobs.collectives.symmetric_memory:
            unit_module.set_symm_mem_for_comm()  # its reductions only add up: the unit has said that ours do
        else:
            unit_module.set_custom_all_gather(traffic.all_gather(unit).for_fsdp2())
            unit_module.set_custom_reduce_scatter(traffic.reduce_scatter(unit).for_fsdp2())
        unit.is_recomputed = planned.name in recomputed
        if gather_of is not None and unit.group is not None:
            travel(unit.group, gather_of)
        if not plan.shapes.on_meta:
            unit.store_coded(plan)
        units.append(unit)
    return units


def _evenly(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """Return the dimension that a parameter of experts is sharded in: experts, or the next one if a rank holds too few
    for all others."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    even = [dim for dim, size in enumerate(local.shape) if size % ranks == 0]
    return Shard(even[0]) if even else None

"""``fully_shard`` of the planned units, with our communication objects."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from smp_core.absent import is_absent
from smp_core.comm.traffic import Traffic
from smp_core.fp8.gathered import WeightGather
from smp_core.mesh import SmpMesh
from smp_core.planning.decide import Plan
from smp_core.sharding.fsdp.internals import group_of, state_of
from smp_core.sharding.fsdp.reduction_order import ReductionOrder
from smp_core.sharding.fsdp.travelling import travel
from smp_core.sharding.fsdp.units import ShardedUnit
from smp_core.sharding.rank_0 import broadcast_from_rank_0


def shard_units(
    model: nn.Module,
    plan: Plan,
    mesh: SmpMesh,
    traffic: Traffic,
    recomputed: Container[str],
    gather_of: Callable[[nn.Module, str], WeightGather | None] | None,
) -> list[ShardedUnit]:
    """Apply ``fully_shard`` to every planned unit over the partition group, innermost first, with our communication
    objects. Each gets rank 0's weights just before.

    Args:
        traffic: makes the units' communication objects.
        recomputed: names of units that lie inside checkpointed modules.
        gather_of: (module, parameter's name in it) -> how the parameter is communicated, if not as it is.

    Returns:
        the units in the plan's order; roots keep their parameters unsharded after forward, as FSDP2 does.
    """
    knobs, keep = plan.knobs, plan.knobs.reshard_after_forward
    secondary_mesh = mesh.secondary(keep) if type(keep) is int else None
    policy = MixedPrecisionPolicy(
        param_dtype=plan.dtypes.gathered,
        reduce_dtype=plan.dtypes.reduced,
        cast_forward_inputs=plan.precision.cast_forward_inputs,
    )
    on_host = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")  # elsewhere no driver could use pinned pages
    modules, by_name = dict(model.named_modules()), dict(model.named_parameters())
    ignored = {p for name, p in by_name.items() if name in plan.replicated or is_absent(p)}
    units, reductions = [], ReductionOrder()
    for planned in plan.sharded_units:
        unit_module: nn.Module = modules[planned.name]
        broadcast_from_rank_0((by_name[name] for name in planned.parameters), mesh.device, mesh.model_group)
        sizes = _sizes_of_parts(unit_module)
        fully_shard(
            unit_module,
            mesh=mesh.shard_mesh,
            reshard_after_forward=None if planned.is_root and keep else bool(keep),
            mp_policy=policy,
            offload_policy=on_host if knobs.state_offload == "all" else OffloadPolicy(),
            ignored_params=ignored,
        )
        assert isinstance(unit_module, FSDPModule)
        if secondary_mesh is not None and not planned.is_root:
            _keep_secondary_shard(unit_module, secondary_mesh, sizes)
        unit = ShardedUnit(planned.name, unit_module, planned.parameters, planned.is_root, reductions)
        if mesh.shard_degree == 1:
            # Of one rank nothing is divided by default; FSDP2 would divide into one more copy of the gradients.
            unit_module.set_gradient_divide_factor(None)  # type: ignore[arg-type]
        if knobs.collectives.symmetric_memory:
            unit_module.set_symm_mem_for_comm()  # its reductions only add up: the unit has said that ours do
        else:
            unit_module.set_custom_all_gather(traffic.all_gather(unit).for_fsdp2())
            unit_module.set_custom_reduce_scatter(traffic.reduce_scatter(unit).for_fsdp2())
        if planned.name in recomputed:
            _hide_hooks_from_modes(unit_module)
        if gather_of is not None:
            travel(unit.fsdp_parameters, gather_of)
        units.append(unit)
    return units


def _sizes_of_parts(module: nn.Module) -> dict[str, torch.Size]:
    """Return the size of what this rank has of each parameter: less than all where its layer is split."""
    parts = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in module.named_parameters()}
    return {name: part.shape for name, part in parts.items()}


def _hide_hooks_from_modes(module: nn.Module) -> None:
    """Hide a unit's hooks from dispatch modes: inside a selectively checkpointed module, what they do must not be taken
    for operations of the model."""
    state = state_of(module)

    def hidden(hook: Callable[..., Any]) -> Callable[..., Any]:
        @torch.compiler.disable
        def outside_of_modes(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return hook(*args, **kwargs)

        return outside_of_modes

    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._pre_forward_hook_handle = module.register_forward_pre_hook(
        hidden(state._pre_forward), prepend=True, with_kwargs=True
    )
    state._post_forward_hook_handle = module.register_forward_hook(hidden(state._post_forward))


def _keep_secondary_shard(module: nn.Module, mesh: DeviceMesh, sizes: Mapping[str, torch.Size]) -> None:
    """Let FSDP2 keep a copy over this mesh between forward and backward; ``sizes``: of what it gathers, by name."""
    group = group_of(module)
    if group is None:
        return
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    group.post_forward_mesh_info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for parameter in group.fsdp_params:
        parameter.post_forward_mesh_info = group.post_forward_mesh_info
        size = sizes[names[id(parameter.sharded_param)]]
        parameter._init_sharded_post_forward_param_metadata(torch.empty(size, device="meta"))
    split = [parameter for parameter in group.fsdp_params if parameter.is_dtensor]
    if split:
        group.reshard = _taken_for_plain(split, group.reshard)


def _taken_for_plain(split: Sequence[Any], reshard: Callable[[], None]) -> Callable[[], None]:
    """FSDP2 refuses to keep copies of parameters of layers that are split over tensor ranks, though what it copies is
    what it gathered, this rank's part of the layer."""

    def resharded() -> None:
        for parameter in split:
            parameter.is_dtensor = False
        try:
            reshard()
        finally:
            for parameter in split:
                parameter.is_dtensor = True

    return resharded

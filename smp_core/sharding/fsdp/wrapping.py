"""``fully_shard`` of the planned units, with our communication objects, and FSDP2's own
options: how many units ahead gathers run, how many gradients wait for their reduction,
a communicator of its own for reductions.

``fully_shard`` makes a module an object of a class with the bases (FSDPModule, the
module's class), which Python refuses for ``class Block(ABC, nn.Module)`` and its like
(:mod:`smp_core.torch_facts.modules` says why). Those get a class of our own, with that
base before FSDPModule, which is allowed and needs no private name of torch's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from smp_core.cluster import Axis, SmpMesh, broadcast_from_rank_0, collective_timeout
from smp_core.comm import Traffic
from smp_core.config import SmpConfig
from smp_core.fp8 import WeightGather
from smp_core.outside import changed
from smp_core.plan import Plan
from smp_core.sharding.fsdp.passes import Passes
from smp_core.sharding.fsdp.travelling import travel
from smp_core.sharding.fsdp.units import ShardedUnit
from smp_core.torch_facts import (
    base_without_dict,
    is_absent,
    local_part,
    mixin_before,
)


def shard_units(
    model: nn.Module,
    plan: Plan,
    mesh: SmpMesh,
    traffic: Traffic,
    recomputed: Container[str],
    gather_of: Callable[[nn.Module, str], WeightGather | None] | None,
    meshes: Mapping[str, DeviceMesh],
) -> list[ShardedUnit]:
    """Apply ``fully_shard`` to every planned unit over the partition group, innermost
    first, with our communication objects. Each gets rank 0's weights just before, and
    is stored as codes just after, where it is frozen and ``frozen_storage`` says so.

    Args:
        traffic: makes the units' communication objects.
        recomputed: names of units that lie inside checkpointed modules.
        gather_of: (module, parameter's name in it) -> how the parameter is
            communicated, if not as it is.
        meshes: what units are sharded over by their names, if not the partition group.

    Returns:
        the units in the plan's order; roots keep their parameters unsharded after
        forward, as FSDP2 does.
    """
    knobs, keep = plan.knobs, plan.knobs.reshard_after_forward
    wrap = plan.shapes.units
    offload = OffloadPolicy()
    if knobs.state_offload == "all":
        # Elsewhere no driver could use pinned pages.
        offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    modules = dict(model.named_modules())
    by_name = dict(model.named_parameters())
    # Replicated parameters stay whole, and absent ones are on other pipeline stages.
    ignored = {
        p for name, p in by_name.items() if name in wrap.replicated or is_absent(p)
    }
    units = []
    # All units of the model share one account of passes.
    passes = Passes()
    for planned in wrap.units if plan.gathers else ():
        unit_module: nn.Module = modules[planned.name]
        # Rank 0's values first: afterwards each rank has a slice alone.
        broadcast_from_rank_0(
            (by_name[name] for name in planned.parameters),
            mesh.device,
            mesh.model_group,
        )
        policy = MixedPrecisionPolicy(
            param_dtype=plan.computed_in(planned),
            reduce_dtype=plan.dtypes.reduced,
            cast_forward_inputs=plan.precision.cast_forward_inputs,
        )
        # Experts that are dealt to ranks are sharded over those that hold the same
        # ones.
        over = meshes.get(planned.name, mesh.device_mesh[Axis.SHARD.value])
        placement: Callable[[nn.Parameter], Shard | None] | None = None
        if planned.name in meshes:
            placement = functools.partial(_evenly, over.size())
        # None: as FSDP2 has it, which leaves roots unsharded after forward.
        reshard = None if planned.is_root and keep else bool(keep)
        with any_class(unit_module):
            fully_shard(
                unit_module,
                mesh=over,
                reshard_after_forward=reshard,
                mp_policy=policy,
                offload_policy=offload,
                ignored_params=ignored,
                shard_placement_fn=placement,
            )
        assert isinstance(unit_module, FSDPModule)
        unit = ShardedUnit(
            planned.name,
            unit_module,
            planned.parameters,
            planned.is_root,
            passes,
        )
        # Over one rank FSDP2's factor of 1 would cost a copy.
        if over.size() == 1:
            unit.leave_undivided()
        if knobs.collectives.symmetric_memory:
            # By torch's objects, whose reductions only add up: the unit has said that
            # ours do.
            unit_module.set_symm_mem_for_comm()
        else:
            unit_module.set_custom_all_gather(traffic.all_gather(unit).for_fsdp2())
            scatter = traffic.reduce_scatter(unit)
            unit_module.set_custom_reduce_scatter(scatter.for_fsdp2())
        # What its parameters are stored and communicated as.
        unit.is_recomputed = planned.name in recomputed
        if gather_of is not None and unit.group is not None:
            travel(unit.group, gather_of)
        if knobs.frozen_storage is not None and not plan.shapes.on_meta:
            unit.store_coded(plan)
        units.append(unit)
    return units


def _evenly(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """Return the dimension that a parameter of experts is sharded in: experts, or the
    next one if a rank holds too few for all others."""
    local = local_part(parameter)
    even = [dim for dim, size in enumerate(local.shape) if size % ranks == 0]
    return Shard(even[0]) if even else None


def apply_fsdp_options(
    model: nn.Module, config: SmpConfig, device: torch.device
) -> None:
    """Hand resolved options to the model's roots, before the first forward. Collective
    with ``separate_reduce_scatter_group``."""
    options = config.collectives
    forward, backward = options.forward_prefetch, options.backward_prefetch
    assert isinstance(forward, int) and isinstance(backward, int)
    # How many units ahead of use gathers begin.
    if forward or backward > 1:
        prefetch(model, forward=forward, backward=backward)
    apart, buffers = (
        options.separate_reduce_scatter_group,
        options.reduce_scatter_buffers,
    )
    # The root holds what all its units share: the group and the buffers of reductions.
    for root in _roots(model) if apart or buffers != 1 else ():
        if apart:
            with _groups_of_the_run(device):
                root.set_separate_reduce_scatter_group(True)
        if buffers != 1:
            root.set_reduce_scatter_max_input_buffers(buffers)  # type: ignore[arg-type]


@contextlib.contextmanager
def _groups_of_the_run(device: torch.device) -> Iterator[None]:
    """Let process groups that are made inside have the run's timeout, and connect them
    while all ranks are here. (FSDP2 gives none, which is torch's ten minutes, and first
    uses them in a backward pass.)"""
    make, made = dist.new_group, []

    def new_group(*args: Any, **options: Any) -> Any:
        made.append(make(*args, **{"timeout": collective_timeout(), **options}))
        return made[-1]

    with changed(dist, new_group=new_group):
        yield
    # A first message connects a group, here and not in the first backward pass.
    for group in made:
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def prefetch(model: nn.Module, *, forward: int, backward: int) -> None:
    """Gather ahead of use: in forward the next ``forward`` units in the order in which
    they are registered (0: FSDP2's own, which overlaps by streams only), in backward
    the ``backward`` whose forward ended before (1: FSDP2's own, by the order in which
    they ran). A unit inside another one ends before it."""
    for root in _roots(model):
        units: list[FSDPModule] = [
            module
            for module in root.modules()  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule)
        ]
        # In the order of registration, which is most models' order of use.
        if forward:
            for place, unit in enumerate(units):
                unit.set_modules_to_forward_prefetch(
                    units[place + 1 : place + 1 + forward]
                )
        # Backward comes to units in the reverse of the order in which their forwards end.
        ended = list(dict.fromkeys(_as_forwards_end(root)))  # type: ignore[arg-type]
        if backward > 1:
            for place, unit in enumerate(ended):
                unit.set_modules_to_backward_prefetch(
                    ended[max(place - backward, 0) : place][::-1]
                )


def _as_forwards_end(module: nn.Module) -> Iterator[FSDPModule]:
    for child in module.children():
        yield from _as_forwards_end(child)
    if isinstance(module, FSDPModule):
        yield module


def _roots(model: nn.Module) -> Iterable[FSDPModule]:
    inside: set[nn.Module] = set()
    # modules() names outer modules first, so what is inside of a root is known by then.
    for module in model.modules():
        if isinstance(module, FSDPModule) and module not in inside:
            inside.update(module.modules())  # type: ignore[attr-defined]
            yield module


_set_class = vars(object)["__class__"].__set__


@contextlib.contextmanager
def any_class(module: nn.Module) -> Iterator[None]:
    """Let ``fully_shard`` in the lines inside take a module of any class."""
    # Most classes can be given further bases as they are.
    kind = type(module)
    if base_without_dict(kind) is object:
        yield
        return

    def take(module: nn.Module, sharded: type) -> None:
        _set_class(module, _sharded(kind, sharded))  # type: ignore[arg-type]  # modules' classes are hashable

    # fully_shard reads and assigns module.__class__. For the moment the property shows it
    # the module's own class, and swaps in ours when it assigns one.
    _set_class(
        module,
        type(kind.__name__, (kind,), {"__class__": property(lambda _: kind, take)}),
    )
    try:
        yield
    finally:
        if not issubclass(type(module), FSDPModule):  # it was refused
            _set_class(module, kind)


@functools.cache
def _sharded(kind: type, made: type) -> type:
    """Return a class like the one that ``fully_shard`` has made of ``kind``: that is
    the third class in its order, too, and FSDPModule's methods come before those of
    nn.Module."""
    own = {"__deepcopy__": vars(made)["__deepcopy__"], "__module__": kind.__module__}
    return type(made.__name__, (mixin_before(FSDPModule, kind), kind), own)

"""adopt_sharded_model(): what parallelize_model() adds, for a pre-sharded model
(smp_core/sharding/given.py)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.cluster import SmpMesh, broadcast_from_rank_0
from smp_core.comm import CommMeter, Traffic
from smp_core.context_parallel import chunk_losses
from smp_core.engine.conversions import (
    balance_where_asked,
    move_plain_tensors,
    register_forward_methods,
)
from smp_core.engine.parallel_model import ParallelModel
from smp_core.expert_parallel import deal_experts
from smp_core.plan import GivenSharding, Plan
from smp_core.sharding import (
    NativeWindow,
    ReplacedParameters,
    change_this_process,
    follow_window,
    require_plain_lookups,
)
from smp_core.sharding.fsdp import (
    Calls,
    ShardedUnit,
    adopt_units,
    apply_fsdp_options,
    explain_uncalled,
)
from smp_core.sharding.gradients import AccumulationWindow, Window


def adopt_sharded_model(
    model: nn.Module, mesh: SmpMesh, plan: Plan, given: GivenSharding
) -> ParallelModel:
    """Do what :func:`smp_core.engine.conversions.parallelize_model` does besides
    sharding, to a pre-sharded model. In place; collective over the world.

    A model on a 1-D mesh gets communication objects, replica all-reduce and window, and
    the first replica's weights. On a 2-D mesh FSDP2's own replica all-reduce is the
    window, and nothing is metered. Both get losses in chunks, balanced routers, and our
    ways to experts that Transformers has dealt.

    Args:
        given: how it came (:func:`smp_core.sharding.given.given_sharding`).

    Raises:
        ValueError: partition groups other than the mesh's.
    """
    # Groups of other ranks would need the shards to be dealt anew.
    if list(mesh.shard_ranks) != list(given.ranks):
        raise ValueError(
            f"shard_degree={mesh.shard_degree}, but the model came sharded over ranks {list(given.ranks)}; allowed: "
            f"shard_degree={given.degree} with consecutive ranks, or 'auto'"
        )
    knobs = plan.knobs
    # Phase 1: what the model computes, in the order of parallelize_model().
    change_this_process(mesh)
    require_plain_lookups(model, mesh)
    replaced = ReplacedParameters(model)
    if knobs.chunked_cross_entropy is not None:
        chunk_losses(model, knobs.chunked_cross_entropy)
    meter = CommMeter(
        mesh.topology, mesh.rank, mesh.device.type, enabled=knobs.collectives.meter
    )
    routers = balance_where_asked(model, mesh, plan, meter)
    # Phase 2: what FSDP2 does not manage gets rank 0's values, on the device.
    plain = [
        parameter
        for parameter in model.parameters()
        if not isinstance(parameter, DTensor)
    ]
    broadcast_from_rank_0(plain, mesh.device, mesh.gradient_group)
    broadcast_from_rank_0(model.buffers(), mesh.device, mesh.gradient_group)
    move_plain_tensors(model, mesh.device)
    replaced.settle(model)
    meshes = (
        {}
        if knobs.expert_parallel_degree == 1
        else deal_experts(model, mesh, plan, meter)
    )
    traffic = Traffic(mesh, meter, plan)
    # Phase 3: calls into it, and its gradients from here on.
    units: list[ShardedUnit] = []
    window: Window
    if given.two_dimensional:
        # torch adds up across replicas itself.
        window = NativeWindow(model)
        calls = Calls(model, mesh.shard_ranks)
    else:
        # Each partition group was sharded by itself, and may hold values of its own.
        _first_replicas_weights(model, mesh)
        units = adopt_units(model, plan.shapes.units.units, traffic, meshes)
        explain_uncalled(units)
        apply_fsdp_options(model, knobs, mesh.device)
        calls = Calls(model, mesh.shard_ranks, units)
        register_forward_methods(model, units, calls, knobs.forward_methods)
        window = AccumulationWindow(model, units, traffic, plan, calls)
    follow_window(model, window)
    return ParallelModel(
        model,
        tuple(units),
        window,
        calls,
        replaced,
        mesh,
        plan,
        meter,
        traffic,
        routers=routers,
    )


@torch.no_grad()
def _first_replicas_weights(model: nn.Module, mesh: SmpMesh) -> None:
    # A replica by itself has nothing to be alike with.
    if mesh.replicate_degree == 1:
        return
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.to_local().numel() > 0:
            dist.broadcast(
                parameter.to_local(), group_src=0, group=mesh.replicate_group
            )

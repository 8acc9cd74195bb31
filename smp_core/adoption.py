"""adopt_sharded_model(): what parallelize_model() adds, for a model that came sharded (smp_core/sharding/given.py)."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from smp_core.comm.meter import CommMeter
from smp_core.comm.traffic import Traffic
from smp_core.config import SmpConfig
from smp_core.context_parallel.chunked_models import chunk_losses
from smp_core.explanations import explain_uncaught_errors
from smp_core.mesh import SmpMesh
from smp_core.parallelize import ParallelModel, move_plain_tensors
from smp_core.sharding.accumulation import AccumulationWindow
from smp_core.sharding.forward_methods import register_forward_methods
from smp_core.sharding.fsdp import Calls, adopt_units, explain_uncalled, given_policy, settle_given_parameters
from smp_core.sharding.fsdp_options import apply_fsdp_options, settle_fsdp_options
from smp_core.sharding.given import GivenSharding, NativeWindow
from smp_core.sharding.load_state_dict import load_own_parts
from smp_core.sharding.pickling import refuse_to_pickle_shards
from smp_core.sharding.rank_0 import broadcast_from_rank_0
from smp_core.sharding.replaced import ReplacedParameters
from smp_core.sharding.scalars import reduce_scalars
from smp_core.sharding.stages import settle_stages
from smp_core.sharding.wrap import PlannedUnit, WrapPlan
from smp_core.sharding.zero_grad import drop_with_zero_grad

logger = logging.getLogger("smp")

# What is settled when a model comes sharded, and what then says it in the table.
_GIVEN = ("wrap", "wrap_min_parameters", "reshard_after_forward", "reshard_after_backward", "delayed_init")
_TORCHS: dict[str, Any] = {
    "reduce_every_micro_batch": True,
    "hierarchical": False,
    "comm_meter": False,
    "replica_reduce_dtype": None,
    "quantized_all_gather": None,
    "error_feedback": False,
    "quantized_reduce": None,
    "optimizer_shard": "shard",
    "forward_prefetch": 0,
    "backward_prefetch": 1,
    "reduce_scatter_buffers": 1,
    "separate_reduce_scatter_group": False,
    "forward_methods": (),
}


def adopt_sharded_model(model: nn.Module, mesh: SmpMesh, config: SmpConfig, given: GivenSharding) -> ParallelModel:
    """What :func:`parallelize_model` adds, for a model that came sharded. In place; collective over the world.

    On a 1-D mesh: communication objects, replica hop and window; weights become those of the first replica. On a 2-D
    mesh torch's own two-hop is the window, and nothing is metered. On both: losses in chunks.

    Args:
        given: how it came (:func:`smp_core.sharding.given.given_sharding`).

    Raises:
        ValueError: a knob that is not built yet or comes too late, partition groups other than the mesh's, or trainable
            plain parameters beside a 2-D mesh.
    """
    config.require_built()
    refuse_to_pickle_shards()
    replaced = ReplacedParameters(model)
    reduce_scalars()
    explain_uncaught_errors()
    if mesh.shard_degree != given.degree or dist.get_process_group_ranks(mesh.shard_group) != list(given.ranks):
        raise ValueError(
            f"shard_degree={mesh.shard_degree}, but the model came sharded over ranks {list(given.ranks)}; allowed: "
            f"shard_degree={given.degree} with consecutive ranks, or 'auto'"
        )
    for knob in ("fp8", "activation_checkpointing", "activation_offloading", "symmetric_memory"):
        if getattr(config, knob) != getattr(SmpConfig(), knob):
            raise ValueError(
                f"{knob}={getattr(config, knob)!r} has to be applied before a model is sharded, and this one came "
                f"sharded; leave {knob} out, or load the model without distributed_config and let torch-smp shard it"
            )
    if config.state_offload == "all":
        raise ValueError(
            "state_offload='all' has to be applied when a model is sharded, and this one came sharded; allowed: none, "
            "'optimizer'; or load the model without distributed_config and let torch-smp shard it"
        )
    policy = given_policy(model)
    settled: dict[str, Any] = {name: getattr(SmpConfig(), name) for name in _GIVEN}
    settled |= {f"{what}_dtype": _name_of(getattr(policy, f"{what}_dtype")) for what in ("param", "reduce")}
    for knob, value in settled.items():
        config = config.with_resolved(knob, value, "as the model came")
    plain = {name: p for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    if given.two_dimensional:
        if any(parameter.requires_grad for parameter in plain.values()):
            raise ValueError(
                f"trainable parameters that every rank holds whole ({', '.join(plain)}) beside a model sharded in two "
                "dimensions; write DistributedConfig(fsdp_size=...) without dp_replicate_size"
            )
        for knob, value in _TORCHS.items():
            config = config.with_resolved(
                knob, value, "torch gathers and reduces: the model came with its own replicas"
            )
        if mesh.rank == 0:
            logger.warning(
                "the model came sharded on a (replicate, shard) mesh: torch gathers and reduces, also across replicas, "
                "and %s have no effect; load it without distributed_config, and torch-smp shards it",
                ", ".join((*_TORCHS, *_GIVEN)),
            )
    if config.chunked_cross_entropy is not None:
        chunk_losses(model, config.chunked_cross_entropy)
    meter = CommMeter(mesh.topology, mesh.rank, mesh.device.type, enabled=bool(config.comm_meter))
    broadcast_from_rank_0(plain.values(), mesh.device)
    broadcast_from_rank_0(model.buffers(), mesh.device)
    move_plain_tensors(model, mesh.device)
    settle_given_parameters(model)
    replaced.settle(model)
    own_dtype = next((p.dtype for p in model.parameters()), torch.float32)
    if not given.two_dimensional:
        # Predicted times are linear: units of the average size take what these take together.
        count = sum(isinstance(module, FSDPModule) for module in model.modules())
        average = sum(p.numel() for p in model.parameters() if isinstance(p, DTensor)) // count
        mesh, config = settle_stages(mesh, config, [average] * count, own_dtype)
    traffic = Traffic(mesh, meter, config)
    config = traffic.config
    if given.two_dimensional:
        plan = WrapPlan((), tuple(plain), "as it came")
        native = NativeWindow(model)
        drop_with_zero_grad(model, native.drop)
        return ParallelModel(
            model, mesh, config, plan, (), native, meter, traffic, Calls(model, mesh.shard_ranks), replaced
        )
    _first_replicas_weights(model, mesh)
    units = adopt_units(model, traffic.all_gather, traffic.reduce_scatter)
    explain_uncalled(units)
    elements = [sum(p.numel() for p in unit.parameters()) for unit in units]
    config = settle_fsdp_options(config, mesh, [n for n in elements if n], policy.param_dtype or own_dtype)
    apply_fsdp_options(model, config)
    planned = tuple(PlannedUnit(unit.name, unit.parameter_names, unit.module is model) for unit in units)
    plan = WrapPlan(planned, tuple(plain), "as it came")
    calls = Calls(model, mesh.shard_ranks)
    register_forward_methods(model, units, calls, config.forward_methods)
    window = AccumulationWindow(
        units,
        [plain],
        mesh,
        traffic.hop,
        traffic.world_hop,
        policy.reduce_dtype,
        on_close=traffic.step_done,
        over_world=config.optimizer_shard == "world",
        hold_gradients=not config.reduce_every_micro_batch,
    )
    drop_with_zero_grad(model, window.zero_grad)
    load_own_parts(model, lambda: window.world)
    return ParallelModel(model, mesh, config, plan, tuple(units), window, meter, traffic, calls, replaced)


@torch.no_grad()
def _first_replicas_weights(model: nn.Module, mesh: SmpMesh) -> None:
    if mesh.replicate_degree == 1:
        return
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.to_local().numel() > 0:
            dist.broadcast(parameter.to_local(), group_src=0, group=mesh.replicate_group)


def _name_of(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")

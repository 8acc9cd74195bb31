"""Traffic: which communication objects a configuration means, and what they share.

A knob that cannot have an effect here (nothing to gather, no link between nodes to spare) becomes what does take
effect, with the reason, in the configuration's table.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from smp_core.comm.background import Background
from smp_core.comm.codec import Codec, codec
from smp_core.comm.flat import CommObject, FlatAllGather, FlatReduceScatter
from smp_core.comm.hierarchical import HierarchicalAllGather, HierarchicalReduceScatter
from smp_core.comm.meter import CommMeter
from smp_core.comm.quantized_gather import GatherPolicy, QuantizedAllGather
from smp_core.comm.quantized_reduce import QuantizedReduceScatter
from smp_core.comm.replica_hop import ReplicaHop
from smp_core.config import SmpConfig
from smp_core.mesh import SmpMesh

logger = logging.getLogger("smp")


class Unit(Protocol):
    """What a communication object has to know of a sharded unit."""

    name: str

    def shard_layout(self) -> Sequence[tuple[str, int]]: ...

    def local_shards(self) -> Sequence[torch.Tensor]: ...


class Traffic:
    """Makes the communication objects of one model.

    Attributes:
        config: the configuration with what takes effect of the knobs that are this object's business.
        hop: sums over the replication group.
        world_hop: sums over all ranks, for parameters that every rank holds whole.
        steps: optimizer steps so far.
    """

    def __init__(self, mesh: SmpMesh, meter: CommMeter, config: SmpConfig) -> None:
        self._mesh, self._meter = mesh, meter
        self.steps = 0
        self.config = _effective(mesh, config)
        config = self.config
        self._stages = None
        if mesh.hierarchical:
            assert mesh.intra_group is not None and mesh.inter_group is not None
            self._stages = (mesh.intra_group, mesh.inter_group)
        self._policy = None
        if config.quantized_all_gather is not None:
            self._policy = GatherPolicy(
                codec(config.quantized_all_gather),
                after_steps=config.quantize_after_steps,
                exclude=config.quantize_exclude,
                group=mesh.shard_group,
                device=mesh.device,
                steps=lambda: self.steps,
            )
        self._reductions: dict[str, QuantizedReduceScatter] = {}
        payload: Codec | None = None
        if mesh.topology.spans_nodes(mesh.replicate_ranks):
            name = config.quantized_reduce or ("bfloat16" if config.replica_reduce_dtype else None)
            payload = codec(name) if name else None
        background, feedback = Background(mesh.device), bool(config.error_feedback)
        self.hop = ReplicaHop(meter, mesh.replicate_group, mesh.replica_stages, background, payload, feedback)
        self.world_hop = self.hop
        if mesh.shard_degree > 1:
            # 0-d and shared parameters: few, and gradients of what is shared matter most.
            self.world_hop = ReplicaHop(meter, mesh.gradient_group, mesh.gradient_stages, background)

    def all_gather(self, unit: Unit) -> CommObject:
        """The object that gathers this unit's parameters."""
        # Accelerators have streams; elsewhere FSDP2 waits when it needs the parameters.
        deferred = self._mesh.device.type == "cpu"
        exact: CommObject = FlatAllGather(self._meter, deferred=deferred)
        if self._stages is not None:
            exact = HierarchicalAllGather(self._meter, *self._stages, deferred=deferred)
        if self._policy is None:
            return exact
        return QuantizedAllGather(
            self._meter,
            exact,
            self._policy,
            self._policy.add_unit(unit.name, unit.local_shards),
            self._mesh.shard_group,
            self._stages,
            unit.shard_layout,
            everywhere=self.config.quantize_inside_nodes,
            deferred=deferred,
        )

    def reduce_scatter(self, unit: Unit) -> CommObject:
        """The object that reduces this unit's gradients inside the partition group."""
        if self.config.quantized_reduce and self._mesh.topology.spans_nodes(self._mesh.shard_ranks):
            made = QuantizedReduceScatter(
                self._meter,
                codec(self.config.quantized_reduce),
                self._mesh.shard_group,
                self._stages,
                error_feedback=bool(self.config.error_feedback),
            )
            self._reductions[unit.name] = made
            return made
        if self._stages is not None:
            return HierarchicalReduceScatter(self._meter, *self._stages)
        return FlatReduceScatter(self._meter)

    def step_done(self) -> None:
        """An optimizer step's gradients are complete: its weights are about to change."""
        self.steps += 1
        self.weights_changed()

    def weights_changed(self) -> None:
        if self._policy is not None:
            self._policy.weights_changed()

    def fallbacks(self) -> dict[str, int]:
        """How often something was sent exactly because it held inf or nan, on this rank: gathers by unit, and
        ``"reductions"``, ``"replica hop"``. Empty where nothing was."""
        found = dict(self._policy.fallbacks) if self._policy is not None else {}
        found["reductions"] = sum(reduction.fallbacks for reduction in self._reductions.values())
        found["replica hop"] = self.hop.fallbacks
        return {name: count for name, count in found.items() if count}

    @property
    def device(self) -> torch.device:
        return self._mesh.device

    def layout(self) -> list[int]:
        """What remainders depend on: the number of ranks, the shard degree, and whether there are two stages."""
        return [self._mesh.topology.world_size, self._mesh.shard_degree, int(self._stages is not None)]

    # What was rounded off and not made up for yet is part of a training's state.

    def error_feedback(self) -> dict[str, torch.Tensor]:
        """This rank's rounded-off remainders, flat, by name: equal names and sizes on all ranks. Collective."""
        if not self.config.error_feedback:
            return {}
        own = {f"reduce {name}": made.residual for name, made in self._reductions.items() if made.residual is not None}
        for key, (to_owners, from_owner) in self.hop.residuals.items():
            own[f"hop {key}, to owners"], own[f"hop {key}, from owner"] = to_owners, from_owner
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, {name: (tuple(t.shape), t.dtype) for name, t in own.items()})
        found = {}
        for name, (shape, dtype) in sorted({name: what for ranks in everyone for name, what in ranks.items()}.items()):
            # A replica that never used a unit has nothing of it.
            tensor = own.get(name)
            found[name] = (
                torch.zeros(shape, dtype=dtype, device=self._mesh.device) if tensor is None else tensor
            ).view(-1)
        return found

    def load_error_feedback(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take up what :meth:`error_feedback` gave; names of units that are not here are left out."""
        if not self.config.error_feedback:
            return
        m = dist.get_world_size(self.hop.between)
        columns = dist.get_world_size(self._mesh.shard_group if self._stages is None else self._stages[1])
        for name, tensor in saved.items():
            kind, _, rest = name.partition(" ")
            if kind == "reduce" and rest in self._reductions:
                self._reductions[rest].residual = tensor.clone().view(columns, -1)
            elif kind == "hop" and rest.endswith(", to owners"):
                key = rest.removesuffix(", to owners")
                from_owner = saved[f"hop {key}, from owner"].clone()
                self.hop.residuals[key] = (tensor.clone().view(m, -1), from_owner)


def _effective(mesh: SmpMesh, config: SmpConfig) -> SmpConfig:
    """Knobs that can save nothing here are taken back, with the reason."""

    def without(config: SmpConfig, knob: str, why: str) -> SmpConfig:
        if mesh.rank == 0:
            logger.warning("%s=%r has no effect: %s", knob, getattr(config, knob), why)
        return config.with_resolved(knob, None, why)

    gathers_cross = mesh.topology.spans_nodes(mesh.shard_ranks)
    sums_cross = mesh.topology.spans_nodes(mesh.replicate_ranks)
    if config.quantized_all_gather is not None:
        if mesh.shard_degree == 1:
            config = without(config, "quantized_all_gather", "shard_degree=1: nothing is gathered")
        elif not gathers_cross and not config.quantize_inside_nodes:
            why = "the partition group lies inside one node; quantize_inside_nodes=true encodes there too"
            config = without(config, "quantized_all_gather", why)
    if config.replica_reduce_dtype is not None and not sums_cross:
        why = "replicas are on one node" if mesh.replicate_degree > 1 else "there is one replica: no sums across"
        config = without(config, "replica_reduce_dtype", why)
    if config.optimizer_shard == "world" and mesh.replicate_degree == 1:
        why = "there is one replica: optimizer states are sharded over all ranks already"
        config = config.with_resolved("optimizer_shard", "shard", why)
    if config.quantized_reduce is not None and not gathers_cross and not sums_cross:
        config = without(config, "quantized_reduce", "no gradients cross between nodes")
    if config.error_feedback == "auto" or (config.error_feedback and config.quantized_reduce is None):
        encoded = config.quantized_reduce is not None
        why = "gradients are quantised" if encoded else "no gradients are quantised"
        config = config.with_resolved("error_feedback", encoded, why)
    return config

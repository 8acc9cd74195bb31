"""Traffic: the communication objects that a plan means, and what they share; and
IssuedCollectives: what this rank issued on its partition group since all ranks last
compared, in order.

Collectives are matched by order alone. Where ranks of a partition group take different
branches through units of one shape, each takes the other's values for its own: no
error, wrong numbers. So every gather and reduction of a unit is noted by a number
(unit, kind, direction), and a checksum of the numbers is compared when the accumulation
window closes. Noting one takes about a microsecond and asks nothing of a device.
"""

from __future__ import annotations

import functools
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from smp_core.cluster import (
    GRADIENTS,
    PARTITION,
    Axis,
    SmpMesh,
    of_all_ranks,
    prefers_messages,
)
from smp_core.codecs.codec import codec
from smp_core.comm.background import Background
from smp_core.comm.deferred import Deferred
from smp_core.comm.flat import CommObject, FlatAllGather, FlatReduceScatter
from smp_core.comm.hierarchical import HierarchicalAllGather, HierarchicalReduceScatter
from smp_core.comm.meter import CommMeter
from smp_core.comm.quantized_gather import GatherPolicy, QuantizedAllGather
from smp_core.comm.quantized_reduce import QuantizedReduceScatter
from smp_core.comm.replica_hop import ReplicaHop
from smp_core.comm.secondary import Gathers, SecondaryGather
from smp_core.plan import Plan
from smp_core.watch import here, ranks_in_words, went_apart

_MICRO_BATCH_ENDED = 0
# Numbers that are kept to name the first difference; an evaluation may issue millions
# between two comparisons.
_KEPT = 1 << 16
_DIRECTIONS = ("forward", "backward")


class Unit(Gathers, Protocol):
    """A sharded unit, as far as communication objects have to know it."""

    name: str
    is_root: bool

    def shard_layout(self) -> Sequence[tuple[str, int]]: ...

    def local_shards(self) -> Sequence[Tensor]: ...


@dataclass(frozen=True)
class Route:
    """The way of a gradient from this rank's sum to ``.grad``: added up over a group,
    in stages and compressed as its ``hop`` does it, then divided once.

    Attributes:
        group: the ranks to add up over.
        divisor: ranks whose gradients are in the sum, those that were added up before
            included.
        make_hop: makes what adds up over the group.
    """

    group: dist.ProcessGroup
    divisor: int
    make_hop: Callable[[], ReplicaHop]

    @cached_property
    def hop(self) -> ReplicaHop:
        """The object that adds up over the group, made when it is first asked for:
        often there is nothing to add up."""
        return self.make_hop()

    @property
    def adds_up(self) -> bool:
        """Return whether there are other replicas to add up with."""
        return dist.get_world_size(self.group) > 1


class Traffic:
    """Makes the communication objects of one model.

    Attributes:
        of_replicated: that of parameters that every rank holds whole, over all ranks
            whose gradients are added up.
        steps: optimizer steps so far.
        issued: what was asked of the objects that it has made.
        meter: counts what they send.
    """

    def __init__(self, mesh: SmpMesh, meter: CommMeter, plan: Plan) -> None:
        self.mesh, self.meter = mesh, meter
        self.steps = 0
        # All units note what they issue in one list: ranks compare it when a window
        # closes.
        self.issued = IssuedCollectives(mesh.shard_ranks)
        # From here on ranks that wait for this one are shown these.
        here.recent, here.describe = self.issued.numbers.tolist, self.issued.describe
        here.peers = self.issued.peers
        here.end_window(measured=False)
        knobs = plan.knobs
        form = self._form = knobs.compression
        # Two stages for gathers and reductions, where the partition group has them.
        self._stages = mesh.stages(*PARTITION) if plan.hierarchical else None
        self._gathers_cross = mesh.topology.spans_nodes(mesh.shard_ranks)
        self._policy = None
        if form.gather is not None:
            self._policy = GatherPolicy(
                codec(form.gather),
                after_steps=form.gather_after_steps,
                exclude=form.gather_exclude,
                group=mesh.shard_group,
                device=mesh.device,
                steps=lambda: self.steps,
            )
        # Parts of unsharded parameters stay with a smaller group between forward and
        # backward.
        keep = knobs.reshard_after_forward
        self._holders = mesh.secondary(keep) if type(keep) is int else None
        self._secondary: list[SecondaryGather] = []
        # Experts that ranks divide are units over the rest of the partition group, as
        # they are and in one stage.
        dealt = plan.shapes.experts if knobs.expert_parallel_degree != 1 else ()
        self._experts = {site.name for site in dealt}
        self._reductions: dict[str, QuantizedReduceScatter] = {}
        self._add_routes(plan)

    def _add_routes(self, plan: Plan) -> None:
        """Make the routes of gradients, and connect those that do not send by one
        all-reduce of the library."""
        mesh, knobs = self.mesh, plan.knobs
        over_world = knobs.optimizer_shard == "world"
        in_stages = bool(knobs.collectives.hierarchical)
        # One thread or stream for all hops: they run in the order of submission.
        background = functools.cache(lambda: Background(mesh.device))

        def route(group: dist.ProcessGroup, *stages_and_codec: Any) -> Route:
            # Made on demand: most runs of one replica never ask for a hop.
            def make_hop() -> ReplicaHop:
                stages, *coded = stages_and_codec
                return ReplicaHop(self.meter, group, stages, background(), *coded)

            return Route(group, mesh.gradient_degree, make_hop)

        # Units: over replicas.
        payload = None if plan.replica_payload is None else codec(plan.replica_payload)
        stages = mesh.stages(Axis.REPLICATE) if in_stages else None
        self._of_units = route(
            mesh.replicate_group, stages, payload, bool(self._form.error_feedback)
        )
        self.of_replicated = self._of_units
        connected = (
            [self._of_units]
            if over_world or stages is not None or payload is not None
            else []
        )
        # 0-d and shared parameters, over all ranks, not in codes: few, and gradients of
        # what is shared matter most.
        if mesh.shard_degree > 1:
            has_any = any(plan.replicated_parameters)
            stages = mesh.stages(*GRADIENTS) if in_stages and has_any else None
            self.of_replicated = route(mesh.gradient_group, stages)
            if has_any and (over_world or stages is not None):
                connected.append(self.of_replicated)
        # Of frozen parameters too, which may be trained later; but integers, and
        # numbers of eight bits, are never added up.
        reduced = (
            {plan.dtypes.of_reduced(parameter) for parameter in plan.shapes.parameters}
            if connected
            else set()
        )
        summed = sorted(
            (each for each in reduced if each.is_floating_point and each.itemsize > 1),
            key=str,
        )
        # Every dtype that may be summed: NCCL holds the host while it connects ranks,
        # and later replicas may be in different places.
        for each in connected:
            for dtype in summed:
                each.hop.connect(dtype)

    def route_of(self, unit: Unit) -> Route:
        """Return the route of a unit's sums: over the replication group, since FSDP2
        has added up inside the partition group. The same for all units; what is kept of
        them for checkpoints is that of this one route."""
        return self._of_units

    def gather_exactly(self, names: Iterable[str]) -> None:
        """Let these parameters travel as they are, also where others are gathered in
        codes."""
        if self._policy is not None:
            self._policy.exclude += tuple(names)

    def all_gather(self, unit: Unit) -> NotedCollective:
        """Return the object that gathers this unit's parameters."""
        # Accelerators have streams; elsewhere FSDP2 waits when it needs the parameters.
        deferred = prefers_messages(self.mesh.shard_group, self.mesh.device)
        exact: CommObject = FlatAllGather(self.meter, deferred=deferred)
        if unit.name in self._experts:
            # Experts that are dealt go over their own groups, in one stage.
            return NotedCollective(self.issued, exact, "all_gather", unit.name)
        if self._stages is not None:
            exact = HierarchicalAllGather(self.meter, *self._stages, deferred=deferred)
        made: CommObject | SecondaryGather = exact
        # The policy decides for all units at once, so each of them has a number there.
        if self._policy is not None:
            made = exact = QuantizedAllGather(
                self.meter,
                exact,
                self._policy,
                self._policy.add_unit(unit.name, unit.local_shards),
                self.mesh.shard_group,
                self._stages,
                unit.shard_layout,
                everywhere=self._form.gather_inside_nodes,
                deferred=deferred,
            )
        # Roots stay unsharded after forward.
        if self._holders is not None and not unit.is_root:
            made = SecondaryGather(exact, self._holders, unit)
            self._secondary.append(made)
        return NotedCollective(self.issued, made, "all_gather", unit.name)

    def reduce_scatter(self, unit: Unit) -> NotedCollective:
        """Return the object that reduces this unit's gradients inside the partition
        group."""
        made: CommObject = FlatReduceScatter(self.meter)
        is_dealt = unit.name in self._experts
        # Codes pay only between nodes.
        if self._gathers_cross and self._form.reduce_codes and not is_dealt:
            made = self._reductions[unit.name] = QuantizedReduceScatter(
                self.meter,
                codec(self._form.reduce_codes),
                self.mesh.shard_group,
                self._stages,
                error_feedback=bool(self._form.error_feedback),
            )
        elif self._stages is not None and not is_dealt:
            made = HierarchicalReduceScatter(self.meter, *self._stages)
        return NotedCollective(self.issued, made, "reduce_scatter", unit.name)

    def parts(self) -> list[Tensor]:
        """List the parts of unsharded parameters that this rank holds between forward
        and backward."""
        return [
            secondary.part
            for secondary in self._secondary
            if secondary.part is not None
        ]

    @property
    def keeps_remainders(self) -> bool:
        """Return whether what compression rounds off is added to the next gradients."""
        return bool(self._form.error_feedback)

    def step_done(self) -> None:
        """Note that an optimizer step's gradients are complete: its weights are about
        to change."""
        self.steps += 1
        # Gathers look at weights again, and parts of the old ones are dropped.
        self.weights_changed()

    def weights_changed(self) -> None:
        """Let nothing be used again that was made of the weights before."""
        if self._policy is not None:
            self._policy.weights_changed()
        for secondary in self._secondary:
            secondary.forget()

    def fallbacks(self) -> dict[str, int]:
        """Return how often something held inf or nan and could not be compressed, on
        this rank: gathers by unit, and ``"reductions"``, ``"replica hop"``. Empty where
        nothing was. Waits for the device."""
        found = dict(self._policy.fallbacks) if self._policy is not None else {}
        found["reductions"] = sum(
            int(reduction.fallbacks) for reduction in self._reductions.values()
        )
        found["replica hop"] = int(self._of_units.hop.fallbacks)
        return {name: count for name, count in found.items() if count}

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    def layout(self) -> list[int]:
        """Return what remainders depend on: the number of ranks, the shard degree,
        whether collectives have two stages, the pipeline stages and the tensor
        ranks."""
        mesh = self.mesh
        return [
            mesh.topology.world_size,
            mesh.shard_degree,
            int(self._stages is not None),
            mesh.pipeline_degree,
            mesh.tensor_degree,
        ]

    # What was rounded off and not made up for yet is part of a training's state.

    def error_feedback(self) -> dict[str, Tensor]:
        """Return this rank's rounded-off remainders, flat, by name: equal names and
        sizes on all ranks of a pipeline stage. Collective over these."""
        if not self.keeps_remainders:
            return {}
        # Remainders by unit of reductions inside partition groups, and by key of the
        # hop.
        own = {
            f"reduce {name}": made.residual
            for name, made in self._reductions.items()
            if made.residual is not None
        }
        for key, (to_owners, from_owner) in self._of_units.hop.residuals.items():
            own[f"hop {key}, to owners"], own[f"hop {key}, from owner"] = (
                to_owners,
                from_owner,
            )
        # Names and sizes of all ranks, so that each fills up what it lacks.
        group = self.mesh.model_group
        sizes = {name: (tuple(t.shape), t.dtype) for name, t in own.items()}
        everyone = of_all_ranks(sizes, group)
        found = {}
        for name, (shape, dtype) in sorted(
            {name: what for ranks in everyone for name, what in ranks.items()}.items()
        ):
            # A replica that never used a unit has nothing of it.
            tensor = own.get(name)
            found[name] = (
                torch.zeros(shape, dtype=dtype, device=self.mesh.device)
                if tensor is None
                else tensor
            ).view(-1)
        return found

    def load_error_feedback(self, saved: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`error_feedback` gave; names of units that are not here
        are left out."""
        if not self.keeps_remainders:
            return
        # Flat remainders get back the shapes in which the stages use them.
        m = dist.get_world_size(self._of_units.hop.between)
        columns = dist.get_world_size(
            self.mesh.shard_group if self._stages is None else self._stages[1]
        )
        for name, tensor in saved.items():
            kind, _, rest = name.partition(" ")
            if kind == "reduce" and rest in self._reductions:
                self._reductions[rest].residual = tensor.clone().view(columns, -1)
            elif kind == "hop" and rest.endswith(", to owners"):
                key = rest.removesuffix(", to owners")
                from_owner = saved[f"hop {key}, from owner"].clone()
                self._of_units.hop.residuals[key] = (
                    tensor.clone().view(m, -1),
                    from_owner,
                )


class IssuedCollectives:
    """The collectives of one model on one rank.

    Args:
        peers: the ranks that issue the same.

    Attributes:
        backward_pass: returns the number of the backward pass that runs, -1 outside.
        windows: how often all ranks began anew: the number of the window that runs.
        names: kind and unit of each object whose calls are noted.
        numbers: of the collectives issued, in order: the odd number of a unit and kind,
            the next one in a backward pass, and 0 at the end of a micro-batch. The same
            array at all times.
    """

    def __init__(self, peers: Sequence[int]) -> None:
        self.peers = tuple(peers)
        self.backward_pass: Callable[[], int] = lambda: -1
        self.windows = 0
        self.names: list[tuple[str, str]] = []
        self.numbers = array("i")
        self._older = 0  # checksum of what is not kept any more

    def drop_details(self) -> None:
        """Keep nothing but the checksum of what was issued so far."""
        self._older = zlib.crc32(self.numbers, self._older)
        del self.numbers[:]

    def end_micro_batch(self) -> None:
        """Note that a backward pass is over."""
        self.numbers.append(_MICRO_BATCH_ENDED)
        here.end_micro_batch()

    def checksum(self) -> int:
        """Return the checksum of all since the last comparison: 31 bits."""
        return zlib.crc32(self.numbers, self._older) >> 1

    def forget(self) -> None:
        """Begin anew, on all ranks alike: they have compared, or what they did is
        dropped."""
        self._older = 0
        del self.numbers[:]
        self.windows += 1

    def recent(self) -> tuple[int, array[int]]:
        """Return the checksum of what is not kept, and the numbers of what is: a
        copy."""
        return self._older, self.numbers[:]

    def describe(self, number: int | None) -> str:
        """Return a noted number in words."""
        if number is None:
            return "nothing more"
        if number == _MICRO_BATCH_ENDED:
            return "the end of a micro-batch"
        kind, unit = self.names[(number - 1) // 2]
        return f"{kind} of {repr(unit) if unit else 'the root'} in {_DIRECTIONS[(number - 1) % 2]}"


class NotedCollective:
    """A unit's collective of one kind, noted before it is made. Called, it says in
    words what this rank waits for.

    Args:
        issued: what notes its calls; those in a forward pass by one number, those in a
            backward pass by the next one. Every rank has to make the same objects in
            the same order.
        made: a unit's communication object.
    """

    __slots__ = (
        "_call",
        "_issued",
        "_number",
        "_only_backward",
        "_recent",
        "_under_way",
        "made",
    )

    def __init__(
        self,
        issued: IssuedCollectives,
        made: CommObject | SecondaryGather,
        kind: str,
        unit: str,
    ) -> None:
        self.made = made
        self._call: Callable[..., Any] = made.__call__  # type: ignore[operator,union-attr]
        self._issued, self._recent = issued, issued.numbers
        # Positions in this list number kinds and units alike on all ranks.
        issued.names.append((kind, unit))
        self._number = self._under_way = 2 * len(issued.names) - 1
        # A window may reduce what it holds behind its last pass; that belongs to
        # backward all the same.
        self._only_backward = kind != "all_gather"

    def for_fsdp2(self) -> Any:
        """Return what FSDP2 takes for a communication object. It is a function, as is
        what that calls: a call of an object with a ``__call__`` takes Python longer
        than all notes do."""
        issue = functools.partial(NotedCollective.issue, self)
        issue.allocate = self.made.allocate  # type: ignore[attr-defined]
        return issue

    def __call__(self) -> str:
        """Return the collective that was issued last, in words."""
        return self._issued.describe(self._under_way)

    def issue(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any = None,
        async_op: bool = False,
    ) -> Deferred | None:
        """Note and make the collective; a gather has no ``op``."""
        # A step comes here a hundred times. What `here.waiting` does is written out:
        # its calls take longer than that.
        in_backward = self._only_backward or self._issued.backward_pass() != -1
        self._under_way = number = self._number + in_backward
        recent = self._recent
        # Beyond so many only their checksum is kept.
        if len(recent) >= _KEPT:
            self._issued.drop_details()
        recent.append(number)
        # Ranks that wait for this one are told what it is doing.
        outer, here.doing = here.doing, self
        here.events += 1
        began = perf_counter()
        try:
            if op is None:
                work = self._call(output_tensor, input_tensor, group, async_op)
            else:
                work = self._call(output_tensor, input_tensor, group, op, async_op)
        finally:
            here.doing = outer
            if outer is None:
                here.waited += perf_counter() - began
        if work is not None:
            work.place = self  # for whoever waits for it
        return work


def first_to_differ(
    issued: IssuedCollectives, by_rank: Mapping[int, tuple[int, Sequence[int]]]
) -> str:
    """Say where the ranks of one partition group first issued something else, and
    which; "" if nowhere.

    Args:
        issued: of any rank, for the names of units.
        by_rank: what :meth:`IssuedCollectives.recent` returned on each.
    """
    # What is not kept any more differs already: there is no first one to name.
    if len({older for older, _ in by_rank.values()}) > 1:
        return f"{ranks_in_words(by_rank)}, more than {_KEPT} collectives ago"
    return went_apart(
        {rank: numbers for rank, (_, numbers) in by_rank.items()}, issued.describe
    )

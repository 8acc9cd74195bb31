"""Memory of the model states, and the smallest shard degree at which they fit the
device.

At shard degree p a device holds ceil(rows / p) x row size elements of a parameter
(FSDP2 pads uneven rows), and as many of its gradient and of each optimizer state; on
top come the parameters that are gathered at one time. MiCS (arXiv 2205.00119) and ZeRO
(arXiv 1910.02054, section 3) do the same arithmetic: the smallest partition group that
fits moves the fewest bytes over the slow links. Only shapes and dtypes are read: a
model on the meta device will do.

Not counted, and left to `planner.memory_headroom`: activations, temporaries of
operators and collectives, the CUDA context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from smp_core.plan.optimizers import OPTIMIZERS, OptimizerStates, planned_states
from smp_core.plan.plan import Plan
from smp_core.plan.shapes import GIB, ParameterShape
from smp_core.plan.units import PlannedUnit

if TYPE_CHECKING:
    from rich.table import Table

    from smp_core.topology import Topology


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device at one shard degree.

    Args:
        shard_degree: ranks that hold one copy of the model states together.
        parameters: parameter shards, in the model's own dtypes or as codes
            (`frozen_storage`).
        gradients: gradient shards of trainable parameters, in the same dtypes.
        partial_sums: sums of the accumulation window, where gradients are reduced in
            another dtype than parameters are stored in, held whole
            (`keep_between_micro_batches="gradients"`), or given to masters.
        optimizer_states: of trainable parameters, in their dtypes; with
            `optimizer_shard="world"` float32 masters and their gradients too (with
            `state_offload="optimizer"` only these).
        buffers: whole on every device.
        gathered: the root unit and twice the largest other unit (the one that computes
            and the one fetched ahead), in the dtype of gathered parameters; all units
            if they stay gathered, their parts of a copy between forward and backward
            (`reshard_after_forward="node"`).
        budget: device memory less headroom, None when it is not known.
    """

    shard_degree: int
    parameters: int
    gradients: int
    partial_sums: int
    optimizer_states: int
    buffers: int
    gathered: int
    budget: int | None = None

    @property
    def model_states(self) -> int:
        """Bytes that stay throughout the step."""
        return (
            self.parameters
            + self.gradients
            + self.partial_sums
            + self.optimizer_states
            + self.buffers
        )

    @property
    def total(self) -> int:
        return self.model_states + self.gathered

    @property
    def fits(self) -> bool:
        return self.budget is None or self.total <= self.budget


def estimate(
    plan: Plan, optimizer: OptimizerStates = OPTIMIZERS["adamw"]
) -> MemoryEstimate:
    """Return what a model holds on one device when it is parallelized by this plan.

    Args:
        optimizer: what it keeps for each trainable parameter.
    """
    knobs = plan.knobs
    dtypes = plan.dtypes
    degree = plan.shard_degree
    over_world = knobs.optimizer_shard == "world" and plan.layout.replicate > 1
    # Alike parameters are counted together, as planners ask thousands of times.
    parameters = gradients = partial_sums = states = 0
    for parameter, of_unit, count in plan.split_shapes.alike:
        # Replicated parameters are whole on every device.
        is_sharded = of_unit and plan.gathers
        elements = count * (
            _shard_elements(parameter, plan) if is_sharded else parameter.elements
        )
        stepped = dtypes.of_stepped(parameter)
        stored = dtypes.of_stored(parameter) if is_sharded else stepped
        reduced = dtypes.of_reduced(parameter)
        # state_offload="all" leaves what FSDP2 shards on the host; sums of gradients
        # are on the device all the same.
        offloaded = knobs.state_offload == "all" and is_sharded
        if not offloaded:
            parameters += (
                plan.stored_bytes(parameter, elements)
                if is_sharded
                else elements * stored.itemsize
            )
        # Frozen parameters have neither gradients nor states.
        if not parameter.trainable:
            continue
        # Gradients that are kept unsharded over micro-batches are whole on each rank.
        unsharded = (
            count * parameter.elements // plan.dealt(parameter)
            if plan.keeps_gradients and is_sharded
            else 0
        )
        if over_world and parameter.shape and (is_sharded or degree == 1):
            # Masters and their gradients are float32 where parameters are half
            # precision; sums take the place of the parameters' gradients.
            part = count * -(-(elements // count) // plan.layout.replicate)
            tensors = 1 if knobs.state_offload else 2 + optimizer.tensors
            states += part * max(parameter.dtype.itemsize, 4) * tensors
            partial_sums += (elements + unsharded) * reduced.itemsize
            continue
        # Gradients and states are as large as shards; sums only count where their dtype
        # is another one.
        gradients += 0 if offloaded else elements * stored.itemsize
        if knobs.state_offload is None:
            states += optimizer.bytes_of(elements, stepped.itemsize)
        if unsharded:
            partial_sums += unsharded * reduced.itemsize
        elif offloaded or reduced != stored:
            partial_sums += elements * reduced.itemsize
    return MemoryEstimate(
        shard_degree=degree,
        parameters=parameters,
        gradients=gradients,
        partial_sums=partial_sums,
        optimizer_states=states,
        buffers=plan.shapes.buffer_bytes,
        gathered=_gathered_bytes(plan),
        budget=budget(plan),
    )


def describe_stages(plan: Plan) -> list[str]:
    """Return lines for people about pipeline stages: the expected bubble; which ranks
    are which, and what they hold."""
    stages, layout = plan.stages, plan.layout
    if stages is None:
        return []
    # Where all stages take alike: each waits while the first micro-batch comes to it
    # and the last one leaves.
    micro_batches = int(plan.knobs.pipeline.microbatches)
    schedule = plan.knobs.pipeline.schedule
    idle = stages.count - 1
    share = idle / (micro_batches * stages.per_stage + idle)
    bubble = (
        f"{schedule} of {micro_batches} micro-batches: "
        f"a bubble of {share:.0%} of a batch's time, if stages take alike"
    )

    # Each stage by its own parameters.
    optimizer = planned_states(plan.knobs.planner.optimizer)
    ranks = layout.world_size // stages.count
    each = []
    for stage in range(stages.count):
        held = estimate(
            replace(plan, shapes=stages.shapes_of(stage, plan.shapes)), optimizer
        ).total
        first, last = stage * ranks, (stage + 1) * ranks - 1
        span = f"rank {first}" if first == last else f"ranks {first}-{last}"
        each.append(f"{stage}: {span}, {_size(held)}")
    # Of many stages the first ones and the last.
    if len(each) > _MOST_STAGES:
        each = [*each[: _MOST_STAGES - 1], "...", each[-1]]
    return [
        bubble,
        f"stages: {'; '.join(each)} on each ({optimizer.name}, without activations)",
    ]


_MOST_STAGES = 8


def _size(n_bytes: int) -> str:
    return (
        f"{n_bytes / GIB:.2f} GiB"
        if n_bytes >= GIB / 10
        else f"{n_bytes / 2**20:.2f} MiB"
    )


@dataclass(frozen=True)
class GradientBytes:
    """Bytes of gradients on one device, by where in a step they are.

    Attributes:
        sums: partial sums of all units, reduced inside the partition group, and of
            replicated parameters.
        held: unsharded gradients that are added up over micro-batches
            (`keep_between_micro_batches="gradients"`).
        of_masters: gradients of float32 masters, which an estimate counts among
            optimizer states.
        root_last: the unsharded gradient of the root's last parameter, which FSDP2
            holds on to while it reduces.
    """

    sums: int
    held: int
    of_masters: int
    root_last: int


def gradient_bytes(plan: Plan) -> GradientBytes:
    """Return the bytes of gradients of one model on one device."""
    sums = held = of_masters = 0
    over_world = plan.knobs.optimizer_shard == "world" and plan.layout.replicate > 1
    # The same cases as in :func:`estimate`, by the time at which they exist.
    for parameter, of_unit, count in plan.split_shapes.alike:
        if not parameter.trainable:
            continue
        is_sharded = of_unit and plan.gathers
        elements = (
            _shard_elements(parameter, plan) if is_sharded else parameter.elements
        )
        reduced = plan.dtypes.of_reduced(parameter).itemsize
        sums += count * elements * reduced
        if plan.keeps_gradients and is_sharded:
            held += count * parameter.elements // plan.dealt(parameter) * reduced
        if over_world and parameter.shape and (is_sharded or plan.shard_degree == 1):
            of_masters += (
                count
                * -(-elements // plan.layout.replicate)
                * max(parameter.dtype.itemsize, 4)
            )
    # FSDP2 holds the last gradient of the root until its reduction is over.
    of_root = next(
        (
            parameters
            for is_root, parameters, _ in plan.split_shapes.alike_units
            if is_root
        ),
        (),
    )
    last = 0
    if of_root and plan.gathers and plan.shard_degree > 1:
        last = of_root[-1].elements * plan.dtypes.of_gathered(of_root[-1]).itemsize
    return GradientBytes(
        sums, held, 0 if plan.knobs.state_offload else of_masters, last
    )


def unit_bytes(
    plan: Plan, unit: PlannedUnit, what: Literal["gathered", "reduced", "computed"]
) -> int:
    """Return the bytes of a unit's full parameters as they are gathered, or in the
    dtypes that are computed with, or of the gradients of its trainable ones as they are
    reduced, padded as FSDP2 pads; of what one tensor rank holds of each layer, and one
    of the ranks that experts are dealt to."""
    total = 0
    for name in unit.parameters:
        parameter = plan.split_shapes.of_name(name)
        # Padded shards of all ranks that divide it.
        elements = (
            _shard_elements(parameter, plan)
            * plan.shard_degree
            // plan.dealt(parameter)
        )
        if what == "gathered" and plan.is_coded(parameter):
            total += plan.stored_bytes(parameter, elements)
        elif what == "gathered":
            total += elements * plan.gathered_itemsize(parameter)
        elif what == "computed":
            total += elements * plan.dtypes.of_gathered(parameter).itemsize
        elif parameter.trainable:
            total += elements * plan.dtypes.of_reduced(parameter).itemsize
    return total


def assumptions(plan: Plan, optimizer: OptimizerStates) -> str:
    """Return what an estimate takes for granted, for tables."""
    where = {
        None: "on the device",
        "optimizer": "on the host",
        "all": "on the host, as parameters and gradients are",
    }
    return f"{optimizer.describe()}, {where[plan.knobs.state_offload]}; activations come on top"


def device_memory(plan: Plan) -> int | None:
    """Return the bytes of a device to plan for: `planner.device_memory_gib`, or what
    the smallest has; None: there is none."""
    asked = plan.knobs.planner.device_memory_gib
    return plan.cluster.device_memory if asked is None else int(asked * GIB)


def budget(plan: Plan) -> int | None:
    """Return the bytes of a device that model states may take; None where there is no
    device memory to plan for."""
    memory = device_memory(plan)
    return (
        None
        if memory is None
        else int(memory * (1 - plan.knobs.planner.memory_headroom))
    )


def plan_table(
    plans: Sequence[Plan], optimizer: OptimizerStates = OPTIMIZERS["adamw"]
) -> Table:
    """Return the estimate of every plan, the first that fits marked.

    Args:
        plans: of one model on one cluster, by rising shard degree
            (:func:`smp_core.engine.auto_degree.plans_of_all_degrees`).
    """
    from rich.table import Table

    first = plans[0]
    topology, memory = first.cluster.topology, device_memory(first)
    count = first.shapes.elements
    title = (
        f"{count / 1e9:.2f} billion parameters on {topology.num_nodes} x {topology.ranks_per_node} ranks, "
        f"{optimizer.name}"
    )
    if memory is not None:
        title += f", budget {_gib(budget(first) or 0)} of {_gib(memory)} GiB"
    table = Table(
        title=title, caption=f"GiB per device; {assumptions(first, optimizer)}"
    )
    columns = ["parameters", "gradients", "optimizer", "gathered", "total"]
    for heading in ["shard degree", "nodes", "replicas", *columns, "fits"]:
        table.add_column(heading, justify="right")
    # A row for each degree.
    chosen = False
    for plan in plans:
        seen = estimate(plan, optimizer)
        verdict = ""
        if memory is not None:
            verdict = "yes" if seen.fits else "no"
            if seen.fits and not chosen:
                verdict, chosen = "yes (auto)", True
        table.add_row(
            str(plan.shard_degree),
            str(max(1, plan.shard_degree // topology.ranks_per_node)),
            str(plan.layout.replicate),
            _gib(seen.parameters + seen.buffers),
            _gib(seen.gradients + seen.partial_sums),
            _gib(seen.optimizer_states),
            _gib(seen.gathered),
            _gib(seen.total),
            verdict,
            style="bold" if verdict == "yes (auto)" else None,
        )
    return table


def fitting(plans: Sequence[Plan], optimizer: OptimizerStates) -> tuple[Plan, str]:
    """Return the first plan whose model states and unsharded units fit alongside the
    headroom.

    Args:
        plans: by rising shard degree.

    Returns:
        the plan, and why it was chosen.

    Raises:
        ValueError: the model is too big for all of them; gives the figures and what to
            change.
    """
    # Without a device's memory there is no limit: one node.
    topology, memory = plans[0].cluster.topology, device_memory(plans[0])
    if memory is None:
        chosen = next(
            (plan for plan in plans if plan.shard_degree >= topology.ranks_per_node),
            plans[-1],
        )
        return chosen, "no device memory to plan for (CPU): the ranks of a node"
    headroom = plans[0].knobs.planner.memory_headroom
    share = f"{_gib(budget(plans[0]) or 0)} GiB (planner.memory_headroom={headroom:g} of {_gib(memory)} GiB)"
    smaller: MemoryEstimate | None = None
    # Rising degrees: the first that fits sends the fewest bytes between nodes.
    for plan in plans:
        seen = estimate(plan, optimizer)
        if seen.fits:
            why = f"needs {_gib(seen.total)} GiB of {share}"
            if smaller is not None:
                why += f"; degree {smaller.shard_degree} would need {_gib(smaller.total)} GiB"
            return plan, f"{why}; {assumptions(plan, optimizer)}"
        smaller = seen
    assert smaller is not None
    raise ValueError(_does_not_fit(smaller, share, topology))


def _shard_elements(parameter: ParameterShape, plan: Plan) -> int:
    """Return the elements of one rank's shard, padded as FSDP2 pads; experts that are
    dealt out are cut evenly."""
    if plan.dealt(parameter) > 1:
        return parameter.elements // plan.shard_degree
    return -(-parameter.shape[0] // plan.shard_degree) * (
        parameter.elements // parameter.shape[0]
    )


def _gathered_bytes(plan: Plan) -> int:
    if not plan.gathers:
        return 0
    degree = plan.shard_degree
    # Units by their kind: roots stay gathered, of the others two are at one time.
    root = largest = total = units = experts = of_experts = 0
    for is_root, parameters, count in plan.split_shapes.alike_units:
        dealt = plan.dealt(parameters[0]) if parameters else 1
        held = sum(
            _shard_elements(each, plan) * plan.gathered_itemsize(each)
            for each in parameters
        )
        size = held * degree // dealt
        if is_root:
            root += count * size
        elif dealt > 1:  # gathered beside the layer that they are in
            # Experts have no parts of a copy that stays between forward and backward.
            experts, of_experts = max(experts, size), of_experts + count * size
        else:
            largest = max(largest, size)
            total = total + count * size
            units = units + count
    kept = plan.knobs.reshard_after_forward
    # Nothing is freed between forward and backward.
    if kept is False:
        return root + total + of_experts
    # With a single unit beside the root there is none to fetch ahead
    in_use = root + (largest + experts) * min(2, units)
    return in_use + (-(-total // kept) if type(kept) is int else 0)


def _does_not_fit(largest: MemoryEstimate, share: str, topology: Topology) -> str:
    assert largest.budget is not None
    message = (
        f"shard_degree='auto': the model needs {_gib(largest.total)} GiB per device even sharded over "
        f"{largest.shard_degree} ranks (states {_gib(largest.model_states)}, gathered units {_gib(largest.gathered)}), "
        f"but only {share} may be used. "
    )
    # More ranks make shards smaller, but not what is gathered.
    room = largest.budget - largest.gathered - largest.buffers
    if room <= 0:
        return (
            message
            + "More ranks do not help, the gathered units are too large: wrap smaller modules (units=...)."
        )
    spread = (largest.model_states - largest.buffers) * largest.shard_degree
    nodes = -(-spread // (room * topology.ranks_per_node))
    return message + (
        f"Use about {nodes} nodes of {topology.ranks_per_node} ranks, a smaller model, parameters in bfloat16, a lower "
        "planner.memory_headroom, or set shard_degree yourself to try all the same."
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2g}" if nbytes < GIB else f"{nbytes / GIB:.1f}"

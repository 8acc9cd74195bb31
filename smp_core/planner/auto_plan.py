"""`plan="auto"`: all knobs that were not given, planned for the model, machines and
batch of the run that starts.

The search is that of `smp plan` (:mod:`smp_core.planner.search`), over configurations
that a run can take up by itself: not those that change what a step returns
(`chunked_cross_entropy`) or which optimizers can step (`optimizer_shard`), and degrees
that change how many ranks read samples only where `plan.global_batch` says what has to
stay. Pipeline stages that were given get their schedule and micro-batches; how many
there are is not chosen, since not every training loop can go through them. The model is
copied without its values and traced on rank 0
(:func:`smp_core.planner.trace.trace_built`), which tells the others what it came to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from smp_core.cluster import degrees_of
from smp_core.config import AutoPlan, SmpConfig
from smp_core.plan import (
    GIB,
    OPTIMIZERS,
    Cluster,
    Entry,
    Precision,
    dtype_of,
    planned_states,
)
from smp_core.planner.candidate import Candidate
from smp_core.planner.devices import DEVICES, ETHERNET_GBIT, MACHINES, Device
from smp_core.planner.hardware import EXAMPLES, Hardware
from smp_core.planner.search import Found, search
from smp_core.planner.search_space import COUNT, MICRO_BATCH
from smp_core.planner.trace import trace_built
from smp_core.planner.trace_meter import tensors_in
from smp_core.planner.workload import Workload

OPEN = (
    "shard_degree",
    "activations",
    "keep_between_micro_batches",
    "reshard_after_forward",
)
_WITH_GLOBAL_BATCH = ("context_parallel_degree", "tensor_parallel_degree")
# Of one rank; only the order of plans depends on them.
_CPU_FLOPS, _CPU_BANDWIDTH = 1e11, 2e10
_WITHOUT = (
    "or write shard_degree='auto' in its place, which looks at model states alone"
)


@dataclass(frozen=True)
class RunningStep:
    """The step that a trainer is going to take.

    Attributes:
        device: of this rank.
        entry: what a step calls (:func:`smp_core.plan.units.plan_units`).
        precision: what the trainer's precision means.
        accumulated: micro-batches of an optimizer step.
        optimizers: where they are known.
    """

    device: torch.device
    entry: Entry
    precision: Precision
    accumulated: int
    optimizers: tuple[torch.optim.Optimizer, ...] = ()


@dataclass(frozen=True)
class Decision:
    """The outcome of a plan, for all ranks: knobs and their values, and what is said
    about them."""

    knobs: Mapping[str, Any]
    why: str


def plan_run(
    model: nn.Module, asked: SmpConfig, cluster: Cluster, step: RunningStep
) -> Decision:
    """Plan all open knobs of a run.

    Args:
        model: not sharded; only read.

    Raises:
        ValueError: a model that cannot be traced, a batch that is not known, machines
            that are not known, or nothing fits; says what to write.
    """
    assert asked.plan is not None
    sequence, micro_batch = _batch(model, asked.plan)
    # Which knobs are open.
    open_knobs = OPEN + (_WITH_GLOBAL_BATCH if asked.plan.global_batch else ())
    if asked.pipeline_parallel_degree > 1:
        open_knobs += ("pipeline",)
    if asked.expert_parallel_degree == "auto":
        open_knobs += ("expert_parallel_degree",)
    fixed = {
        knob: getattr(asked, knob)
        for knob in SmpConfig.knobs()
        if knob not in open_knobs
        or (knob in asked.given and getattr(asked, knob) != "auto")
    }
    # The machines and the batch.
    split = math.prod(degrees_of(asked).values())
    samples = asked.plan.global_batch or micro_batch * step.accumulated * (
        cluster.topology.world_size // split
    )
    hardware = hardware_of_run(asked, cluster, step.device)
    # The planner knows optimizers by their bytes of states; any name with as many will
    # do.
    kept = planned_states(asked.planner.optimizer, step.optimizers).bytes_of(1, 4)
    optimizer = next(
        name for name, states in OPTIMIZERS.items() if states.bytes_of(1, 4) == kept
    )
    work = Workload(sequence, samples, "trainer", optimizer)
    # The model.
    try:
        computed = (
            dtype_of(asked.param_dtype)
            if asked.param_dtype != "auto"
            else step.precision.param_dtype
        )
        traced = trace_built(model, asked, sequence, computed, step.entry)
    except ValueError as error:
        raise ValueError(f"plan='auto': {error}; {_WITHOUT}") from None
    # Blocks would be recomputed twice, and the model's own mode is in no figure.
    if any(shapes.checkpoints_itself for shapes in traced.shapes.values()):
        raise ValueError(
            "plan='auto' chooses what is recomputed, and the model's own gradient checkpointing is on; switch it off "
            "(model.gradient_checkpointing_disable(), TrainingArguments(gradient_checkpointing=False))"
        )
    # The search.
    machines = replace(cluster, device_memory=int(hardware.device.memory_gib * GIB))
    # The loader's batch and accumulation are the user's, and stay.
    counts = {MICRO_BATCH: micro_batch, COUNT: step.accumulated}
    found = search(
        traced,
        hardware,
        work,
        {**fixed, **counts},
        cluster=machines,
        precision=step.precision,
    )
    if not found.ranked:
        raise ValueError(
            f"plan='auto': {found.shortfall} with a micro-batch of {micro_batch}; write state_offload='optimizer', "
            "give the data loader a smaller batch, or start more ranks"
        )
    chosen = found.ranked[0]
    knobs = {knob: chosen.asked.asked(knob) for knob in open_knobs if knob not in fixed}
    return Decision(knobs, _said(found, knobs, hardware, work))


def _batch(model: nn.Module, plan: AutoPlan) -> tuple[int, int]:
    """Return tokens of a sample and samples of a micro-batch."""
    # What is given in `plan` wins over the example.
    given = tensors_in(getattr(model, "example_input_array", None))
    sizes = [each.shape[:2] for each in given if each.ndim > 1]
    micro_batch, sequence = sizes[0] if sizes else (None, None)
    sequence, micro_batch = plan.sequence or sequence, plan.micro_batch or micro_batch
    if sequence is None or micro_batch is None:
        raise ValueError(
            "plan='auto' has to know the batch: write plan={'sequence': tokens of a sample, 'micro_batch': samples of "
            f"the data loader's batch}}, or give the model an example_input_array [samples, tokens]; {_WITHOUT}"
        )
    return sequence, micro_batch


def hardware_of_run(
    asked: SmpConfig, cluster: Cluster, device: torch.device
) -> Hardware:
    """Return the machines that a run is on, as a planner sees them.

    Raises:
        ValueError: a device that is in no table, or `plan.cluster` of another size;
            says what to write.
    """
    assert asked.plan is not None
    topology = cluster.topology
    nodes, ranks = topology.num_nodes, topology.ranks_per_node
    if asked.plan.cluster is not None:
        found = Hardware.parse(asked.plan.cluster)
        if (found.nodes, found.ranks_per_node) != (nodes, ranks):
            raise ValueError(
                f"plan.cluster={asked.plan.cluster!r} has {found.nodes} x {found.ranks_per_node} devices, and this run "
                f"{nodes} x {ranks}; write {nodes}x{ranks}:..., or leave it out"
            )
    elif device.type == "cpu":
        # Ranks on a CPU share the memory of their host.
        memory = cluster.host_memory / ranks / GIB
        cpu = Device(
            "CPU",
            memory,
            _CPU_BANDWIDTH,
            _CPU_BANDWIDTH,
            _CPU_BANDWIDTH,
            "assumed",
            _CPU_FLOPS,
        )
        found = Hardware(nodes, ranks, cpu, ETHERNET_GBIT)
    else:
        found = _of_device(
            torch.cuda.get_device_name(device),
            (cluster.device_memory or 0) / GIB,
            nodes,
            ranks,
        )
    memory_gib = asked.planner.device_memory_gib
    if memory_gib is not None:
        found = replace(found, device=replace(found.device, memory_gib=memory_gib))
    return replace(found, measured=cluster.links, host_gib=cluster.host_memory / GIB)


def _of_device(name: str, memory_gib: float, nodes: int, ranks: int) -> Hardware:
    """Return machines of a device by its name and its memory, with the network of the
    machines that it is sold in."""
    # Several rows may have the words of a name; the one with the nearest memory is
    # meant, and of these the most exact name.
    words = name.upper().replace("-", " ").split()
    alike = {
        row: each
        for row, each in DEVICES.items()
        if set(each.name.upper().split()) <= set(words)
    }
    if not alike:
        raise ValueError(
            f"plan='auto' does not know the device {name!r}; write plan={{'cluster': ...}} with one of "
            f"`smp plan`, as {EXAMPLES}; {_WITHOUT}"
        )
    row = min(
        alike,
        key=lambda row: (
            abs(alike[row].memory_gib - memory_gib),
            -len(alike[row].name),
        ),
    )
    gbit = next(
        (machine.gbit for machine in MACHINES.values() if machine.device == row),
        ETHERNET_GBIT,
    )
    return Hardware(nodes, ranks, replace(alike[row], memory_gib=memory_gib), gbit)


def _said(
    found: Found, knobs: Mapping[str, Any], hardware: Hardware, work: Workload
) -> str:
    """Return what was chosen, from what, and what is next, in one line."""
    chosen = found.ranked[0]
    line = (
        f"{chosen.time.total:.3g} s a step and {chosen.memory.total / GIB:.2g} of {chosen.memory.capacity / GIB:.3g} "
        f"GiB planned for {work.global_batch} x {work.sequence} tokens on {hardware.describe()}, the best of "
        f"{len(found.ranked)} that fit of {found.considered}"
    )
    # The second best is told where it differs in a knob that was open.
    others = (each for each in found.ranked[1:] if _differences(each, chosen, knobs))
    second = next(others, None)
    if second is None:
        return line
    return f"{line}; next: {_differences(second, chosen, knobs)}, {second.time.total / chosen.time.total - 1:+.1%}"


def _differences(other: Candidate, chosen: Candidate, knobs: Mapping[str, Any]) -> str:
    differing = [
        knob for knob in knobs if other.asked.asked(knob) != chosen.asked.asked(knob)
    ]
    return ", ".join(
        f"{knob}={other.knobs.get(knob, other.asked.asked(knob))}" for knob in differing
    )

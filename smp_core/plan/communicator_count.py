"""The communicators of a plan, as :meth:`smp_core.cluster.SmpMesh.build` and the
model's parts make them."""

from __future__ import annotations

from functools import lru_cache

from smp_core.cluster import (
    GRADIENTS,
    GROUPS,
    PARTITION,
    Axes,
    Axis,
    Layout,
    Ranks,
    stages,
)
from smp_core.plan.plan import Plan
from smp_core.topology import Topology


def communicators(plan: Plan) -> list[int]:
    """Return the ranks of each group that rank 0's device talks in with others; NCCL
    takes memory for each of them."""
    knobs = plan.knobs
    keep = plan.knobs.reshard_after_forward
    topology = plan.cluster.topology
    # Two-stage collectives have a group inside the node and one across.
    in_two: list[Axes] = [PARTITION] if plan.hierarchical else []
    if knobs.collectives.hierarchical:
        in_two.append((Axis.REPLICATE,))
        if any(plan.replicated_parameters) and plan.layout.size(*PARTITION) > 1:
            in_two.append(GRADIENTS)
    found = list(
        _of_layout(
            plan.layout, topology, tuple(in_two), keep if type(keep) is int else None
        )
    )
    experts = knobs.expert_parallel_degree
    if isinstance(experts, int) and experts > 1:
        found += _of_experts(
            plan.layout, topology, experts, in_stages=plan.experts_in_stages
        )
    if plan.stages is not None and plan.stages.tied and plan.stages.count > 2:
        found.append(2)  # the first and the last stage
    if knobs.collectives.separate_reduce_scatter_group:
        found.append(plan.layout.size(*PARTITION))
    return sorted(ranks for ranks in found if ranks > 1)


@lru_cache(maxsize=1024)
def _of_layout(
    layout: Layout, topology: Topology, in_two: tuple[Axes, ...], keep: int | None
) -> tuple[int, ...]:
    # One communicator for each set of ranks, however many axes it stands for.
    groups = {
        tuple(range(layout.world_size)),
        *(layout.ranks(0, *axes) for axes in GROUPS),
    }
    for axes in in_two:
        groups |= _two_stages(layout.ranks(0, *axes), topology)
    if keep is not None:
        groups.add(layout.ranks(0, *PARTITION)[:keep])
    twins = [layout.replicate] if layout.replicas_are_alone else []
    if layout.pipeline > 1:
        twins.append(layout.pipeline)  # gradients go back in a group of their own
    return (*map(len, groups), *twins)


def _of_experts(
    layout: Layout, topology: Topology, degree: int, *, in_stages: bool
) -> list[int]:
    """Return those beside the layout's: of the expert ranks, of those with the same
    experts, and of the tokens."""
    # Consecutive ranks divide experts; those with the same experts lie a degree apart.
    partition = layout.ranks(0, *PARTITION)
    dividing, same = partition[:degree], partition[::degree]
    known = {layout.ranks(0, *axes) for axes in GROUPS} | {
        tuple(range(layout.world_size))
    }
    beside = [len(group) for group in (dividing, same) if group not in known]
    of_tokens = [
        degree,
        *map(len, _two_stages(dividing, topology) if in_stages else ()),
    ]
    return [*beside, *of_tokens]


def _two_stages(group: Ranks, topology: Topology) -> set[Ranks]:
    both = stages([group], topology)
    return set() if both is None else {both[0][0], both[1][0]}

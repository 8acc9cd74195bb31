"""Rules for the layout: how large a partition group is, whether collectives run in two stages, and how many ranks hold
a copy of gathered parameters between forward and backward."""

from __future__ import annotations

from smp_core.cluster import DEGREES, INNER, Layout, degrees_of, inner_degree
from smp_core.plan import Draft
from smp_core.tensor_parallel import require_tensor_degree
from smp_core.topology import Topology


def settle_layout(draft: Draft, topology: Topology) -> Layout:
    """Resolve ``shard_degree`` ("auto" is a number by now), ``collectives.hierarchical`` and ``reshard_after_forward``.

    Raises:
        ValueError: a degree that does not divide the world or straddles nodes, a context degree that does not divide
            the shard degree, ``collectives.hierarchical=True`` for a group that has only one stage.
    """
    asked, inner = draft.knobs.shard_degree, inner_degree(draft.knobs)
    stages = draft.knobs.pipeline_parallel_degree
    world, topology = topology.world_size, topology.of_stage(stages)
    if draft.knobs.tensor_parallel_degree > 1:
        require_tensor_degree(draft.knobs, topology)
    groups = topology.of_groups(inner)
    try:
        degree = groups.resolve_shard_degree(asked)
    except ValueError as error:
        split = " and ".join(DEGREES[axis] for axis in INNER)
        counted = f" (each {inner} ranks of {split} count as one)" if inner > 1 else ""
        counted += f" (the ranks of one of {stages} pipeline stages)" if stages > 1 else ""
        raise ValueError(f"{error}{counted}") from None
    if degree != asked:
        counted = "ranks" if inner == 1 else f"groups of {inner} tensor ranks"
        draft.settle("shard_degree", degree, f"{asked!r} of {groups.num_nodes} x {groups.ranks_per_node} {counted}")
    layout = Layout.of_world(world, degree, degrees_of(draft.knobs))
    _settle_hierarchical(draft, degree, groups)
    _settle_secondary_degree(draft, degree, groups)
    return layout


def _settle_hierarchical(draft: Draft, degree: int, topology: Topology) -> None:
    asked, k, nodes = draft.knobs.collectives.hierarchical, topology.ranks_per_node, topology.num_nodes
    several = topology.has_two_stages(degree) or topology.replicas_share_nodes(degree)
    if asked == "auto":
        if topology.has_two_stages(degree):
            why = f"the partition group spans {degree // k} nodes with {k} ranks each"
        elif topology.replicas_share_nodes(degree):
            why = f"the replication group spans {nodes} nodes with {k // degree} ranks each"
        elif degree > k:
            why = "one rank per node: there is only one stage"
        else:
            why = "the partition group lies inside one node"
        draft.settle("collectives.hierarchical", several, why)
    elif asked and not several:
        raise ValueError(
            "collectives.hierarchical=True needs a partition or replication group that spans nodes with more than one "
            f"rank on each, but with shard_degree={degree} on nodes of {k} ranks there is none; write "
            "collectives={'hierarchical': 'auto'} or False, or a larger shard_degree"
        )


def _settle_secondary_degree(draft: Draft, degree: int, topology: Topology) -> None:
    """Resolve how many ranks hold a copy after forward: an integer below the shard degree, True or False."""
    asked, k = draft.knobs.reshard_after_forward, topology.ranks_per_node
    if isinstance(asked, bool):
        return
    if asked == "auto":
        kept = draft.knobs.keep_between_micro_batches
        draft.settle("reshard_after_forward", kept == "shards", f"keep_between_micro_batches={kept!r}")
        return
    if asked == "node":
        if degree <= k:
            draft.settle("reshard_after_forward", True, "the partition group lies inside one node already")
        elif k == 1:
            draft.settle("reshard_after_forward", False, "one rank per node: its copy is a whole one")
        else:
            draft.settle("reshard_after_forward", k, f"a copy sharded over the {k} ranks of each node")
        return
    if degree % asked:
        allowed = ", ".join(["true", "false", *(str(n) for n in range(2, degree + 1) if degree % n == 0)])
        raise ValueError(f"reshard_after_forward={asked} does not divide shard_degree={degree}; allowed: {allowed}")
    if asked == degree:
        draft.settle("reshard_after_forward", True, "as many ranks as the partition group has")

"""Rules for what is gathered and reduced, how often, and compressed how. A knob that can save nothing here (nothing to
gather, no link between nodes to spare) is set to the value that is in effect."""

from __future__ import annotations

from smp_core.cluster import PARTITION, Axis, Layout
from smp_core.codecs import CodeName
from smp_core.plan import Draft, keeps_parameters
from smp_core.topology import Topology


def settle_compression(draft: Draft, layout: Layout, topology: Topology) -> CodeName | None:
    """Resolve the compressed payloads and error feedback.

    Returns:
        the payload of sums across replicas, None where they are sent as they are.
    """
    asked = draft.knobs.compression
    degree = layout.size(*PARTITION)
    gathers_cross = topology.spans_nodes(layout.ranks(0, *PARTITION))
    sums_cross = topology.spans_nodes(layout.ranks(0, Axis.REPLICATE))
    if asked.gather is not None:
        if degree == 1:
            draft.drop("compression.gather", None, "shard_degree=1: nothing is gathered")
        elif not gathers_cross and not asked.gather_inside_nodes:
            why = "the partition group lies inside one node; gather_inside_nodes=true encodes there too"
            draft.drop("compression.gather", None, why)
    if asked.reduce == "bf16" and not sums_cross:
        several = layout.replicate > 1
        why = "replicas are on one node" if several else "there is one replica: no sums across"
        draft.drop("compression.reduce", None, why)
    if asked.reduce_codes is not None and not gathers_cross and not sums_cross:
        draft.drop("compression.reduce", None, "no gradients cross between nodes")
    settled = draft.knobs.compression
    codes = settled.reduce_codes
    if asked.error_feedback == "auto" or (asked.error_feedback and codes is None):
        why = "gradients travel in codes" if codes else "no gradients travel in codes"
        draft.settle("compression.error_feedback", codes is not None, why)
    if not sums_cross:
        return None
    return codes or ("bfloat16" if settled.reduce == "bf16" else None)


def settle_gathering(draft: Draft, layout: Layout, cast_forward_inputs: bool, masters: bool) -> bool:
    """Resolve what is gathered and how often gradients are reduced.

    Returns:
        whether units are sharded by FSDP2. A partition group of one has nothing to gather, and FSDP2 would copy every
        parameter for each use; it is still needed where it casts parameters to another dtype, and where it brings them
        from the host.
    """
    if layout.size(*PARTITION) > 1:
        return True
    knobs = draft.knobs
    casts = knobs.param_dtype is not None and cast_forward_inputs
    kept = "parameters" if keeps_parameters(knobs) else "shards"
    if knobs.keep_between_micro_batches == "gradients":
        why = "shard_degree=1: nothing is reduced inside a partition group"
        draft.settle("keep_between_micro_batches", kept, why)
    if casts or masters or knobs.state_offload == "all":
        return True
    why = "shard_degree=1: parameters are whole, nothing is gathered"
    draft.settle("param_dtype", None, why)
    draft.settle("reshard_after_forward", False, why)
    if draft.knobs.keep_between_micro_batches != "shards":
        draft.settle("keep_between_micro_batches", "shards", why)
    return False


def settle_optimizer_shard(draft: Draft, layout: Layout) -> None:
    """Resolve ``optimizer_shard="world"`` where there is one replica."""
    if draft.knobs.optimizer_shard == "world" and layout.replicate == 1:
        why = "there is one replica: optimizer states are sharded over all ranks already"
        draft.settle("optimizer_shard", "shard", why)


def settle_head_groups(draft: Draft, layout: Layout, device: str) -> None:
    """Resolve in how many groups of heads keys and values are sent between context ranks."""
    knob, asked = "collectives.context_head_groups", draft.knobs.collectives.context_head_groups
    if layout.context == 1:
        (draft.settle if asked in ("auto", 1) else draft.drop)(knob, 1, "context_parallel_degree=1")
    elif asked == "auto":
        on_cpu = device == "cpu"
        why = "on CPU nothing runs behind anything" if on_cpu else "one group's gather behind the other's attention"
        draft.settle(knob, 1 if on_cpu else 2, why)

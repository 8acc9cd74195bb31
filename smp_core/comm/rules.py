"""Rules for what is sent: compressed how, over which stages, and how many units are in
flight. A knob that can save nothing here (nothing to gather, no link between nodes to
spare) is set to the value that is in effect.

``collectives.hierarchical="auto"``, with measured links (``SMP_LINKS``): the predicted
times of a model's units are added up (:mod:`smp_core.cluster.links`), for the ways its
gradients and parameters go: gathers and reductions of a partition group that spans
nodes, or the sum across replicas that share nodes. Without a measurement two stages,
which send fewer bytes over the slow link, stay.

``forward_prefetch``, ``backward_prefetch``, ``reduce_scatter_buffers`` of
``collectives``: while a message of n bytes is on its way, the link of latency L and
bandwidth B has room for L x B bytes, so that ``ceil(L x B / n)`` units in flight keep
it busy, at least one and at most ``MOST_IN_FLIGHT``, since each takes memory. n is the
message of the median unit: the shard of one rank, as it travels. The link is what was
measured for gathers (prefetching) or reductions (buffers): between nodes where the
partition group spans them in two stages, over all ranks where it does so in one, inside
a node otherwise. Without a measurement the depth is FSDP2's own.

Newer torch versions have more of FSDP2's options than others; what this torch, this
device or the group's communication objects cannot do is refused by name.
"""

from __future__ import annotations

import fnmatch
import math
import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch

from smp_core.cluster import (
    LINKS_VARIABLE,
    PARTITION,
    PLACES,
    Axis,
    Collectives,
    Layout,
    LinkFit,
    Links,
    Place,
    gather_seconds,
    reduce_seconds,
    replica_sum_seconds,
)
from smp_core.codecs import CodeName
from smp_core.config import SmpConfig
from smp_core.plan import (
    Cluster,
    Finding,
    ModelDraft,
    Shapes,
    Subject,
    compression,
    dtype_of,
)
from smp_core.torch_facts import FSDP_METHODS

MOST_IN_FLIGHT = 4

# What a knob's "auto" is without a measurement: FSDP2's own behaviour.
_OWN = {"forward_prefetch": 0, "backward_prefetch": 1, "reduce_scatter_buffers": 1}


class Communication(Subject):
    """Collectives and their compression, as one of the subjects."""

    name = "communication"
    page = "sharding.md"
    knobs = ("compression", "collectives")

    def settle(self, draft: ModelDraft) -> None:
        """Resolve what is sent, in which form and over which stages, and how much is in
        flight.

        Raises:
            ValueError: an option that this torch, device or configuration does not
                have.
        """
        # First what is sent, because the size of messages decides what comes after.
        asked = draft.knobs.compression
        if asked.gather or asked.reduce:
            draft.replica_payload = _settle_compression(draft)
        # Off: everything is sent as it is, and there is no error to feed back.
        elif asked.error_feedback:
            draft.settle(
                "compression.error_feedback", False, "no gradients travel in codes"
            )
        if draft.cluster.links is not None:
            settle_stages(draft)
        settle_prefetch(draft)
        # Options of axes that this layout does not have take no effect.
        if draft.layout.context == 1:
            head_groups = draft.knobs.collectives.context_head_groups
            set_to = draft.settle if head_groups in ("auto", 1) else draft.drop
            set_to("collectives.context_head_groups", 1, "context_parallel_degree=1")
        if (
            draft.knobs.expert_parallel_degree == 1
            and draft.knobs.collectives.expert_transport != "all_to_all"
        ):
            draft.drop(
                "collectives.expert_transport", "all_to_all", "expert_parallel_degree=1"
            )

    def machine(self) -> Iterator[Finding]:
        """Look whether measured links are known."""
        stored = os.environ.get(LINKS_VARIABLE)
        if stored and not Path(stored).is_file():
            fix = f"unset {LINKS_VARIABLE}, or measure again"
            yield Finding(
                "links", "problem", f"{LINKS_VARIABLE}={stored}: no such file", fix
            )
        elif stored:
            yield Finding("links", "ok", stored)
        else:
            fix = "on all nodes: torchrun ... -m smp_core.cli topology --measure --store links.json"
            yield Finding("links", "note", "not measured", fix)


COMMUNICATION = Communication()


def _settle_compression(draft: ModelDraft) -> CodeName | None:
    """Resolve the compressed payloads and error feedback.

    Returns:
        the payload of sums across replicas, None where they are sent as they are.
    """
    asked = draft.knobs.compression
    # The partition and replicas are counted in groups of ranks that count as one.
    layout = draft.of_groups
    topology = draft.groups.topology
    degree = layout.size(*PARTITION)
    gathers_cross = topology.spans_nodes(layout.ranks(0, *PARTITION))
    sums_cross = topology.spans_nodes(layout.ranks(0, Axis.REPLICATE))
    # Gathers.
    if asked.gather is not None:
        if degree == 1:
            draft.drop(
                "compression.gather", None, "shard_degree=1: nothing is gathered"
            )
        elif not gathers_cross and not asked.gather_inside_nodes:
            why = "the partition group lies inside one node; gather_inside_nodes=true encodes there too"
            draft.drop("compression.gather", None, why)
    if draft.knobs.compression.gather is not None:
        # A typo would send in codes what was to stay exact.
        names = [each.name for each in draft.shapes.parameters]
        for glob in asked.gather_exclude:
            if not fnmatch.filter(names, glob):
                draft.warnings.append(
                    f"compression.gather_exclude has {glob!r}, which matches no parameter; there are for "
                    f"example {', '.join(names[:3])}"
                )
    # Sums of gradients.
    if asked.reduce == "bf16" and not sums_cross:
        several = layout.replicate > 1
        why = (
            "replicas are on one node"
            if several
            else "there is one replica: no sums across"
        )
        draft.drop("compression.reduce", None, why)
    if asked.reduce_codes is not None and not gathers_cross and not sums_cross:
        draft.drop("compression.reduce", None, "no gradients cross between nodes")
    # Error feedback, which only codes need.
    settled = draft.knobs.compression
    codes = settled.reduce_codes
    if asked.error_feedback == "auto" or (asked.error_feedback and codes is None):
        why = "gradients travel in codes" if codes else "no gradients travel in codes"
        draft.settle("compression.error_feedback", codes is not None, why)
    if not sums_cross:
        return None
    return codes or ("bfloat16" if settled.reduce == "bf16" else None)


def units_in_flight(link: LinkFit, message_bytes: float) -> int:
    """Return how many messages of this size cover latency x bandwidth of the link:
    between 1 and ``MOST_IN_FLIGHT``."""
    if message_bytes <= 0:
        return 1
    return min(
        max(math.ceil(link.latency * link.bandwidth / message_bytes), 1), MOST_IN_FLIGHT
    )


def settle_stages(draft: ModelDraft) -> None:
    """Resolve what ``collectives.hierarchical="auto"`` means for this model, where
    links were measured."""
    knobs = draft.knobs
    shapes = draft.shapes
    cluster = draft.groups
    links = cluster.links
    if links is None or links.flat is None:
        return
    degree = draft.of_groups.size(*PARTITION)
    of_partition = cluster.topology.has_two_stages(degree)
    several = of_partition or cluster.topology.replicas_share_nodes(degree)
    # Only "auto" is decided here, and only where there are two stages to choose.
    if (
        knobs.asked("collectives.hierarchical") != "auto"
        or not several
        or not shapes.unit_elements
    ):
        return
    # Seconds of all units, in one stage and in two.
    gathered = dtype_of(knobs.param_dtype) or shapes.dtype
    reduced = dtype_of(knobs.reduce_dtype) or gathered
    one = two = 0.0
    for elements in shapes.unit_elements:
        if of_partition:
            found = _partition_seconds(
                links, degree, knobs, elements, gathered, reduced
            )
        else:
            compressed = compression(draft.replica_payload, reduced, elements)
            found = [
                replica_sum_seconds(
                    links, degree, elements * reduced.itemsize, compressed
                )
            ]
        one += sum(in_one for in_one, _ in found)
        two += sum(in_two for _, in_two in found)
    what = (
        "gathers and sums of a micro-batch" if of_partition else "sums across replicas"
    )
    why = f"by {LINKS_VARIABLE}, {what} take {1e3 * one:.3g} ms in one stage and {1e3 * two:.3g} ms in two"
    draft.settle("collectives.hierarchical", two <= one, why)


def _partition_seconds(
    links: Links,
    degree: int,
    knobs: SmpConfig,
    elements: int,
    gathered: torch.dtype,
    reduced: torch.dtype,
) -> list[tuple[float, float]]:
    """Return a unit's gathers over the partition group, and its reduction: (in one
    stage, in two) of each."""
    compressed = compression(knobs.compression.gather, gathered, elements)
    gather = gather_seconds(links, degree, elements * gathered.itemsize, compressed)
    compressed = compression(knobs.compression.reduce_codes, reduced, elements)
    sums = reduce_seconds(links, degree, elements * reduced.itemsize, compressed)
    # Backward gathers over the whole group again only where nothing is kept after
    # forward.
    return [gather, *([gather] if knobs.reshard_after_forward is True else []), sums]


def settle_prefetch(draft: ModelDraft) -> None:
    """Resolve how many units are in flight, and FSDP2's other options about
    communication. What was asked for by value is checked first; "auto" follows.

    Raises:
        ValueError: an option that this torch, device or configuration does not have.
    """
    shapes = draft.shapes
    layout = draft.of_groups
    cluster = draft.groups
    degree = layout.size(*PARTITION)
    # Options that were asked for by value. FSDP2's own values need no method of it, and
    # are always allowed.
    for knob in dict.fromkeys((*_OWN, *FSDP_METHODS)):
        asked = getattr(draft.knobs.collectives, knob)
        if asked == "auto" or asked is False or (knob in _OWN and asked == _OWN[knob]):
            continue
        if degree == 1:
            why = "shard_degree=1: nothing is gathered or reduced in a partition group"
            draft.settle(f"collectives.{knob}", _OWN.get(knob, False), why)
            continue
        # Gathers ahead are in every torch that is supported, and on every device.
        if knob not in FSDP_METHODS:
            continue
        missing = missing_option(draft.knobs, knob, layout, cluster)
        if missing:
            raise ValueError(
                f"collectives.{knob}={asked!r}: {missing}; write collectives={{{knob!r}: "
                f"{1 if knob in _OWN else 'false'}}}"
            )
    if draft.knobs.collectives.symmetric_memory:
        why = "torch's own collectives in the partition group, which the meter does not count"
        draft.settle("collectives.symmetric_memory", True, why)
    # Those that are left open.
    for knob in _OWN:
        if getattr(draft.knobs.collectives, knob) == "auto":
            draft.settle(
                f"collectives.{knob}",
                *_by_links(knob, draft.knobs, shapes, layout, cluster),
            )


def _by_links(
    knob: str, knobs: SmpConfig, shapes: Shapes, layout: Layout, cluster: Cluster
) -> tuple[int, str]:
    topology, degree = cluster.topology, layout.size(*PARTITION)
    if degree == 1:
        return _OWN[knob], "shard_degree=1: nothing is gathered"
    between = topology.spans_nodes(layout.ranks(0, *PARTITION))
    # Without units there is no message to compare with.
    measured = None
    if cluster.links is not None and shapes.unit_elements:
        measured = _link_of(knobs, between, degree, cluster, cluster.links)
    if measured is None:
        nodes, k = topology.num_nodes, topology.ranks_per_node
        return _OWN[
            knob
        ], f"no measured links of {nodes} x {k} ranks ({LINKS_VARIABLE})"
    # The link, and the message of the median unit on it.
    place, link = measured[0], measured[1].all_gather
    elements = statistics.median_low(shapes.unit_elements)
    dtype = dtype_of(knobs.param_dtype) or shapes.dtype
    payload: CodeName | None = knobs.compression.gather
    # Reductions have another link measurement, dtype and payload than gathers.
    if knob == "reduce_scatter_buffers":
        missing = missing_option(knobs, knob, layout, cluster)
        if missing:
            return _OWN[knob], missing
        link = measured[1].reduce_scatter
        dtype = dtype_of(knobs.reduce_dtype) or dtype
        payload = knobs.compression.reduce_codes
    # A rank's share of the unit; between nodes as small as it is compressed.
    message = (
        elements
        * dtype.itemsize
        * compression(payload if between else None, dtype, elements)
        / degree
    )
    count = units_in_flight(link, message)
    at_most = f"; at most {MOST_IN_FLIGHT}" if count == MOST_IN_FLIGHT else ""
    return count, (
        f"by {LINKS_VARIABLE}, {link.latency * link.bandwidth / 1024:.0f} KiB are on their way {PLACES[place]}, a "
        f"unit's message has {message / 1024:.0f} KiB{at_most}"
    )


def _link_of(
    knobs: SmpConfig, between: bool, degree: int, cluster: Cluster, links: Links
) -> tuple[Place, Collectives] | None:
    """Return the slowest link that a gather over the partition group uses, where it was
    measured."""
    # Two stages use the links inside and between nodes, of which the latter is slower.
    in_stages = knobs.collectives.hierarchical and cluster.topology.has_two_stages(
        degree
    )
    place: Place = "inter"
    if not between:
        place = "intra"
    elif not in_stages and links.flat is not None:
        place = "flat"
    measured: Collectives | None = getattr(links, place)
    return None if measured is None else (place, measured)


def missing_option(
    knobs: SmpConfig, knob: str, layout: Layout, cluster: Cluster
) -> str | None:
    """Return why FSDP2's option can do nothing here; None: it can."""
    # First what torch lacks, then the device, then what our own collectives do
    # differently.
    method, degree = FSDP_METHODS[knob], layout.size(*PARTITION)
    in_stages = knobs.collectives.hierarchical and cluster.topology.has_two_stages(
        degree
    )
    if method not in cluster.fsdp_methods:
        return f"torch {torch.__version__} has no FSDPModule.{method}"
    if cluster.device != "cuda":
        return f"it is about streams and NCCL, and the device is {cluster.device}, where reductions are synchronous"
    if knob == "separate_reduce_scatter_group":
        if in_stages:
            return "collectives in two stages have groups of their own; collectives.hierarchical=false has one stage"
        if knobs.compression.reduce_codes and cluster.topology.spans_nodes(
            layout.ranks(0, *PARTITION)
        ):
            return "compression.reduce does not reduce over FSDP2's group"
    if knob == "symmetric_memory":
        if in_stages:
            return (
                "collectives in two stages are torch-smp's own, not NCCL's symmetric ones; "
                "collectives.hierarchical=false has one"
            )
        if type(knobs.reshard_after_forward) is int:
            return (
                f"reshard_after_forward={knobs.reshard_after_forward} keeps copies "
                "that gathers of torch-smp's own make"
            )
        for other in ("gather", "reduce_codes"):
            if getattr(knobs.compression, other):
                return f"compression.{other.removesuffix('_codes')} sends payloads of torch-smp's own"
        if knobs.collectives.reduce_scatter_buffers not in (1, "auto"):
            return "torch keeps one buffer of symmetric memory; collectives.reduce_scatter_buffers has to be 1"
    return None

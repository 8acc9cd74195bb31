"""Rules for what is sent: compressed how, over which stages. A knob that can save nothing here (nothing to gather, no
link between nodes to spare) is set to the value that is in effect."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from smp_core.cluster import LINKS_VARIABLE, PARTITION, Axis
from smp_core.codecs import CodeName
from smp_core.comm.link_rules import settle_prefetch, settle_stages
from smp_core.plan import Finding, ModelDraft, Subject


class Communication(Subject):
    """Collectives and their compression, as one of the subjects."""

    name = "communication"
    page = "sharding.md"
    knobs = ("compression", "collectives")

    def settle(self, draft: ModelDraft) -> None:
        """Resolve what is sent, in which form and over which stages, and how much is in flight.

        Raises:
            ValueError: an option that this torch, device or configuration does not have.
        """
        draft.replica_payload = _settle_compression(draft)
        settle_stages(draft)
        settle_prefetch(draft)

    def machine(self) -> Iterator[Finding]:
        """Look whether measured links are known."""
        stored = os.environ.get(LINKS_VARIABLE)
        if stored and not Path(stored).is_file():
            fix = f"unset {LINKS_VARIABLE}, or measure again"
            yield Finding("links", "problem", f"{LINKS_VARIABLE}={stored}: no such file", fix)
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
    asked, layout, topology = draft.knobs.compression, draft.of_groups, draft.groups.topology
    degree = layout.size(*PARTITION)
    gathers_cross = topology.spans_nodes(layout.ranks(0, *PARTITION))
    sums_cross = topology.spans_nodes(layout.ranks(0, Axis.REPLICATE))
    # Gathers.
    if asked.gather is not None:
        if degree == 1:
            draft.drop("compression.gather", None, "shard_degree=1: nothing is gathered")
        elif not gathers_cross and not asked.gather_inside_nodes:
            why = "the partition group lies inside one node; gather_inside_nodes=true encodes there too"
            draft.drop("compression.gather", None, why)
    # Sums of gradients.
    if asked.reduce == "bf16" and not sums_cross:
        several = layout.replicate > 1
        why = "replicas are on one node" if several else "there is one replica: no sums across"
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

"""Rules for tensor parallelism: which degrees there are, and what it does not go
together with yet.

A tensor group lies inside a node and counts as one rank for everything that is decided
about partition and replication groups (:meth:`smp_core.topology.Topology.of_groups`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from smp_core.config import Clash, SmpConfig, TensorParallel
from smp_core.plan import (
    FOREIGN_FP8,
    SYMMETRIC_MEMORY,
    ModelDraft,
    Subject,
    asked_for,
    came_sharded,
)
from smp_core.topology import Topology, divisors, listed


def require_tensor_degree(knobs: SmpConfig, topology: Topology) -> None:
    """Check that tensor groups fill nodes, or that larger ones were asked for.

    Raises:
        ValueError: a degree that does not divide the ranks of a node; says which do.
    """
    degree = knobs.tensor_parallel_degree
    k = topology.ranks_per_node
    world = topology.world_size
    # Inside of nodes by default, as every block sends its activations; several whole
    # nodes if that was asked for.
    fits = k % degree == 0
    if fits or (
        knobs.tensor_parallel.across_nodes and degree % k == 0 and world % degree == 0
    ):
        return
    allowed = listed(divisors(k))
    stages = knobs.pipeline_parallel_degree
    of_stage = (
        f" that a pipeline stage has (pipeline_parallel_degree={stages})"
        if stages > 1
        else ""
    )
    message = (
        f"tensor_parallel_degree={degree} does not divide the {k} rank{'s' * (k > 1)} of a node{of_stage}, inside of "
        f"which the parts of a layer belong; allowed: {allowed}"
    )
    # The degree would fit if it may span nodes: the price is named with it.
    if degree % k == 0 and world % degree == 0:
        message += (
            "; or write tensor_parallel={'across_nodes': true}, and every block sends its activations between nodes: "
            f"about {8 * (degree - 1) / degree:.3g} times their bytes in each micro-batch"
        )
    raise ValueError(message)


def _infers_of_fp8(draft: ModelDraft) -> str | None:
    infers = draft.knobs.tensor_parallel.plan == "infer" and draft.knobs.fp8 is not None
    return "tensor_parallel.plan='infer' and fp8" if infers else None


def _multiplies_fp8_in_pieces(draft: ModelDraft) -> str | None:
    overlap = draft.knobs.tensor_parallel.overlap
    in_pieces = overlap != "sums" and draft.knobs.fp8 is not None
    return (
        f"tensor_parallel.overlap={overlap!r}: FP8 layers are not multiplied in pieces"
        if in_pieces
        else None
    )


def _keeps_fused_products(draft: ModelDraft) -> str | None:
    knobs = draft.knobs
    if knobs.tensor_parallel.overlap != "fused" or "selective" not in _words(
        knobs.activations.checkpoint
    ):
        return None
    return "tensor_parallel.overlap='fused': 'selective' keeps what products return, and these return gathered tokens"


def _words(checkpoint: str | Mapping[str, str]) -> Collection[str]:
    return (checkpoint,) if isinstance(checkpoint, str) else checkpoint.values()


class TensorParallelism(Subject):
    """Tensor parallelism, as one of the subjects."""

    name = "tensor parallelism"
    page = "tensor-parallelism.md"
    knobs = ("tensor_parallel_degree", "tensor_parallel")
    optional = True
    part = "tensor"
    apart = (
        Clash(
            "compilation",
            "`compile.fullgraph`: split layers are not compiled",
            asked_for("compile.fullgraph"),
            "write compile={'fullgraph': false}: split layers are not compiled",
        ),
        FOREIGN_FP8,
        Clash(
            "fp8",
            "`tensor_parallel.plan='infer'`",
            _infers_of_fp8,
            "write globs for tensor_parallel.plan, or leave it out",
        ),
        Clash(
            "fp8",
            "products in pieces (`tensor_parallel.overlap`)",
            _multiplies_fp8_in_pieces,
            "leave fp8 out, or tensor_parallel={'overlap': 'sums'}",
        ),
        Clash(
            "activations",
            "`'selective'` recomputation of fused products (`tensor_parallel.overlap='fused'`)",
            _keeps_fused_products,
            "write activations='full', or tensor_parallel={'overlap': 'sums'}",
        ),
        SYMMETRIC_MEMORY,
        Clash(
            "sharding",
            "models that came sharded",
            came_sharded,
            "load it without distributed_config, and torch-smp splits and shards it",
        ),
    )

    def settle(self, draft: ModelDraft) -> None:
        """Refuse what it has not been shown to be exact with, and an overlap that
        cannot be; warn of settings without tensor ranks."""
        # Without tensor ranks its settings have no effect, which is said at the start.
        asked = draft.knobs
        if asked.tensor_parallel_degree == 1:
            draft.drop("tensor_parallel", TensorParallel(), "tensor_parallel_degree=1")
            return
        # Products in pieces need split tokens, and "fused" needs devices that share
        # memory.
        overlap = asked.tensor_parallel.overlap
        missing = None if overlap == "sums" else _missing_for_overlap(draft)
        if missing:
            raise ValueError(
                f"tensor_parallel.overlap={overlap!r}: {missing}, or tensor_parallel={{'overlap': 'sums'}}"
            )
        self.require_together(
            draft, f"tensor_parallel_degree={asked.tensor_parallel_degree}"
        )


TENSOR_PARALLELISM = TensorParallelism()


def _missing_for_overlap(draft: ModelDraft) -> str | None:
    """Return why products cannot be made in pieces here, and what to write; None: they
    can."""
    knobs, cluster = draft.knobs, draft.cluster
    if not knobs.tensor_parallel.sequence_parallel:
        return (
            "only tokens are gathered in pieces, and they stay whole; "
            "write tensor_parallel={'sequence_parallel': true}"
        )
    if knobs.tensor_parallel.overlap == "fused":
        instead = "write tensor_parallel={'overlap': 'pieces'}, which collectives of any kind can do"
        if cluster.device != "cuda":
            return f"torch's fused products are for CUDA, and the device is {cluster.device}; {instead}"
        if knobs.tensor_parallel_degree > cluster.topology.ranks_per_node:
            return f"symmetric memory is shared inside a node, and a tensor group is larger; {instead}"
    return None

"""Rules for tensor parallelism: which degrees there are, and what it does not go together with yet.

A tensor group lies inside a node and counts as one rank for everything that is decided about partition and replication
groups (:meth:`smp_core.topology.Topology.of_groups`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from smp_core.config import SmpConfig, TensorParallel
from smp_core.plan import Cluster, Draft, Shapes
from smp_core.topology import Topology


def require_tensor_degree(knobs: SmpConfig, topology: Topology) -> None:
    """Check that tensor groups fill nodes, or that larger ones were asked for.

    Raises:
        ValueError: a degree that does not divide the ranks of a node; says which do.
    """
    degree, k, world = knobs.tensor_parallel_degree, topology.ranks_per_node, topology.world_size
    fits = k % degree == 0
    if fits or (knobs.tensor_parallel.across_nodes and degree % k == 0 and world % degree == 0):
        return
    allowed = ", ".join(str(n) for n in range(1, k + 1) if k % n == 0)
    stages = knobs.pipeline_parallel_degree
    of_stage = f" that a pipeline stage has (pipeline_parallel_degree={stages})" if stages > 1 else ""
    message = (
        f"tensor_parallel_degree={degree} does not divide the {k} rank{'s' * (k > 1)} of a node{of_stage}, inside of "
        f"which the parts of a layer belong; allowed: {allowed}"
    )
    if degree % k == 0 and world % degree == 0:
        message += (
            "; or write tensor_parallel={'across_nodes': true}, and every block sends its activations between nodes: "
            f"about {8 * (degree - 1) / degree:.3g} times their bytes in each micro-batch"
        )
    raise ValueError(message)


def require_known_combination(draft: Draft, shapes: Shapes, given: bool, cluster: Cluster) -> None:
    """Refuse what tensor parallelism has not been shown to be exact with, and an overlap that cannot be; warn of
    settings without tensor ranks.

    Raises:
        ValueError: names every such knob, its value, and what to write.
    """
    asked = draft.knobs
    if asked.tensor_parallel_degree == 1:
        if asked.tensor_parallel != TensorParallel():
            draft.drop("tensor_parallel", TensorParallel(), "tensor_parallel_degree=1")
        return
    overlap = asked.tensor_parallel.overlap
    missing = None if overlap == "sums" else _missing_for_overlap(asked, cluster)
    if missing:
        raise ValueError(f"tensor_parallel.overlap={overlap!r}: {missing}, or tensor_parallel={{'overlap': 'sums'}}")
    found = [*_unknown_knobs(asked), *_unknown_models(shapes, given)]
    if found:
        lines = "\n".join(f"- {what}; {instead}" for what, instead in found)
        raise ValueError(
            f"tensor_parallel_degree={asked.tensor_parallel_degree} is not built yet together with\n{lines}"
        )


def _missing_for_overlap(knobs: SmpConfig, cluster: Cluster) -> str | None:
    """Return why products cannot be made in pieces here, and what to write; None: they can."""
    if not knobs.tensor_parallel.sequence_parallel:
        return (
            "only tokens are gathered in pieces, and they stay whole; write tensor_parallel={'sequence_parallel': true}"
        )
    if knobs.fp8 is not None:
        return "FP8 layers are not multiplied in pieces; leave fp8 out"
    if knobs.tensor_parallel.overlap == "fused":
        if "selective" in _words(knobs.activations.checkpoint):
            return "'selective' keeps what products return, and these return gathered tokens; write activations='full'"
        instead = "write tensor_parallel={'overlap': 'pieces'}, which collectives of any kind can do"
        if cluster.device != "cuda":
            return f"torch's fused products are for CUDA, and the device is {cluster.device}; {instead}"
        if knobs.tensor_parallel_degree > cluster.topology.ranks_per_node:
            return f"symmetric memory is shared inside a node, and a tensor group is larger; {instead}"
    return None


def _words(checkpoint: str | Mapping[str, str]) -> Collection[str]:
    return (checkpoint,) if isinstance(checkpoint, str) else checkpoint.values()


def _unknown_knobs(knobs: SmpConfig) -> Iterator[tuple[str, str]]:
    if knobs.compile is not None and knobs.compile.fullgraph:
        yield "compile.fullgraph=True", "write compile={'fullgraph': false}: split layers are not compiled"
    if knobs.fp8 is not None and knobs.fp8.backend != "native":
        yield f"fp8.backend={knobs.fp8.backend!r}", "write fp8={'backend': 'native'}"
    if knobs.tensor_parallel.plan == "infer" and knobs.fp8 is not None:
        yield "tensor_parallel.plan='infer' and fp8", "write globs for tensor_parallel.plan, or leave it out"
    if knobs.collectives.symmetric_memory:
        yield "collectives.symmetric_memory=True", "leave it out"


def _unknown_models(shapes: Shapes, given: bool) -> Iterator[tuple[str, str]]:
    if given:
        yield (
            f"a model that came sharded ({shapes.kind})",
            "load it without distributed_config, and torch-smp splits and shards it",
        )

"""Bytes that leave rank 0, or the first rank of a pipeline stage, in a step, by kind of
collective and class of link, from shapes alone.

Kinds, classes and the arithmetic of rings are those of
:class:`smp_core.comm.meter.CommMeter`, so that a plan, a dry run and a training can be
compared number by number. A unit of a partition group of P = M K ranks, K on each of M
nodes, with F bytes of full parameters (or of gradients, in the dtype that they are
reduced in):

    one stage     (P - 1) / P F to the right neighbour
    two stages    (M - 1) / M F / K between nodes, (K - 1) / K F inside

Experts that are dealt to D ranks are in one stage over the P / D ranks with the same
ones. Sums across replicas are of what a rank holds of a unit. Compressed payloads are
not counted here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from smp_core.plan import Plan, PlannedUnit, Stages, unit_bytes
from smp_core.planner.context_bytes import exchanges, keys_and_values
from smp_core.planner.expert_bytes import TokenBytes, token_bytes
from smp_core.planner.fp8_figures import amax_bytes
from smp_core.planner.model_trace import ModelTrace
from smp_core.planner.stage_part import token_ranks
from smp_core.planner.step_memory import recomputation

# Gathers and sums of a block's tensor ranks that are made again in backward, by way of
# recomputation.
_AGAIN: Mapping[str, tuple[int, int]] = {
    "none": (0, 0),
    "selective": (2, 1),
    "full": (2, 1),
}


def sent_bytes(
    plan: Plan,
    trace: ModelTrace | None,
    micro_batch: int,
    count: int,
    tokens: int,
    stage: int = 0,
) -> dict[str, float]:
    """Return the bytes of a plan by "kind/link", as in "all_gather/inter".

    Args:
        trace: of the model; None: bytes of context, tensor and expert ranks are left
            out, and messages of stages.
        micro_batch, count: samples of a micro-batch on each rank, and micro-batches of
            a step.
        tokens: of a whole sequence.
        stage: the pipeline stage whose first rank sends.
    """
    # A stage has its own units, so that a plan of it alone is counted.
    sent = _Sent(plan.of_stage(stage), stage, count)
    sent.units()
    if trace is not None:
        sent.traced(trace, micro_batch, tokens)
    return {name: n_bytes for name, n_bytes in sorted(sent.bytes.items()) if n_bytes}


class _Sent:
    """A running count of bytes by kind and link."""

    def __init__(self, plan: Plan, stage: int, count: int) -> None:
        self.plan, self.stage, self.count = plan, stage, count
        # By "kind/link", as the meter of a training names them.
        self.bytes: defaultdict[str, float] = defaultdict(float)
        self.per_node = plan.cluster.topology.ranks_per_node
        self.shard = plan.shard_degree
        # From a rank to its neighbour in the partition group.
        self.stride = plan.layout.tensor

    def units(self) -> None:
        """Count what parameters and gradients send."""
        for unit in self.plan.sharded_units:
            self._gathers(unit)
            self._reductions(unit)
        for names in self.plan.replicated_parameters:
            self._replicated(names)
        # Scales of FP8 are agreed on once in a step.
        stages = 1 if self.plan.stages is None else self.plan.stages.count
        self._ring(
            "amax_all_reduce",
            self.plan.layout.world_size // stages,
            1,
            2 * amax_bytes(self.plan),
        )

    def traced(self, trace: ModelTrace, micro_batch: int, tokens: int) -> None:
        """Count what activations send, of so many samples of a micro-batch and tokens
        of a whole sequence."""
        stages, held = self.plan.stages, tokens / self.plan.layout.context
        # Keys and values, layers' inputs, and rows are those of this stage's blocks.
        blocks = trace.blocks if stages is None else sum(stages.blocks_of(self.stage))
        inputs = trace.block["full"].at(micro_batch, held).kept * self.count
        if self.plan.layout.context > 1:
            whole = keys_and_values(
                self.plan, trace.block["none"].at(micro_batch, held)
            )
            self._context(blocks * self.count * whole)
        if self.plan.layout.tensor > 1:
            is_split = trace.rest_degree(self.plan.layout.tensor) > 1
            self._tensor(blocks, inputs, micro_batch * held * self.count, is_split)
        one = token_bytes(self.plan, trace, micro_batch, held)
        if one is not None:
            self._tokens(blocks * self.count, one)
        if stages is not None:
            self._messages(inputs, stages)

    def _gathers(self, unit: PlannedUnit) -> None:
        """Count gathers of a unit: in forward, and in backward where it was freed."""
        # Once in a window where parameters stay gathered, else for each micro-batch.
        full = unit_bytes(self.plan, unit, "gathered")
        times = 1 if self.plan.keeps_parameters else self.count
        dealt = self._dealt(unit)
        self._over_partition("all_gather", full * times, dealt)
        kept = self.plan.knobs.reshard_after_forward
        if unit.is_root or kept is False:
            return
        # A copy that neighbours hold between forward and backward.
        if type(kept) is int and dealt == 1:
            self._ring("all_gather", kept, self.stride, full * times)
        else:
            self._over_partition("all_gather", full * times, dealt)

    def _reductions(self, unit: PlannedUnit) -> None:
        """Count reductions inside the partition group, and the sum across replicas."""
        full = unit_bytes(self.plan, unit, "reduced")
        dealt = self._dealt(unit)
        self._over_partition(
            "reduce_scatter",
            full * (1 if self.plan.keeps_gradients else self.count),
            dealt,
        )
        # Across replicas each rank has one shard of the sum, once in a step.
        replicas, stride = self.plan.layout.replicate, self.shard * self.stride
        held = full * dealt / self.shard
        # Gradients are scattered to the replicas, each of which steps its part and
        # gives it to the others.
        if self.plan.knobs.optimizer_shard == "world":
            self._in_stages("all_reduce", replicas, stride, held, 1)
            stepped = unit_bytes(self.plan, unit, "computed") * dealt / self.shard
            self._in_stages("all_gather", replicas, stride, stepped, 1)
        else:
            self._over_replicas(replicas, stride, held)

    def _replicated(self, names: tuple[str, ...]) -> None:
        """Count the sum of parameters that every rank holds whole, over all ranks whose
        gradients are added up."""
        found = [self.plan.split_shapes.of_name(name) for name in names]
        trainable = [each for each in found if each.trainable]
        full = sum(
            each.elements * self.plan.dtypes.of_reduced(each).itemsize
            for each in trainable
        )
        ranks = self.plan.layout.replicate * self.shard
        if self.plan.knobs.optimizer_shard == "world" and self.shard == 1:
            stepped = sum(
                each.elements * self.plan.dtypes.of_gathered(each).itemsize
                for each in trainable
            )
            self._in_stages("all_reduce", ranks, self.stride, full, 1)
            self._in_stages("all_gather", ranks, self.stride, stepped, 1)
        else:
            self._over_replicas(ranks, self.stride, full)

    def _context(self, passes: float) -> None:
        """Count gathers of keys and values, in forward, where that is made again, and
        in backward, and the sum of their gradients; ``passes``: bytes of all keys and
        values."""
        degree, (gathered, summed) = self.plan.layout.context, exchanges(self.plan)
        self._ring("context_gather", degree, self.stride, gathered * passes)
        self._ring("context_reduce", degree, self.stride, summed * passes)

    def _tokens(self, passes: int, one: TokenBytes) -> None:
        """Count rows to the ranks of their experts and back, of a balanced router,
        forward and backward, and the numbers of rows, in so many passes of blocks; what
        is computed again sends nothing."""
        # The part that stays on the rank, or on the node, is not sent.
        inside, across = (one.ranks - 1) / one.ranks, (one.nodes - 1) / one.nodes
        sent = 2 * one.across + one.beside + one.weights + one.counts_across
        self._add(
            "expert_dispatch",
            "intra",
            passes * inside * (2 * one.inside + one.counts_inside),
        )
        self._add("expert_dispatch", "inter", passes * across * sent)
        self._add("expert_combine", "intra", passes * inside * 2 * one.inside)
        self._add("expert_combine", "inter", passes * across * 2 * one.across)

    def _tensor(
        self, blocks: int, inputs: float, rows: float, splits_words: bool
    ) -> None:
        """Count what the two split products of each block send, in forward, where that
        is made again, and in backward; and gradients of vectors among split tokens,
        embedding, head and the loss.

        Args:
            inputs: bytes of a block's in a step.
            rows: tokens of a step.
            splits_words: embedding, head and loss are split, too.
        """
        degree, stages = self.plan.layout.tensor, self.plan.stages
        gathers, scatters = _AGAIN[recomputation(self.plan)]
        is_first = self.stage == 0
        is_last = stages is None or self.stage == stages.count - 1
        if self.plan.knobs.tensor_parallel.sequence_parallel:
            # Tokens are split before the first block, and joined behind the last.
            self._ring(
                "tensor_all_gather",
                degree,
                1,
                ((4 + gathers) * blocks + is_first + is_last) * inputs,
            )
            self._ring(
                "tensor_reduce_scatter", degree, 1, (4 + scatters) * blocks * inputs
            )
            self._ring(
                "tensor_all_reduce",
                degree,
                1,
                2 * self.count * self._vectors(inputs / rows),
            )
        else:
            self._ring(
                "tensor_all_reduce", degree, 1, 2 * (4 + scatters) * blocks * inputs
            )
        if splits_words:
            # The embedding's outputs, the gradient of the head's inputs; four float32
            # numbers of each token's logits.
            self._ring(
                "tensor_all_reduce",
                degree,
                1,
                2 * (is_first * inputs + is_last * (inputs + 4 * 4 * rows)),
            )

    def _messages(self, inputs: float, stages: Stages) -> None:
        """Count activations to the next stage, and their gradients to the one before,
        of each chunk."""
        # The outermost chunks have a neighbour on one side only.
        chunks = stages.chunks(self.stage)
        forward = sum(chunk < stages.n_chunks - 1 for chunk in chunks)
        backward = sum(chunk > 0 for chunk in chunks)
        # All messages count as between nodes as soon as the last stage begins on another
        # node than the first.
        ranks = self.plan.cluster.topology.world_size // stages.count
        link = "inter" if ranks * (stages.count - 1) >= self.per_node else "intra"
        self._add(
            "pipeline", link, (forward + backward) * inputs / token_ranks(self.plan)
        )

    def _vectors(self, row_bytes: float) -> float:
        """Return the bytes of vectors in blocks that are as wide as a row of the
        activations, or narrower: norms, and biases of row layers."""
        # Tokens are split between blocks, so that each tensor rank has the gradient of
        # its own tokens alone.
        inside = [unit for unit in self.plan.shapes.units.units if not unit.is_root]
        found = [
            self.plan.shapes.of_name(name)
            for unit in inside
            for name in unit.parameters
        ]
        whole = [
            each for each in found if len(each.shape) == 1 and each.split_dim is None
        ]
        sizes = [
            each.elements * self.plan.dtypes.of_gathered(each).itemsize
            for each in whole
        ]
        return float(sum(size for size in sizes if size <= row_bytes))

    def _dealt(self, unit: PlannedUnit) -> int:
        """Return over how many ranks a unit's experts are dealt."""
        return (
            self.plan.dealt(self.plan.shapes.of_name(unit.parameters[0]))
            if unit.parameters
            else 1
        )

    def _over_partition(self, kind: str, full: float, dealt: int) -> None:
        # Experts go in one stage over the ranks that hold the same ones; all else in
        # two where the plan says so.
        inside = max(self.per_node // self.stride, 1)
        if dealt > 1:
            self._ring(kind, self.shard // dealt, self.stride * dealt, full)
        elif self.plan.hierarchical:
            self._add(kind, "inter", (self.shard - inside) / self.shard * full / inside)
            self._add(kind, "intra", (inside - 1) / inside * full)
        else:
            self._ring(kind, self.shard, self.stride, full)

    def _over_replicas(self, ranks: int, stride: int, held: float) -> None:
        inside = self._on_node(ranks, stride)
        if 1 < inside < ranks and self.plan.knobs.collectives.hierarchical:
            self._in_stages("all_reduce", ranks, stride, held, 2)
        else:
            self._ring("all_reduce", ranks, stride, 2 * held)

    def _in_stages(
        self, kind: str, ranks: int, stride: int, held: float, ways: int
    ) -> None:
        """A scatter or a gather inside nodes and between them, or (two ways) both."""
        if ranks == 1:
            return
        inside = self._on_node(ranks, stride)
        if not self.plan.knobs.collectives.hierarchical and 1 < inside < ranks:
            inside = 1
        nodes = ranks // inside
        self._add(kind, "intra", ways * (inside - 1) / inside * held)
        if nodes > 1:
            self._add(kind, "inter", ways * (nodes - 1) / nodes * held / inside)

    def _on_node(self, ranks: int, stride: int) -> int:
        return max(min(self.per_node // stride, ranks), 1)

    def _ring(self, kind: str, ranks: int, stride: int, full: float) -> None:
        if ranks > 1:
            self._add(
                kind,
                "intra" if stride < self.per_node else "inter",
                (ranks - 1) / ranks * full,
            )

    def _add(self, kind: str, link: str, n_bytes: float) -> None:
        self.bytes[f"{kind}/{link}"] += n_bytes

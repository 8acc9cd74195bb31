"""The time of a step, for a plan and a traced model: computing from the trace,
collectives by latency and bandwidth.

A block computes products / (peak x share) + attention / (peak x share) + moved /
(bandwidth x share) seconds, forward and backward each, with what is computed again. What
products themselves read and write is moved, too: a kernel multiplies nothing while its
first operands come and its last results go, so that small products are the slower ones;
products of experts take at least the time of reading all their matrices. Meanwhile the
next block's parameters are gathered and the last one's gradients reduced, over links of
:mod:`smp_core.cluster.links`; the longer of both counts, and a share of the shorter
(`exposed`), because collectives take part of the device. The root's gather and
reduction, and the collectives of tensor and context ranks, are waited for. Sums across
replicas run behind the last micro-batch's backward. Then the optimizer reads and writes
its states.

The constants are in :mod:`smp_core.planner.fitted`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import IntEnum

from smp_core.cluster import Collectives, Kind
from smp_core.plan import Plan, compression
from smp_core.planner.context_bytes import copies, exchanges, keys_and_values
from smp_core.planner.expert_bytes import dealt_elements, expert_degree, token_bytes
from smp_core.planner.fp8_figures import amax_bytes, block_figures, gathered_bytes
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_trace import Figures, ModelTrace
from smp_core.planner.step_memory import recomputation

PHASES = ("forward", "backward")

TIME_PARTS = (
    "compute",
    "gathers",
    "replicas",
    "tensor",
    "context",
    "optimizer",
    "copies",
    "experts",
    "pipeline",
)

STEP_BYTES = 28
"""AdamW reads parameter, gradient and two states and writes all but the gradient,
float32 each."""

HOST_BANDWIDTH = 150e9
"""Bytes per second that the memory of a node's host reads and writes; its ranks share
it."""


class Place(IntEnum):
    """A place among a step's micro-batches: its first, those between, its last, or one
    that is both."""

    FIRST, BETWEEN, LAST, ONLY = range(4)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step: of computing, and of what is waited for beside it;
    with pipeline stages of the one that is busy longest, which waits for the others,
    and for messages, in ``pipeline``. ``experts``: of tokens that go to their ranks and
    back.

    Attributes:
        stage: that one; over_mean: how much longer it is busy than the mean stage, as a
            share.
    """

    compute: float
    gathers: float
    replicas: float
    tensor: float
    context: float
    optimizer: float
    copies: float
    experts: float = 0.0
    pipeline: float = 0.0
    stage: int = 0
    over_mean: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, part) for part in TIME_PARTS)


_COUNTED = (
    *("products", "attention", "experts", "weights"),
    *("moved", "operands", "matrices"),
)


def computing_seconds(
    figures: Figures, phase: str, tensor: int, hardware: Hardware, context: int = 1
) -> float:
    """Return the seconds of "forward" or "backward" of what ``tensor`` ranks share:
    products, attention (the queries of one context rank meet the keys of all), grouped
    products, which take at least the reading of all experts' matrices, and bytes that
    products and other operators move."""
    # Tensor ranks share all of it: heads, columns, and the tokens between them.
    products, attention, experts, weights, *moved = (
        getattr(figures, f"{phase}_{what}") / tensor for what in _COUNTED
    )
    device, fitted = hardware.device, hardware.fitted
    of_products = device.flops * fitted.share_of("products", device.name)
    of_attention = device.flops * fitted.share_of("attention", device.name)
    bandwidth = device.hbm * fitted.moving
    # A few rows for each expert do not keep its products busy: reading the matrices
    # takes longer then.
    by_experts = max(experts / of_products, weights / bandwidth)
    return (
        products / of_products
        + by_experts
        + context * attention / of_attention
        + sum(moved) / bandwidth
    )


def computed_seconds(
    trace: ModelTrace,
    hardware: Hardware,
    mode: str,
    micro_batch: int,
    tensor: int,
    context: int,
    held: float,
    experts: int = 1,
) -> tuple[float, float]:
    """Return the seconds that a block, whose experts are dealt to so many ranks,
    computes forward and backward, and what is left of the model, at the least."""
    block = trace.block[mode].at(micro_batch, held).of_experts_over(experts)
    rest = trace.rest[mode].at(micro_batch, held)
    degree = trace.rest_degree(tensor)
    of_rest = [computing_seconds(rest, phase, degree, hardware) for phase in PHASES]
    return sum(pass_seconds(block, tensor, context, hardware)), sum(of_rest)


def pass_seconds(
    figures: Figures, tensor: int, context: int, hardware: Hardware
) -> tuple[float, float]:
    """Return the seconds of forward and of backward, split over ``tensor`` and
    ``context`` ranks."""
    forward, backward = (
        computing_seconds(figures, phase, tensor, hardware, context) for phase in PHASES
    )
    # Launching a block's kernels takes the host a while, however little they do.
    return max(forward, hardware.fitted.launching), max(
        backward, hardware.fitted.launching
    )


def exposed_seconds(computing: float, communicating: float, exposed: float) -> float:
    """Return what communicating during computation adds to it."""
    return max(communicating - computing, 0.0) + exposed * min(computing, communicating)


class StepModel:
    """The times of one plan's pieces; :meth:`step` puts them together.

    Args:
        tokens: of a whole sequence.
    """

    def __init__(
        self, plan: Plan, trace: ModelTrace, hardware: Hardware, tokens: int
    ) -> None:
        self.plan = plan
        self.trace = trace
        self.hardware = hardware
        self.tokens = tokens
        self.fitted, self.mode = hardware.fitted, recomputation(plan)
        self.collectives = _GroupCollectives(plan, hardware)
        self.experts = expert_degree(plan)
        # Only trained parameters have gradients to reduce and states to step.
        first = plan.shapes.first_trained
        gathered = plan.dtypes.of_gathered(first)
        reduced = plan.dtypes.of_reduced(first)
        self.stored, self.reduced = gathered.itemsize, reduced.itemsize
        # Elements of a block and of the root, as one tensor rank holds them, and those
        # of them that are trained.
        of_blocks = trace.block_elements(plan.layout.tensor)
        of_root = plan.split_shapes.elements - trace.blocks * of_blocks
        trained = [
            share * n
            for share, n in zip(trace.trained, (of_blocks, of_root), strict=True)
        ]
        # The share of all elements, weighed by how many are inside and outside of
        # blocks.
        self.trained = (
            trace.blocks * trained[0] + trained[1]
        ) / plan.split_shapes.elements
        # What is left of bytes between nodes, where alone compression acts, on payloads
        # of one unit.
        codes, elements = plan.knobs.compression, max(int(of_blocks), 1)
        spare_gather = compression(codes.gather, gathered, elements)
        spare_sum = compression(codes.reduce_codes, reduced, elements)
        self.spare_hop = compression(plan.replica_payload, reduced, elements)
        # Each list has the seconds of a block and of the root.
        self.gather, self.sum, self.gather_again = self._of_group(
            of_blocks, of_root, spare_gather, spare_sum
        )
        self.hop = [
            self.collectives.replicas(n * self.reduced, self.spare_hop) for n in trained
        ]
        # FP8 scales are agreed on once in a step, over all ranks.
        self.agreeing = self.collectives.everywhere(amax_bytes(plan))
        # What a block's forward and backward run beside, by the micro-batch's place in
        # the step.
        self.opens = [
            place in (Place.FIRST, Place.ONLY) or not plan.keeps_parameters
            for place in Place
        ]
        self.closes = [
            place in (Place.LAST, Place.ONLY) or not plan.keeps_gradients
            for place in Place
        ]
        both = zip(self.opens, self.closes, strict=True)
        backward = [
            opens * self.gather_again + closes * self.sum[0] for opens, closes in both
        ]
        self.behind = ([opens * self.gather[0] for opens in self.opens], backward)

    def _of_group(
        self, of_blocks: float, of_root: float, spare_gather: float, spare_sum: float
    ) -> tuple[list[float], list[float], float]:
        """Return the seconds of gathers and of reductions in a partition group, of a
        block and of the root, and of a block's gather in backward.

        Args:
            of_blocks, of_root: elements.
            spare_gather, spare_sum: what compression leaves of their bytes.
        """
        plan, trace, of = self.plan, self.trace, self.collectives
        # Parameters that every rank holds whole are neither gathered nor reduced.
        if not plan.gathers:
            return [0.0, 0.0], [0.0, 0.0], 0.0
        # Experts that are dealt to ranks are units of their own, gathered over fewer
        # ranks.
        whole, dealt = dealt_elements(plan, trace)
        of_block, of_experts = gathered_bytes(plan, trace)
        inside, outside = trace.trained
        gather = [
            of.over("all_gather", n, spare_gather)
            for n in (of_block, of_root * self.stored)
        ]
        summed = (of_blocks - whole) * inside, of_root * outside
        reduce = [
            of.over("reduce_scatter", n * self.reduced, spare_sum) for n in summed
        ]
        # What backward gathers again: everything as in forward, a node's own copy, or
        # nothing.
        kept, again = plan.knobs.reshard_after_forward, gather[0]
        if type(kept) is int:  # from the node's own copy
            again = of.over("all_gather", of_block, degree=min(of.degree, of.per_node))
        if self.experts > 1:
            exactly = of.same_experts("all_gather", of_experts)
            gather[0] += exactly
            again += exactly
            reduce[0] += of.same_experts(
                "reduce_scatter", dealt * inside * self.reduced
            )
        return gather, reduce, 0.0 if kept is False else again

    def step(self, micro_batch: int, count: int) -> StepTime:
        """Return the time of a step of ``count`` micro-batches of ``micro_batch``
        samples on each rank."""
        # Computing: all blocks, and what comes before and behind them.
        held = self.tokens / self.plan.layout.context
        rest = self.trace.rest[self.mode].at(micro_batch, held)
        block = block_figures(
            self.plan, self.trace, self.hardware, self.mode, micro_batch, held
        )
        forward, backward = self._computing(block, self.plan.layout.tensor)
        of_rests = self._computing(
            rest, self.trace.rest_degree(self.plan.layout.tensor)
        )
        # The rest runs once for each micro-batch.
        of_rest = sum(of_rests)
        if self.plan.knobs.chunked_cross_entropy is not None:
            of_rest += of_rests[0]  # logits are made again in backward
        compute = count * (self.trace.blocks * (forward + backward) + of_rest)
        # What is waited for beside it.
        gathers, replicas = self._waiting(forward, backward, count)
        passes = count * self.trace.blocks
        split = passes * self._tensor_seconds(micro_batch, held)
        context = passes * sum(self._context_seconds(block))
        copies = passes * self._copying_seconds(micro_batch, held, forward)
        stepped = self._optimizer_seconds(self.plan.split_shapes.elements)
        tokens = passes * sum(self._expert_seconds(micro_batch, held))
        return StepTime(
            compute, gathers, replicas, split, context, stepped, copies, tokens
        )

    def _computing(self, figures: Figures, tensor: int) -> tuple[float, float]:
        """Return the seconds of forward and of backward, split over ``tensor``
        ranks."""
        return pass_seconds(figures, tensor, self.plan.layout.context, self.hardware)

    def _waiting(
        self, forward: float, backward: float, count: int
    ) -> tuple[float, float]:
        """Return what is waited for of gathers and reductions inside partition groups,
        and of sums across replicas."""
        blocks, share, gathers = self.trace.blocks, self.fitted.exposed, 0.0
        for place, times in zip(Place, in_places(count), strict=True):
            # A block computes while the next one is gathered, and backward while the
            # last one is reduced.
            waited = exposed_seconds(forward, self.behind[0][place], share)
            waited += exposed_seconds(backward, self.behind[1][place], share)
            # Nothing runs beside the first gather, and nothing beside the root's
            # reduction at the end.
            at_ends = (
                self.opens[place] * sum(self.gather) + self.closes[place] * self.sum[1]
            )
            gathers += times * (blocks * waited + at_ends)
        # The window's sums go while the last backward runs, and the root's after it.
        idle = max(backward - self.gather_again - self.sum[0], 0.0)
        return gathers, blocks * exposed_seconds(idle, self.hop[0], share) + self.hop[1]

    def _tensor_seconds(self, micro_batch: int, held: float) -> float:
        """Return a block's gathers of tokens before, and sums after, its two split
        products; backward has as many."""
        if self.plan.layout.tensor == 1:
            return 0.0
        inputs = self.trace.block["full"].at(micro_batch, held).kept
        passes = 3 if self.mode == "full" else 2
        both = sum(
            self.collectives.tensor(kind, inputs)
            for kind in ("all_gather", "reduce_scatter")
        )
        return passes * 2 * both

    def _context_seconds(self, block: Figures) -> tuple[float, float]:
        """Return a block's gathers of keys and values in forward; and in backward with
        the sum of their gradients; with the copies around them."""
        degree = self.plan.layout.context
        gathers, summed = exchanges(self.plan)
        if degree == 1:
            return 0.0, 0.0
        # All keys and values of the sequence are gathered, and their gradients reduced
        # to the ranks that have them.
        whole, over = keys_and_values(self.plan, block), self.collectives.over
        rate = self.hardware.device.hbm * self.fitted.moving
        around_gather, around_sum = copies(self.plan)
        gather = whole * around_gather / rate
        gather += over("all_gather", whole, degree=degree)
        reduce = whole * around_sum / rate
        reduce += over("reduce_scatter", summed * whole, degree=degree)
        return gather, (gathers - 1) * gather + reduce

    def _expert_seconds(self, micro_batch: int, held: float) -> tuple[float, float]:
        """Return a block's exchanges of tokens with the ranks of their experts, in
        forward, where numbers of rows go before them, and in backward. An all-to-all
        takes what a gather of all its rows takes."""
        one = token_bytes(self.plan, self.trace, micro_batch, held)
        if one is None:
            return 0.0, 0.0
        # Forward tells how many rows come, sends them with what the router made of
        # them, and gets as many back; backward goes the same ways.
        exchange = functools.partial(self.collectives.tokens, one.ranks, one.nodes)
        back = exchange(one.inside, one.across)
        counts = exchange(one.counts_inside, one.counts_across)
        forward = counts + exchange(one.inside, one.across + one.beside) + back
        return forward, back + exchange(one.inside, one.across + one.weights)

    def _copying_seconds(self, micro_batch: int, held: float, forward: float) -> float:
        """Return what copies of inputs to the host and back add to a block's two
        passes."""
        if self.plan.activations.offloaded_bytes is None:
            return 0.0
        inputs = (
            self.trace.block["full"].at(micro_batch, held).kept
            / self.plan.layout.tensor
        )
        # To the host in forward, and back in backward; each runs beside a block's
        # computation.
        copy = inputs / self.hardware.device.host_link
        return 2 * exposed_seconds(forward, copy, self.fitted.exposed)

    def _optimizer_seconds(self, parameters: float) -> float:
        """Return the seconds of the step of this rank's part of so many parameters of a
        tensor rank, wherever its states are."""
        plan, device = self.plan, self.hardware.device
        elements = self.trained * parameters / plan.shard_degree
        over_world = plan.knobs.optimizer_shard == "world"
        after = self.agreeing
        if over_world:
            elements /= plan.layout.replicate
            after += self.collectives.replicas(
                self.trained * parameters * self.stored, kinds=("all_gather",)
            )
        if plan.knobs.state_offload is None:
            return after + elements * STEP_BYTES / (device.hbm * self.fitted.moving)
        # On the host all ranks of a node share its memory. Gradients go there and
        # parameters come back, float32 each.
        stepped = elements * STEP_BYTES * self.hardware.ranks_per_node / HOST_BANDWIDTH
        return after + stepped + 2 * elements * 4 / device.host_link


def in_places(count: int) -> tuple[int, int, int, int]:
    """Return how many of a step's micro-batches are in each of :class:`Place`."""
    return (1, count - 2, 1, 0) if count > 1 else (0, 0, 0, 1)


class _GroupCollectives:
    """Times of collectives over a plan's groups. Tensor groups stand side by side in
    nodes and share their links."""

    def __init__(self, plan: Plan, hardware: Hardware) -> None:
        # Ranks of a partition group on one node: of each tensor group there one is a
        # member.
        self.slowed, self.links = hardware.slowed, hardware.links
        self.layout = plan.layout
        self.degree = plan.shard_degree
        self.per_node = max(self.links.ranks_per_node // plan.layout.tensor, 1)
        self.in_stages = plan.hierarchical
        self.scatters = plan.knobs.optimizer_shard == "world"
        self.experts = expert_degree(plan)

    def same_experts(self, kind: Kind, n_bytes: float) -> float:
        """Return the seconds of a collective in one stage over the ranks with the same
        experts. On each node others do the same beside them."""
        ranks = self.degree // self.experts
        if self.degree <= self.per_node:
            return self._seconds("intra", kind, ranks, n_bytes)
        if self.per_node < 2 * self.experts:  # none beside it
            return self._between(kind, ranks, n_bytes)
        # On each node so many groups use the adapter at the same time, each with its
        # own bytes.
        crowded = (
            n_bytes
            * self.slowed(self.degree // self.per_node)
            * self.layout.tensor
            * self.experts
        )
        return self._seconds("flat", kind, ranks, crowded)

    def tokens(self, ranks: int, nodes: int, inside: float, across: float) -> float:
        """Return the seconds of one exchange of rows: over the ranks on a node, and
        over nodes."""
        return self._seconds("intra", "all_gather", ranks, inside) + self._between(
            "all_gather", nodes, across
        )

    def everywhere(self, n_bytes: float) -> float:
        """Return the seconds of a sum over all ranks, inside nodes and between them; 0
        of nothing."""
        nodes, k = self.links.nodes, self.links.ranks_per_node
        if not n_bytes:
            return 0.0
        inside = self._seconds("intra", "all_reduce", k, n_bytes)
        return inside + self._seconds("inter", "all_reduce", nodes, n_bytes / k)

    def tensor(self, kind: Kind, n_bytes: float) -> float:
        """Return the seconds of a collective over a tensor group."""
        degree = self.layout.tensor
        return self._seconds(
            "intra" if degree <= self.links.ranks_per_node else "inter",
            kind,
            degree,
            n_bytes,
        )

    def message(self, place: str, n_bytes: float) -> float:
        """Return the seconds of a message from a rank to another one."""
        return self._seconds(place, "all_gather", 2, 2 * n_bytes)

    def replicas(
        self, n_bytes: float, spared: float = 1.0, kinds: tuple[Kind, ...] = ()
    ) -> float:
        """Return the seconds of collectives on a unit's shards across replicas.

        Args:
            kinds: (): those of a sum; where each replica steps a part of the shard, it
                gets no more than that part's.
        """
        if not kinds:
            kinds = (
                ("reduce_scatter",)
                if self.scatters
                else ("reduce_scatter", "all_gather")
            )
        replicas, held = self.layout.replicate, n_bytes / self.degree
        # Replicas on one node add up first, and one part of each goes between nodes.
        together = min(max(self.per_node // self.degree, 1), replicas)
        seconds = 0.0
        for kind in kinds:
            seconds += self._seconds("intra", kind, together, held)
            seconds += self._between(
                kind, replicas // together, held / together * spared
            )
        return seconds

    def over(
        self, kind: Kind, n_bytes: float, spared: float = 1.0, degree: int | None = None
    ) -> float:
        """Return the seconds of a collective over so many neighbours in a partition
        group; None: over all of it."""
        k, degree = self.per_node, degree or self.degree
        if degree <= k:
            return self._seconds("intra", kind, degree, n_bytes)
        # In two stages only 1 / k of the bytes cross nodes, from each rank its own
        # part; in one stage a ring crosses with all.
        if self.in_stages or k == 1:
            return self._seconds("intra", kind, k, n_bytes) + self._between(
                kind, degree // k, n_bytes / k * spared
            )
        crowded = n_bytes * self.slowed(degree // k)
        return self._seconds(
            "flat", kind, degree, crowded * spared * self.layout.tensor
        )

    def _between(self, kind: Kind, nodes: int, n_bytes: float) -> float:
        return self._seconds("inter", kind, nodes, n_bytes * self.slowed(nodes))

    def _seconds(self, place: str, kind: Kind, ranks: int, n_bytes: float) -> float:
        """Return the seconds of a collective over so many ranks; one alone waits for
        none."""
        if ranks == 1:
            return 0.0
        found = getattr(self.links, place)
        assert isinstance(found, Collectives), f"{place} of {self.links}"
        return found.seconds(kind, ranks, n_bytes)


def model_flops(trace: ModelTrace, samples: int, tokens: int) -> float:
    """Return the model FLOPs of a training step by the convention of MFU: causal
    attention as if it were full, three times (:mod:`smp_core.observe.monitoring`), and
    products forward and backward, of frozen parameters once there."""
    block, rest = trace.block["none"].at(1, tokens), trace.rest["none"].at(1, tokens)
    products = 0.0
    # Counted without recomputation: what is computed again is no model FLOP.
    for figures, times in ((block, trace.blocks), (rest, 1)):
        products += times * (figures.forward_products + figures.backward_products)
        products += times * (figures.forward_experts + figures.backward_experts)
    attention = trace.blocks * block.full_attention + rest.full_attention
    return samples * (products + 3 * attention)

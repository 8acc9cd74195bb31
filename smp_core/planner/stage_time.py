"""The time of a step through pipeline stages: the schedule's own list of computations,
played.

A computation of a stage takes what its blocks take (:mod:`smp_core.planner.time`):
computing, and what is waited for of gathers, reductions, tensor and context ranks. What
comes before the blocks and behind them counts on its stage, in its chunk. A computation
begins when the one before it on its stage has ended and its activation, or gradient,
has arrived. A message leaves when the computation that gave it has ended and the ones
before it to the same stage have left; it takes its bytes over the link between the two
stages, and arrives a latency later. The parts of the time are those of the stage that
is busy longest; what is left, the bubble and what is waited for of messages, is the
part ``pipeline`` of :class:`smp_core.planner.time.StepTime`.

Behind its last backward pass a stage waits for the sums across its replicas, all for
those of tied parameters, and each steps what it has. Of many micro-batches only the
first few rounds are played: each further round takes the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from smp_core.plan import Plan, chunks_of, computations
from smp_core.planner.fp8_figures import block_figures
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_trace import Figures, ModelTrace
from smp_core.planner.stage_part import StagePart, token_ranks
from smp_core.planner.time import (
    PHASES,
    Place,
    StepModel,
    StepTime,
    computing_seconds,
    exposed_seconds,
    in_places,
)

_ROUNDS = 3
"""Rounds of as many micro-batches as there are stages that are played."""

Seconds = tuple[float, float, float, float, float, float]
"""Of a computation: computing, waiting for gathers and reductions, for tensor ranks,
for context ranks, for copies, for tokens."""


@dataclass(frozen=True)
class _Turn:
    """One computation of a schedule, in an order in which all come after what they wait
    for.

    Attributes:
        kind: its place in a table of seconds: direction, chunk, and the micro-batch's
            place in the step.
        waits_for: the turn whose message it needs; -1: none.
        link: on which its own message leaves, stage * stages + stage; -1: it has none.
    """

    stage: int
    kind: int
    waits_for: int
    link: int


@dataclass(frozen=True)
class _OfSize:
    """Seconds of micro-batches of one size.

    Attributes:
        of_block: forward and backward, by the micro-batch's place in the step.
        around: of what comes before the blocks and behind them, forward and backward.
        totals: of ``of_block``.
        hop: of a block's sum across replicas, behind the last computation.
    """

    of_block: Sequence[Sequence[Seconds]]
    around: Sequence[tuple[float, float]]
    totals: Sequence[Sequence[float]]
    hop: float


def step_model(
    plan: Plan,
    trace: ModelTrace,
    hardware: Hardware,
    tokens: int,
    shared: dict[Any, Any] | None = None,
) -> StepModel:
    """Return the times of a plan, with pipeline stages or without.

    Args:
        tokens: of a whole sequence.
        shared: as of :class:`StagedModel`.
    """
    if plan.stages is None:
        return StepModel(plan, trace, hardware, tokens)
    # The models of many plans of one search share what depends on the cut and the batch
    # alone.
    return StagedModel(plan, trace, hardware, tokens, shared)


class StagedModel(StepModel):
    """The times of a plan with pipeline stages.

    Args:
        shared: between models of one trace and hardware: what was computed before.
    """

    def __init__(
        self,
        plan: Plan,
        trace: ModelTrace,
        hardware: Hardware,
        tokens: int,
        shared: dict[Any, Any] | None = None,
    ) -> None:
        super().__init__(plan, trace, hardware, tokens)
        self._shared = {} if shared is None else shared
        assert plan.stages is not None
        self.stages, layout, of = plan.stages, plan.layout, self.collectives
        # Blocks and elements of each stage follow from the cut alone.
        cut = ("parts", layout.tensor, plan.stages.count, plan.stages.sizes)
        if cut not in self._shared:
            self._shared[cut] = [
                StagePart.of(plan, trace, stage) for stage in range(plan.stages.count)
            ]
        self.parts: list[StagePart] = self._shared[cut]
        # Gathers and sums of each stage's root; most stages have the same.
        roots = [part.root for part in self.parts]
        # Each different size is asked for once, and looked up for each stage.
        sharded = [n if plan.gathers else 0.0 for n in roots]
        gathers = {
            n: of.over("all_gather", n * self.stored) if n else 0.0
            for n in set(sharded)
        }
        of_trained = trace.trained[1] * self.reduced
        sums = {
            n: of.over("reduce_scatter", n * of_trained) if n else 0.0
            for n in set(sharded)
        }
        hops = {
            n: of.replicas(n * of_trained, self.spare_hop) if n else 0.0
            for n in set(roots)
        }
        self.root_hop = [hops[n] for n in roots]
        # On which nodes stages are, and what messages between them take.
        self.ranks = layout.world_size // layout.pipeline
        self.nodes = [
            stage * self.ranks // hardware.ranks_per_node
            for stage in range(self.stages.count)
        ]
        self.latencies = self._wires(0.0)
        # What a computation waits for once, by stage and place.
        begun = [_in_places(self.opens, gathers[n] + self.gather[0]) for n in sharded]
        ended = [_in_places(self.closes, sums[n]) for n in sharded]
        self.ends = (begun, ended)
        self._of_size = cache(self._measured)

    def step(
        self, micro_batch: int, count: int, in_stages: int | None = None
    ) -> StepTime:
        """Return the time of a step of ``count`` micro-batches.

        Args:
            in_stages: how many of them go through the stages in one batch; None: as the
                plan has it.
        """
        asked, stages = self.plan.knobs.pipeline, self.stages
        together = in_stages or asked.microbatches
        assert isinstance(together, int)
        # A step is one batch after another, each of which fills and drains the stages.
        batches = max(count // together, 1)
        of_size = self._of_size(micro_batch)
        # What a schedule is played with: seconds of each kind of computation, and of
        # each link.
        table = self._seconds(of_size)
        wires = self._wires(
            self._message_bytes(micro_batch, self.tokens / self.plan.layout.context)
        )
        replicas = [
            part.blocks * of_size.hop + own
            for part, own in zip(self.parts, self.root_hop, strict=True)
        ]
        # Batches one after another: each begins when all stages have ended the one
        # before.
        ends = [0.0] * stages.count
        for place, times in zip(Place, in_places(batches), strict=True):
            if not times:
                continue
            # Batches between the first and the last take the same time each: one is
            # played and counted as often.
            found = played(
                asked.schedule,
                stages.count,
                together,
                _of_batch(table, place),
                wires,
                self.latencies,
            )
            is_last = place in (Place.LAST, Place.ONLY)
            ends = [
                max(ends) + times * (end if is_last else max(found)) for end in found
            ]
        # After the last batch each stage sums over its replicas and steps. The stage
        # that ends last ends the step.
        stepped = [self._optimizer_seconds(part.elements) for part in self.parts]
        end = max(sum(each) for each in zip(ends, replicas, stepped, strict=True))
        # Reported is the busiest stage, because its parts add up to what it does; all
        # else of the step is the bubble and messages.
        busiest = self._busiest(of_size, count, replicas, stepped)
        tied = self._tied_seconds()
        rest = max(end - busiest.total, 0.0)
        return replace(busiest, replicas=busiest.replicas + tied, pipeline=rest)

    def _busiest(
        self,
        of_size: _OfSize,
        count: int,
        replicas: Sequence[float],
        stepped: Sequence[float],
    ) -> StepTime:
        """Return the seconds of the stage that is busy longest, without what it waits
        for of others, which wait for it."""
        # Each stage's own work, as if nothing ever made it wait.
        of_stages: list[StepTime] = []
        for stage in range(self.stages.count):
            compute, gathers, tensor, context, copies, tokens = self._busy(
                of_size, stage, count
            )
            own = (
                compute,
                gathers,
                replicas[stage],
                tensor,
                context,
                stepped[stage],
                copies,
                tokens,
            )
            of_stages.append(StepTime(*own, stage=stage))
        # How uneven stages are is reported apart from the bubble: another cut can
        # change it.
        busiest = max(of_stages, key=lambda each: each.total)
        mean = sum(each.total for each in of_stages) / len(of_stages)
        return replace(busiest, over_mean=busiest.total / mean - 1)

    def least(self, micro_batch: int, count: int, in_stages: int) -> float:
        """Return seconds that a schedule takes at least: of a stage's computations and
        sums, of the first and last round of each batch, and of the messages over one
        link.

        A stage ends while those before it still run backward: its sums may be over
        before theirs. The first stage ends last.
        """
        of_size, stages = self._of_size(micro_batch), self.stages
        # The message of one micro-batch to a stage on another node.
        wire = self._between(
            0,
            1,
            self._message_bytes(micro_batch, self.tokens / self.plan.layout.context),
        )
        # Begin and end of a batch go through the smallest chunk at the least.
        smallest = min(stages.sizes)
        forward, backward = (
            smallest * of_size.totals[way][Place.BETWEEN] for way in range(2)
        )
        batches = count / in_stages
        behind_first = self._behind_seconds(self.parts[0], of_size)
        # The first, the last and the fullest stage; the bound is the largest of what
        # any of them takes.
        most = 0.0
        for part in (
            self.parts[0],
            self.parts[-1],
            max(self.parts, key=lambda part: part.blocks),
        ):
            ways = [self._of_part(part, of_size, way) for way in range(2)]
            # Those before it run forward, and at the end backward; those behind it run
            # both, beside this one's work on as many other micro-batches. Where a stage
            # has several chunks it may have work all the time. A stage may fill several
            # nodes.
            crossed = len(set(self.nodes[: part.stage + 1])) - 1
            begins, ends = (
                part.stage * each + crossed * wire for each in (forward, backward)
            )
            later = (stages.count - 1 - part.stage) if stages.per_stage == 1 else 0
            there_and_back = forward + backward
            waits = later * sum(max(there_and_back - own, 0.0) for own in ways)
            of_batches = (
                count * sum(ways) + batches * (begins + waits) + (batches - 1) * ends
            )
            most = max(
                most,
                of_batches + self._behind_seconds(part, of_size),
                of_batches + ends + behind_first,
            )
        # Another bound: what one link between nodes has to carry, without latencies.
        is_sent = len(set(self.nodes)) > 1  # between nodes
        of_link = (
            count * stages.per_stage * (wire - self._between(0, 1, 0.0))
            if is_sent
            else 0.0
        )
        return max(most, of_link)

    def _of_part(self, part: StagePart, of_size: _OfSize, way: int) -> float:
        """Return the seconds that a stage computes for a micro-batch, forward (0) or
        backward (1), at the least."""
        before, behind = of_size.around[way]
        around = part.is_first * before + part.is_last * behind
        ends = self.stages.per_stage * self.ends[way][part.stage][Place.BETWEEN]
        return part.blocks * of_size.totals[way][Place.BETWEEN] + around + ends

    def _behind_seconds(self, part: StagePart, of_size: _OfSize) -> float:
        """Return the seconds of a stage behind its last backward: sums over replicas,
        and the optimizer."""
        return (
            part.blocks * of_size.hop
            + self.root_hop[part.stage]
            + self._optimizer_seconds(part.elements)
        )

    def _measured(self, micro_batch: int) -> _OfSize:
        held = self.tokens / self.plan.layout.context
        share = self.fitted.exposed
        degree = self.plan.layout.tensor
        # A block's figures on a rank: of its experts, and of FP8 products where there
        # are some.
        block = block_figures(
            self.plan, self.trace, self.hardware, self.mode, micro_batch, held
        )
        chunked = self.plan.knobs.chunked_cross_entropy is not None
        # Computing depends on nothing else that a search varies.
        key = (micro_batch, held, degree, self.mode, chunked, self.experts)
        if key not in self._shared:
            self._shared[key] = (
                self._computing(block, degree),
                self._around(micro_batch, held),
            )
        computing, around = self._shared[key]
        # What a block waits for in forward and in backward, whatever the micro-batch's
        # place in the step.
        split = self._tensor_seconds(micro_batch, held)
        of_shared = self._context_seconds(block)
        of_tokens = self._expert_seconds(micro_batch, held)
        copies = self._copying_seconds(micro_batch, held, computing[0]) / 2
        passes = 3 if self.mode == "full" else 2
        of_split = split / passes, split * (passes - 1) / passes
        # With gathers and reductions, which are of some places only.
        of_block, totals = [], []
        # Forward (0), then backward (1).
        for way in range(2):
            waited = [
                exposed_seconds(computing[way], behind, share)
                for behind in self.behind[way]
            ]
            others = (of_split[way], of_shared[way], copies, of_tokens[way])
            of_block.append([(computing[way], each, *others) for each in waited])
            totals.append([sum(parts) for parts in of_block[way]])
        # Sums over replicas begin when all micro-batches are through: nothing is
        # computed meanwhile.
        return _OfSize(of_block, around, totals, self.hop[0])

    def _seconds(self, of_size: _OfSize) -> list[float]:
        """Return the seconds of each kind of computation."""
        # In the order in which :class:`_Turn` numbers kinds: direction, chunk, place in
        # the step.
        found: list[float] = []
        for way in range(2):
            for chunk, n in enumerate(self.stages.sizes):
                # Embeddings come before the first chunk, and head and loss behind the
                # last one.
                more = of_size.around[way][0] if chunk == 0 else 0.0
                more += (
                    of_size.around[way][1] if chunk == self.stages.n_chunks - 1 else 0.0
                )
                ends = self.ends[way][chunk % self.stages.count]
                found += [
                    n * total + more + end
                    for total, end in zip(of_size.totals[way], ends, strict=True)
                ]
        return found

    def _around(
        self, micro_batch: int, held: float
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the seconds of what comes before the blocks and of what comes behind
        them, forward and backward."""
        # The trace has figures of all outside blocks, and of what comes before them;
        # the difference works behind them.
        rest = self.trace.rest[self.mode].at(micro_batch, held)
        before = (
            Figures()
            if self.trace.early is None
            else self.trace.early.at(micro_batch, held)
        )
        behind = rest.combined(before, lambda whole, part: max(whole - part, 0.0))
        degree = self.trace.rest_degree(self.plan.layout.tensor)
        early = [
            computing_seconds(before, phase, degree, self.hardware) for phase in PHASES
        ]
        forward, backward = self._computing(behind, degree)
        if self.plan.knobs.chunked_cross_entropy is not None:
            backward += forward  # logits are made again
        return (early[0], forward), (early[1], backward)

    def _message_bytes(self, micro_batch: int, held: float) -> float:
        """Return the bytes of an activation between two stages."""
        # With full recomputation a block keeps its input and nothing else: the trace
        # has the size of an activation there.
        inputs = self.trace.block["full"].at(micro_batch, held).kept
        return inputs / token_ranks(self.plan)

    def _wires(self, n_bytes: float) -> list[float]:
        """Return the seconds of a message between each two stages, stage by stage."""
        # All links of a kind are alike; which of both kinds it is follows from the
        # nodes of both stages.
        inside, across = (self._between(0, there, n_bytes) for there in (0, 1))
        return [
            inside if here == there else across
            for here in self.nodes
            for there in self.nodes
        ]

    def _between(self, here: int, there: int, n_bytes: float) -> float:
        if here == there:
            # A stage that fills a node has no neighbour on it.
            return (
                self.collectives.message("intra", n_bytes)
                if self.ranks < self.hardware.ranks_per_node
                else 0.0
            )
        if self.hardware.nodes == 1:
            return 0.0
        # A link between nodes is measured with all ranks of a node at work.
        share = min(self.ranks / self.hardware.ranks_per_node, 1.0)
        return self.collectives.message("inter", n_bytes * share)

    def _tied_seconds(self) -> float:
        """Return the seconds of the sum of tied gradients over the first and the last
        stage."""
        # The first and the last stage hold tied weights both, and add up their
        # gradients once in a step.
        plan = self.plan
        elements = sum(
            plan.split_shapes.of_name(name).elements for name in self.stages.tied
        )
        if not elements:
            return 0.0
        n_bytes = elements / plan.shard_degree * self.reduced
        # A ring of two ranks.
        return 2 * self._between(self.nodes[0], self.nodes[-1], n_bytes / 2)

    def _busy(self, of_size: _OfSize, stage: int, count: int) -> list[float]:
        """Return what a stage is busy with in a step, by part."""
        # Computing, gathers, tensor ranks, context ranks, copies, tokens: as
        # :data:`Seconds` has them.
        stages = self.stages
        found = [0.0] * 6
        for way in range(2):
            for place, weight in enumerate(in_places(count)):
                times = weight * self.parts[stage].blocks
                of_block = of_size.of_block[way][place]
                found = [
                    total + times * seconds
                    for total, seconds in zip(found, of_block, strict=True)
                ]
                found[1] += weight * stages.per_stage * self.ends[way][stage][place]
            # Embedding on the first stage, head and loss on the last.
            found[0] += count * (of_size.around[way][0] if stage == 0 else 0.0)
            found[0] += count * (
                of_size.around[way][1] if stage == stages.count - 1 else 0.0
            )
        return found


def _in_places(happens: Sequence[bool], seconds: float) -> list[float]:
    """Return what is waited for at each place of a micro-batch in the step: where it
    happens."""
    return [each * seconds for each in happens]


def _of_batch(totals: Sequence[float], place: Place) -> list[float]:
    """Return the seconds of a batch's computations by places in the batch, from those
    by places in the step."""
    # Only the step's first micro-batch gathers what is kept, and only the last reduces:
    # the first of a batch in the middle does neither.
    first = Place.FIRST if place in (Place.FIRST, Place.ONLY) else Place.BETWEEN
    last = Place.LAST if place in (Place.LAST, Place.ONLY) else Place.BETWEEN
    found = []
    for begin in range(0, len(totals), len(Place)):
        found += [totals[begin + each] for each in (first, Place.BETWEEN, last, place)]
    return found


def played(
    schedule: str,
    stages: int,
    micro_batches: int,
    seconds: Sequence[float],
    wires: Sequence[float],
    latencies: Sequence[float],
) -> list[float]:
    """Return when each stage has ended its last computation of a batch.

    Args:
        seconds: of computations, as :class:`_Turn` numbers them.
        wires: of messages from stage to stage, latencies included; ``latencies``: of
            these.
    """

    def played_of(count: int) -> list[float]:
        return _played(
            _turns(schedule, stages, count), stages, seconds, wires, latencies
        )

    # In the steady state each further round of as many micro-batches as stages takes
    # the same time, so that two lengths give the slope.
    most = _ROUNDS * stages
    if micro_batches <= most:
        return played_of(micro_batches)
    ends, before = played_of(most), played_of(most - stages)
    rounds = (micro_batches - most) / stages
    return [
        end + rounds * (end - earlier)
        for end, earlier in zip(ends, before, strict=True)
    ]


def _played(
    turns: Sequence[_Turn],
    stages: int,
    seconds: Sequence[float],
    wires: Sequence[float],
    latencies: Sequence[float],
) -> list[float]:
    # When each stage is free, when each link is free, and when each turn's message has
    # arrived.
    clocks = [0.0] * stages
    free = [0.0] * (stages * stages)
    arrivals = [0.0] * len(turns)
    for number, turn in enumerate(turns):
        # A turn begins when its stage is free and its input is there.
        begin = clocks[turn.stage]
        if turn.waits_for >= 0 and arrivals[turn.waits_for] > begin:
            begin = arrivals[turn.waits_for]
        clocks[turn.stage] = end = begin + seconds[turn.kind]
        # A link carries one message at a time. Its latency delays the arrival, not the
        # next message.
        link = turn.link
        if link >= 0:
            free[link] = max(free[link], end) + wires[link] - latencies[link]
            arrivals[number] = free[link] + latencies[link]
    return clocks


@lru_cache(maxsize=512)
def _turns(schedule: str, stages: int, micro_batches: int) -> tuple[_Turn, ...]:
    """Return the computations of all stages, each behind those that it waits for."""
    # What each stage still has to do, in its own order.
    left = [
        deque(computations(schedule, stages, stage, micro_batches))
        for stage in range(stages)
    ]
    chunks = stages * chunks_of(schedule)
    found: list[_Turn] = []
    places: dict[tuple[bool, int, int], int] = {}
    # Stage by stage as far as each gets without a turn that is not there yet. A
    # schedule without a deadlock always lets one of them go on.
    while any(left):
        for stage, steps in enumerate(left):
            while steps:
                # Forward waits for the chunk before it, backward for the one behind it.
                step = steps[0]
                before, further = (-1, 1) if step.is_forward else (1, -1)
                key = (step.is_forward, step.chunk + before, step.micro_batch)
                # What it waits for is not among the turns yet.
                if 0 <= step.chunk + before < chunks and key not in places:
                    break
                kind = ((not step.is_forward) * chunks + step.chunk) * len(Place)
                kind += _place(step.micro_batch, micro_batches)
                sends = 0 <= step.chunk + further < chunks
                # The outermost chunks have nothing to send further.
                link = stage * stages + (step.chunk + further) % stages if sends else -1
                places[step.is_forward, step.chunk, step.micro_batch] = len(found)
                found.append(_Turn(stage, kind, places.get(key, -1), link))
                steps.popleft()
    return tuple(found)


def _place(micro_batch: int, count: int) -> int:
    if count == 1:
        return Place.ONLY
    if micro_batch == 0:
        return Place.FIRST
    return Place.LAST if micro_batch == count - 1 else Place.BETWEEN

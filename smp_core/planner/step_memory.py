"""The peak of a step's memory by kind, for a plan and a traced model: model states by
:mod:`smp_core.plan.memory`, activations and gradients on their way from the trace.

A step has eight points that can be the highest. L blocks, of which L (or as many as
stay on the device) keep something:

    forward     all that blocks keep, the rest's highest (logits), the root unit, the last block's gather or, where all
                stay gathered, the buffer of it that FSDP2 holds on to until the root's forward ends
    loss        the same in the loss's backward, before it comes to a block
    last        the last block's backward: what it makes (after it was computed again, where it is), two gathered
                blocks, gradients of the block and of the root
    next        the same in the block before it, while the last block's gradients are reduced: the reduction's input
    first       the same in the first block, which alone keeps something and is gathered by then, with the sums of all
                other blocks; and in the one before it in backward, which is gathered together with the first
    rest        after it, in what comes before the blocks: gradients of the root, and the sums of all blocks
    root        no activations, while the root's gradients are reduced: the reduction's input with the gradients that
                go into it, or with its output and either what goes between nodes or the output in the dtype that
                parameters are stored in
    step        all gradients and optimizer states, and no activations

Where experts are dealt to ranks, a block gathers and reduces those that are here. With
recomputation it keeps its rows twice, as they came to experts and back; without it rows
that were sent stand for those that are kept anyway.

A partition group of one rank that FSDP2 casts for gathers into no buffers, but its
reductions put out as much as they take: there is one more point, while the last block's
gradients are reduced.

Where parameters stay gathered from one micro-batch to the next, the micro-batch before
the last has the same points, with all units gathered at each. Sums of earlier
micro-batches are there in the first three. Context ranks hold 1 / c of each sequence.
Tensor ranks have a trace of split layers. Where it was not made (whole tokens, a model
that is there) they hold 1 / T of a block's activations, and the two inputs whose tokens
were gathered for its products, or with selective recomputation the two outputs before
they are added up (2 (1 - 1 / T) block inputs more).

The kinds are those of :mod:`smp_core.observe.memory_report` and of dry runs, so that
all can be laid side by side.

A pipeline stage has the points of what it holds: only the last one has a loss, only the
first what comes before the blocks. To each, blocks of the micro-batches that wait for
their backward pass are added, as many as the schedule lets wait, and for each of these
the activation that was sent on; and what is on its way from and to other stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from smp_core.plan import GIB, Plan, communicators
from smp_core.planner.context_bytes import beside_attention
from smp_core.planner.expert_bytes import dealt_elements, token_bytes
from smp_core.planner.fitted import FITTED
from smp_core.planner.fp8_figures import gathered_bytes, kept_bytes, state_bytes
from smp_core.planner.model_trace import FORWARD, LEFT, ModelTrace
from smp_core.planner.stage_part import StagePart, StageStates, states_of, token_ranks

MEMORY_KINDS = (
    "parameters",
    "gathered",
    "gradients",
    "optimizer",
    "activations",
    "other",
    "margin",
)


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of one rank at its peak.

    Attributes:
        activations: what blocks and the rest keep or work with.
        other: buffers of the model, FP8's histories and scales, the input of a
            reduction.
        margin: the CUDA context and communicators, and what the allocator loses between
            blocks.
        capacity: of the device.
        stage: of the pipeline, whose rank it is.
    """

    parameters: int
    gathered: int
    gradients: int
    optimizer: int
    activations: int
    other: int
    margin: int
    capacity: int
    stage: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, kind) for kind in MEMORY_KINDS)

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity


def peak_memory(
    plan: Plan,
    trace: ModelTrace,
    micro_batch: int,
    count: int,
    tokens: int,
    states: Sequence[StageStates] | None = None,
    in_stages: int | None = None,
) -> PeakMemory:
    """Return the peak of a plan, of the pipeline stage where it is highest.

    Args:
        micro_batch: samples of a micro-batch on each rank.
        count: micro-batches of a step.
        tokens: of an unsplit sequence.
        states: of the same plan; None: those with AdamW.
        in_stages: micro-batches that go through pipeline stages in one batch; None: as
            the plan has it.
    """
    if in_stages is None:
        asked = plan.knobs.pipeline.microbatches
        # "auto" is not resolved yet in plans of a search, which says how many it tries.
        in_stages = asked if isinstance(asked, int) else count
    batch = _Batch(trace, micro_batch, count, tokens / plan.layout.context, in_stages)
    peaks = [_peak(plan, each, batch) for each in states or states_of(plan)]
    return max(peaks, key=lambda peak: peak.total)


@dataclass(frozen=True)
class _Batch:
    """A step of ``count`` micro-batches, of ``held`` tokens of each sample on a
    rank."""

    trace: ModelTrace
    micro_batch: int
    count: int
    held: float
    in_stages: int


def _peak(plan: Plan, of_stage: StageStates, batch: _Batch) -> PeakMemory:
    states = of_stage.memory
    points = _Points(plan, of_stage, batch).all()
    if batch.count > 1 and plan.keeps_parameters and not plan.keeps_gradients:
        # Where parameters stay gathered and gradients do not, the micro-batch before
        # the last can be the highest: nothing is freed in its backward.
        points += _Points(
            plan, of_stage, replace(batch, count=batch.count - 1), frees=False
        ).all()
    highest = max(points, key=lambda point: point.total)
    # Every communicator takes buffers of its own on the device.
    of_context = FITTED.context_gib + FITTED.communicator_gib * len(communicators(plan))
    of_scales = state_bytes(plan)
    used = states.parameters + states.buffers + of_scales + highest.total
    margin = int(of_context * GIB + FITTED.fragmentation * used)
    # By the kinds of the highest point, whose sum is the peak. The highest of each kind
    # may come at other points.
    assert plan.cluster.device_memory is not None
    return PeakMemory(
        parameters=states.parameters,
        gathered=int(highest.gathered),
        gradients=int(highest.gradients),
        optimizer=int(highest.optimizer),
        activations=int(highest.activations),
        other=int(states.buffers + of_scales + highest.reduced),
        margin=margin,
        capacity=plan.cluster.device_memory,
        stage=of_stage.stage,
    )


@dataclass(frozen=True)
class _Point:
    """Bytes at one point of a step, beside parameters and buffers."""

    activations: float
    gathered: float
    gradients: float
    optimizer: float
    reduced: float = 0.0

    @property
    def total(self) -> float:
        return (
            self.activations
            + self.gathered
            + self.gradients
            + self.optimizer
            + self.reduced
        )


class _Points:
    """The points of a batch's last micro-batch on one stage.

    Args:
        frees: False: it is not the step's last, and what is gathered stays for the next
            one.
    """

    def __init__(
        self, plan: Plan, of_stage: StageStates, batch: _Batch, frees: bool = True
    ) -> None:
        trace, micro_batch, held = batch.trace, batch.micro_batch, batch.held
        self.plan = plan
        self.states = of_stage.memory
        self.trace = trace
        self.frees = frees
        # Of one stage: its blocks and root, and sums of its gradients.
        self.count, self.in_stages = batch.count, batch.in_stages
        self.part = StagePart.of(plan, trace, of_stage.stage)
        self.sums = of_stage.gradients
        self.tensor, self.split = plan.layout.tensor, token_ranks(plan)
        mode = recomputation(plan)
        # What was traced: of split layers, or shares of unsplit ones.
        self.left = trace.rest[mode].at(micro_batch, held).left
        inputs = trace.block["full"].at(micro_batch, held).kept
        split = (
            trace.split.instants.get((self.tensor, mode)) if self.split > 1 else None
        )
        # Split layers were traced over some degrees; over others, shares of the unsplit
        # trace stand for them.
        instants = trace.instants[mode] if split is None else split
        # What traced bytes of blocks and of the rest are divided by.
        self.shares = (
            (self.tensor, trace.rest_degree(self.tensor)) if split is None else (1, 1)
        )
        forward, backward = beside_attention(
            plan, trace.block["none"].at(micro_batch, held), trace.heads
        )
        beside = (forward * self.shares[0], backward * self.shares[0])
        # The highest instants, for each number of blocks that backward has come to.
        self.instants = [
            instants.highest(reached, micro_batch, held, beside)
            for reached in range(FORWARD + 1)
        ]
        if split is None:
            self.block_kept = trace.block[mode].at(micro_batch, held).kept
            # What a tensor rank keeps of a block, and what it has gathered for its
            # products.
            gathered = 0.0 if mode == "full" else 2 * inputs * (1 - 1 / self.tensor)
            self.kept = self.block_kept / self.tensor + gathered
        else:
            self.block_kept = self.kept = split.kept_at(micro_batch, held)
        # What a block keeps beside it for tokens on their way to experts, and for FP8
        # layers.
        # Tokens on their way are kept beside the block only with recomputation: without
        # it they stand for rows that are kept anyway.
        exchange = token_bytes(plan, trace, micro_batch, held)
        self.is_dealt = exchange is not None
        if exchange is not None and mode != "none":
            self.kept += exchange.kept
        of_fp8 = kept_bytes(plan, trace, micro_batch * held)
        self.kept += of_fp8 if mode == "none" else 0.0
        # With recomputation they are there only while the block is computed again.
        self.made_again = 0.0 if mode == "none" else of_fp8
        self.tokens = micro_batch * held
        self.inputs = inputs
        self.sizes = _UnitBytes.of(plan, self.part, trace)
        # Unsharded gradients have the dtype that is computed with; without units they
        # are those of the parameters.
        self.of_gradient = (
            1.0 if plan.gathers else plan.shapes.parameters[0].dtype.itemsize / 2
        )
        self.waiting = self._waiting()

    def all(self) -> list[_Point]:
        # How many blocks keep activations on the device, and the sums of earlier
        # micro-batches, which the first has none of.
        blocks = kept_blocks(self.plan, self.part.chunk)
        states = self.states
        # An estimate counts gradients of masters among optimizer states; they are there
        # once the window's reductions have begun.
        at_work = states.optimizer_states - self.sums.of_masters
        earlier = self.sums.held if self.plan.keeps_gradients else self.sums.sums
        if self.count == 1:
            earlier = 0
        points = []
        # In the loss: at the end of forward, and in backward before it comes to a
        # block.
        if self.part.is_last:
            for reached in (FORWARD, 0):
                activations = self._loss(blocks, reached) + self.waiting
                gathered = self._gathered(0, in_forward=reached == FORWARD)
                points.append(
                    _Point(
                        activations, gathered, earlier + self._held(reached), at_work
                    )
                )
        # In the backward of the last block, and of the one before it.
        for reached in (1, 2):
            # The last block's input is gone in the next one's backward; where inputs
            # are on the host, another came.
            inputs = min(blocks + reached - 1, self.part.chunk)
            activations = self._working(reached) + inputs * self.kept + self.waiting
            own, out = (
                (self.sizes.reduced, self.sizes.reduced_part)
                if reached == 2
                else (0.0, 0.0)
            )
            # Else it is added to earlier sums.
            of_last = out if self.count == 1 else 0.0
            gradients = earlier + of_last + self._held(reached)
            points.append(
                _Point(activations, self._gathered(reached), gradients, at_work, own)
            )
        if self.is_alone:
            points.append(self._reducing_alone(blocks, earlier, at_work))
        return [*points, *self._late(blocks, at_work)]

    @property
    def is_alone(self) -> bool:
        """Return whether FSDP2 casts for one rank, with nobody to gather from."""
        return self.plan.gathers and self.plan.shard_degree == 1

    def _reducing_alone(self, blocks: int, earlier: float, at_work: float) -> _Point:
        """Return the point at which the last block's gradients were reduced, which it
        has no more itself."""
        # On one rank a reduction puts out as much as it takes, so that both count; the
        # cast to the stored dtype comes on top.
        sizes = self.sizes
        activations = (
            self.inputs / self.split
            + (blocks - 1) * self.kept
            + self.waiting
            + sizes.cast
        )
        gathered = self._gathered(1) - (sizes.gathered if self.frees else 0.0)
        held = min(self._held(1), sizes.root_gradients * self.of_gradient)
        return _Point(activations, gathered, earlier + held, at_work, 2 * sizes.reduced)

    def _waiting(self) -> float:
        """Return the activations of other micro-batches on this stage, and of what is
        sent and received."""
        if self.plan.stages is None:
            return 0.0
        # The schedule lets several micro-batches wait for their backward; the one at
        # work is counted in the points themselves.
        others = self.part.kept(self.plan, self.in_stages) - self.part.chunk
        calls = others / self.part.chunk  # forwards that wait
        sent = 0.0 if self.part.is_last else calls + 1
        messages = 2.0  # of an activation that arrives, and a gradient
        blocks = kept_blocks(self.plan, self.part.chunk) * calls * self.kept
        return blocks + (sent + messages) * self.inputs / self.split + self._losses()

    def _losses(self) -> float:
        """Return what losses of other micro-batches keep until their backward pass."""
        if not self.part.is_last or self.plan.knobs.pipeline.schedule != "gpipe":
            return 0.0  # the last stage takes each backward at once
        chunked = self.plan.knobs.chunked_cross_entropy is not None
        # All forwards come before all backwards: each loss keeps its logits, or the
        # inputs of the head if it is chunked.
        of_loss = (
            self.inputs if chunked else self.left / self.trace.rest_degree(self.tensor)
        )
        return (self.in_stages - 1) * of_loss

    def _late(self, blocks: int, at_work: float) -> list[_Point]:
        """Return the points at which all blocks but the first, or all, are reduced."""
        states, of_root, waiting = self.states, self.sizes.root_share, self.waiting
        reduced, root = self.sizes.reduced, self._gathered(self.part.blocks + 1)
        # The sums of the root and of the first block are there if earlier micro-batches
        # had some. Those of blocks that were sent to masters have their parts of it.
        adds = self.count > 1 and not self.plan.keeps_gradients
        sums = self.sums.sums * (
            1.0 if adds else 1 - of_root
        ) + self.sums.of_masters * (1 - of_root)
        own = 0.0 if adds else self.sizes.reduced_part
        held = of_root * self.sums.held if self.count > 1 else 0.0
        first = self._working(2) + min(2, blocks) * self.kept + waiting
        first_sums = sums - own + held + self._held(2)
        # In the one before the first there are no sums of either.
        # The same one block earlier, when the first block is gathered ahead and is not
        # reduced.
        before_first = (
            self._working(2) + min(3, blocks + 1, self.part.chunk) * self.kept + waiting
        )
        before_gathered = self._gathered(max(self.part.blocks - 1, 1))
        before_sums = max(sums - 2 * own, 0.0) + held + self._held(2)
        # At the step there are no activations and nothing is gathered.
        at_step = states.gradients + states.partial_sums - self.sums.held
        points = [
            _Point(
                first, self._gathered(self.part.blocks), first_sums, at_work, reduced
            ),
            _Point(before_first, before_gathered, before_sums, at_work, reduced),
            _Point(0.0, 0.0, at_step, states.optimizer_states),
        ]
        # Backward of the embedding, which only the first stage has.
        if self.part.is_first:
            rest = self.instants[LEFT][0] / self.shares[0] + waiting
            points.append(
                _Point(rest, root, sums + held + self._held(LEFT), at_work, reduced)
            )
        if self.plan.gathers:
            unsharded = held or self.sizes.root_gradients * self.of_gradient
            taken = self.sizes.root_reduced
            put_out = self.sizes.root_reduced / self.plan.shard_degree
            behind = (
                sums
                + self.sums.of_masters * of_root
                + self.sums.root_last * self.of_gradient
            )
            if adds:
                taken_and_put_out = taken + put_out
            else:  # what was put out is the sum
                behind, taken_and_put_out = behind + put_out, taken
            between = 0.0  # what goes between nodes, where the reduction has two stages
            if self.plan.hierarchical:
                between = (
                    taken
                    / self.plan.cluster.topology.of_groups(self.tensor).ranks_per_node
                )
            points += [
                _Point(waiting, 0.0, sums + unsharded, at_work, taken),
                _Point(
                    waiting + max(self.sizes.root_cast, between),
                    0.0,
                    behind,
                    at_work,
                    taken_and_put_out,
                ),
            ]
        return points

    def _gathered(self, reached: int, in_forward: bool = False) -> float:
        """Return the bytes that are gathered in forward's loss (``reached=0``), or when
        backward has come to so many blocks; one more: it has left all."""
        if not self.plan.gathers:
            return self.states.gathered
        blocks = self.part.blocks
        block = self.sizes.gathered
        kept = self.plan.knobs.reshard_after_forward
        # With stages other micro-batches have gone forward meanwhile, for which all
        # blocks are there again.
        freed = reached if self.plan.stages is None else 0
        if kept is False:
            # Each is freed after its backward. The buffer is there where blocks were
            # gathered in this forward: in the first of several micro-batches, too, but
            # that has no sums yet, which are larger.
            was_gathered = not self.is_alone and (
                self.count == 1 or not self.plan.keeps_parameters
            )
            buffer = block if in_forward and was_gathered else 0.0
            return (
                self.states.gathered
                + buffer
                - (max(freed - 1, 0) * block if self.frees else 0.0)
            )
        # An integer says over how many ranks a copy is kept between forward and
        # backward; each has its part.
        copies = self.sizes.copied / kept if type(kept) is int else 0.0
        # What is left of all gathered bytes without blocks: the unit of the root.
        root = max(self.states.gathered - blocks * copies - min(2, blocks) * block, 0.0)
        if reached > blocks:
            return root + (0.0 if self.plan.stages is None else copies * blocks)
        # FSDP2 holds on to the last gather's buffer until backward gathers ahead, which
        # it does while there is a block.
        ahead = not self.is_alone and not (
            self.plan.stages is None and reached == blocks
        )
        at_work = min((reached > 0) + ahead, self.part.chunk)
        # Parts go when the gather from them begins, also that of the block ahead.
        if ahead and self.plan.stages is None:
            freed += 1
        return root + at_work * block + copies * (blocks - freed)

    def _loss(self, blocks: int, reached: int) -> float:
        """Return the activations when the logits are there, or as many of them as are
        made at a time."""
        # Instants are of two blocks, what these keep among it, and this plan counts its
        # own blocks.
        part = (self.instants[reached][0] - 2 * self.block_kept) / self.shares[1]
        chunk = self.plan.knobs.chunked_cross_entropy
        if chunk is not None:
            part = min(part, part * chunk / self.tokens + self.inputs)
        return blocks * self.kept + part

    def _working(self, reached: int) -> float:
        """Return the activations beside what blocks keep at the highest instant of a
        block's backward."""
        return (self.instants[reached][0] - 2 * self.block_kept) / self.shares[
            0
        ] + self.made_again

    def _held(self, reached: int) -> float:
        """Return the gradients that are not reduced yet, of what this stage has."""
        # Held by autograd until a unit's reduction takes them, in the dtype that the
        # unit computes in.
        of_element = self.plan.dtypes.of_gathered(
            self.plan.shapes.parameters[0]
        ).itemsize
        stages, held = self.plan.stages, self.instants[reached][1] / self.shares[0]
        if stages is not None and reached == LEFT:
            # The trace has the head's too, and of tied ones their sum.
            held = self.part.root * of_element
        elif stages is not None and not self.part.is_last:
            behind = StagePart.of(self.plan, self.trace, stages.count - 1).behind
            held = max(held - behind * of_element, 0.0)
        if self.is_dealt and reached in (1, 2):  # of experts only those that are here
            whole, dealt = dealt_elements(self.plan, self.trace)
            held = max(held - (whole - dealt) * of_element, held * dealt / whole)
        return held * self.of_gradient


def recomputation(plan: Plan) -> str:
    """Return the mode of recomputation that was traced."""
    return str(plan.knobs.activations.checkpoint)


def kept_blocks(plan: Plan, blocks: int) -> int:
    """Count the blocks whose kept activations are on the device at one time."""
    return (
        blocks
        if plan.activations.offloaded_bytes is None
        else min(blocks, plan.activations.horizon)
    )


@dataclass(frozen=True)
class _UnitBytes:
    """Bytes of one block and of the root.

    Attributes:
        gathered, reduced: of a block, as these are done, reduced none without units; of
            experts that are dealt out those that are here.
        copied: of what is gathered of a block, what a node may keep a copy of.
        reduced_part: what a rank gets of a block's sums.
        cast: of a block's part on one rank, where it is cast to what parameters are
            stored in; 0: it is not.
        root_gradients: of the root, before they are reduced.
        root_share: the root's part of all trained elements.
    """

    gathered: float
    reduced: float
    copied: float
    reduced_part: float
    cast: float
    root_gradients: float
    root_reduced: float
    root_cast: float
    root_share: float

    @classmethod
    def of(cls, plan: Plan, part: StagePart, trace: ModelTrace) -> _UnitBytes:
        # Blocks and the root, as they are held on this stage.
        trained, (whole, dealt) = trace.trained, dealt_elements(plan, trace)
        of_block, of_experts = gathered_bytes(plan, trace)
        block, root = trained[0] * part.block_elements, trained[1] * part.root
        # Experts on other ranks are neither gathered nor reduced here.
        elsewhere = whole - dealt
        of_all = root + part.blocks * block
        first = plan.shapes.first_trained
        gathered = plan.dtypes.of_gathered(first).itemsize
        reduced = plan.dtypes.of_reduced(first).itemsize
        # FSDP2 casts what a reduction puts out if parameters are stored in another
        # dtype.
        stored = plan.dtypes.of_stored(first).itemsize
        cast = stored / plan.shard_degree if stored != reduced else 0.0
        return cls(
            gathered=of_block + of_experts,
            reduced=plan.gathers * (block - trained[0] * elsewhere) * reduced,
            copied=of_block,
            reduced_part=plan.gathers * block * reduced / plan.shard_degree,
            cast=block * cast,
            root_gradients=root * gathered,
            root_reduced=root * reduced,
            root_cast=root * cast,
            root_share=root / of_all if of_all else 0.0,
        )

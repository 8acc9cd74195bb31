"""The peak of a step's memory by kind, for a plan and a traced model: model states by
:mod:`smp_core.planning.memory`, activations and gradients on their way from the trace.

A step has six points that can be the highest. L blocks, of which L (or as many as stay on the device) keep something:

    loss        all that blocks keep, the rest's highest (logits), the root unit
    last        the last block's backward: what it makes (after it was computed again, where it is), two gathered
                blocks, gradients of the block and of the root
    next        the same in the block before it, while the last block's gradients are reduced: the reduction's input
    first       the same in the first block, which alone keeps something by then, and the sums of all units
    rest        after it, in what comes before the blocks: gradients of the root, and the sums of all units
    step        all gradients and optimizer states, and no activations

Sums of earlier micro-batches are there in the first three. Context ranks hold 1 / c of each sequence. Tensor ranks hold
1 / T of a block's activations, and the two inputs whose tokens were gathered for its products (2 (1 - 1 / T) block
inputs more). The kinds are those of :mod:`smp_core.memory_report` and of dry runs, so that all can be laid side by
side.
"""

from __future__ import annotations

from dataclasses import dataclass

from smp_core.planning.cluster import GIB
from smp_core.planning.decide import Plan
from smp_core.planning.fitted import FITTED, Fitted
from smp_core.planning.memory import MemoryEstimate, gradient_bytes
from smp_core.planning.model_trace import LEFT, ModelTrace

MEMORY_KINDS = ("parameters", "gathered", "gradients", "optimizer", "activations", "other", "margin")


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of one rank at its peak.

    Attributes:
        activations: what blocks and the rest keep or work with.
        other: buffers of the model, the input of a reduction.
        margin: the CUDA context, and what the allocator loses between blocks.
        capacity: of the device.
    """

    parameters: int
    gathered: int
    gradients: int
    optimizer: int
    activations: int
    other: int
    margin: int
    capacity: int

    @property
    def total(self) -> int:
        return sum(getattr(self, kind) for kind in MEMORY_KINDS)

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity


def peak_memory(
    plan: Plan,
    states: MemoryEstimate,
    trace: ModelTrace,
    micro_batch: int,
    count: int,
    tokens: int,
    fitted: Fitted = FITTED,
) -> PeakMemory:
    """Return the peak of a plan.

    Args:
        states: of the same plan (:func:`smp_core.planning.memory.estimate`).
        micro_batch: samples of a micro-batch on each rank.
        count: micro-batches of a step.
        tokens: of an unsplit sequence.
    """
    points = _Points(plan, states, trace, micro_batch, count, tokens / plan.layout.context).all()
    highest = max(points, key=lambda point: point.total)
    margin = int(fitted.context_gib * GIB + fitted.fragmentation * (states.parameters + states.buffers + highest.total))
    assert plan.cluster.device_memory is not None
    return PeakMemory(
        parameters=states.parameters,
        gathered=int(highest.gathered),
        gradients=int(highest.gradients),
        optimizer=int(highest.optimizer),
        activations=int(highest.activations),
        other=int(states.buffers + highest.reduced),
        margin=margin,
        capacity=plan.cluster.device_memory,
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
        return self.activations + self.gathered + self.gradients + self.optimizer + self.reduced


class _Points:
    """The six points of a step of ``count`` micro-batches, of ``held`` tokens of each sample on a rank."""

    def __init__(
        self, plan: Plan, states: MemoryEstimate, trace: ModelTrace, micro_batch: int, count: int, held: float
    ) -> None:
        self.plan, self.states, self.trace, self.count = plan, states, trace, count
        self.tensor = plan.layout.tensor
        mode = recomputation(plan)
        instants = trace.instants[mode]
        self.instants = [instants.highest(reached, micro_batch, held) for reached in range(LEFT + 1)]
        self.block_kept = trace.block[mode].at(micro_batch, held).kept
        inputs = trace.block["full"].at(micro_batch, held).kept
        # What a tensor rank keeps of a block, and what it has gathered for its products.
        gathered = 0.0 if mode == "full" else 2 * inputs * (1 - 1 / self.tensor)
        self.kept = self.block_kept / self.tensor + gathered
        self.tokens = micro_batch * held
        self.inputs = inputs
        self.sizes = _UnitBytes.of(plan, trace)
        self.sums = gradient_bytes(plan)
        # Unsharded gradients have the dtype that is computed with; without units they are those of the parameters.
        self.of_gradient = 1.0 if plan.gathers else plan.shapes.parameters[0].dtype.itemsize / 2

    def all(self) -> list[_Point]:
        blocks = kept_blocks(self.plan, self.trace.blocks)
        states = self.states
        at_work = states.optimizer_states - self.sums.of_masters
        earlier = 0 if self.count == 1 else self.sums.held if self.plan.keeps_gradients else self.sums.sums
        root, copies = self._root_and_copies()
        # A plan that keeps parameters after forward has them all at every point.
        at_work_gathered = states.gathered - copies
        reduced = self.sizes.reduced if self.plan.shard_degree > 1 else 0.0
        points = [_Point(self._loss(blocks), root + copies, earlier + self._held(0), at_work)]
        for reached in (1, 2):
            # The last block's input is gone in the next one's backward; where inputs are on the host, another came.
            inputs = min(blocks + reached - 1, self.trace.blocks)
            activations = self._working(reached) + inputs * self.kept
            # Copies of blocks that backward has come to are gone.
            gathered = at_work_gathered + copies * max(1 - reached / self.trace.blocks, 0.0)
            own = reduced * (reached == 2) * (not self.plan.keeps_gradients or self.count == 1)
            of_last = own / self.plan.shard_degree if self.count == 1 else 0.0  # else it is added to earlier sums
            points.append(_Point(activations, gathered, earlier + of_last + self._held(reached), at_work, own))
        sums = max(self.sums.sums, earlier)
        first = self._working(2) + min(2, blocks) * self.kept
        points.append(_Point(first, at_work_gathered, sums + self._held(2), at_work, reduced))
        rest = self.instants[LEFT][0] / self.tensor
        points.append(_Point(rest, root, sums + self._held(LEFT), at_work, reduced))
        at_step = states.gradients + states.partial_sums - self.sums.held
        points.append(_Point(0.0, 0.0, at_step, states.optimizer_states))
        return points

    def _root_and_copies(self) -> tuple[float, float]:
        """Return the bytes that are gathered while no block is, and of them the copies between forward and backward."""
        if not self.plan.gathers or self.plan.knobs.reshard_after_forward is False:
            return self.states.gathered, 0.0
        kept = self.plan.knobs.reshard_after_forward
        copies = self.trace.blocks * self.sizes.gathered / kept if type(kept) is int else 0.0
        return max(self.states.gathered - copies - 2 * self.sizes.gathered, 0.0), copies

    def _loss(self, blocks: int) -> float:
        """Return the activations when the logits are there, or as many of them as are made at a time."""
        part = (self.instants[0][0] - 2 * self.block_kept) / self.trace.rest_degree(self.tensor)
        chunk = self.plan.knobs.chunked_cross_entropy
        if chunk is not None:
            part = min(part, part * chunk / self.tokens + self.inputs)
        return blocks * self.kept + part

    def _working(self, reached: int) -> float:
        """Return the activations beside what blocks keep at the highest instant of a block's backward."""
        return (self.instants[reached][0] - 2 * self.block_kept) / self.tensor

    def _held(self, reached: int) -> float:
        return self.instants[reached][1] / self.tensor * self.of_gradient


def recomputation(plan: Plan) -> str:
    """Return the mode of recomputation that was traced."""
    mode = plan.knobs.activations.checkpoint
    if mode not in ("none", "selective", "full"):
        raise ValueError(f"activations.checkpoint={mode!r} is not planned with; allowed: 'none', 'selective', 'full'")
    return str(mode)


def kept_blocks(plan: Plan, blocks: int) -> int:
    """Count the blocks whose kept activations are on the device at one time."""
    return blocks if plan.activations.offloaded_bytes is None else min(blocks, plan.activations.horizon)


@dataclass(frozen=True)
class _UnitBytes:
    """Bytes of one block as it is gathered and reduced."""

    gathered: float
    reduced: float

    @classmethod
    def of(cls, plan: Plan, trace: ModelTrace) -> _UnitBytes:
        block = trace.block_parameters / trace.blocks / plan.layout.tensor
        first = plan.shapes.parameters[0]
        gathered, reduced = plan.dtypes.of_gathered(first).itemsize, plan.dtypes.of_reduced(first).itemsize
        return cls(block * gathered, block * reduced)

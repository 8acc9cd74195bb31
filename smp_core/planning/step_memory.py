"""The peak of a step's memory by kind, for a plan and a traced model: model states by
:func:`smp_core.planning.memory.estimate`, activations from the trace.

A step has two high points, and the higher one counts:

    loss        all that blocks keep, the rest's highest (logits), the root unit
    backward    all that blocks keep, what the last block makes while backward runs through it (after it was computed
                again, where it is), two gathered blocks, the gradients of one and of the root, a reduction's input

Context ranks hold 1 / c of each sequence. Tensor ranks hold 1 / T of a block's activations, and the two inputs whose
tokens were gathered for its products (2 (1 - 1 / T) block inputs more). The kinds are those of
:mod:`smp_core.memory_report`, so that both can be laid side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

from smp_core.planning.cluster import GIB
from smp_core.planning.decide import Plan
from smp_core.planning.fitted import FITTED, Fitted
from smp_core.planning.memory import MemoryEstimate
from smp_core.planning.model_trace import Figures, ModelTrace

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
    tokens: int,
    fitted: Fitted = FITTED,
) -> PeakMemory:
    """Return the peak of a plan.

    Args:
        states: of the same plan (:func:`smp_core.planning.memory.estimate`).
        micro_batch: samples of a micro-batch on each rank.
        tokens: of an unsplit sequence.
    """
    mode = recomputation(plan)
    held = tokens / plan.layout.context
    block, rest = trace.block[mode].at(micro_batch, held), trace.rest[mode].at(micro_batch, held)
    kept = block.kept * kept_blocks(plan, trace.blocks)
    split = trace.rest_degree(plan.layout.tensor)
    loss_part = rest.kept / split
    chunk = plan.knobs.chunked_cross_entropy
    if chunk is not None:
        loss_part = min(loss_part, loss_part * chunk / (micro_batch * held) + _inputs(trace, micro_batch, held))
    kept = _of_tensor_rank(kept, _inputs(trace, micro_batch, held) * trace.blocks, plan, mode)
    sizes = _UnitBytes.of(plan, trace)
    # A plan that keeps parameters after forward has them all at both points.
    freed = 2 * int(sizes.gathered) if plan.gathers and plan.knobs.reshard_after_forward is not False else 0
    at_loss = (int(kept + loss_part), max(states.gathered - freed, 0), 0, 0)
    working = rest.working / plan.layout.tensor
    at_backward = (
        int(kept + working),
        states.gathered,
        int(sizes.gradients) if plan.gathers else 0,
        int(sizes.reduced) if plan.shard_degree > 1 else 0,
    )
    activations, gathered, gradients, reduced = max((at_loss, at_backward), key=sum)
    used = states.model_states + activations + gathered + gradients + reduced
    margin = int(fitted.context_gib * GIB + fitted.fragmentation * used)
    assert plan.cluster.device_memory is not None
    return PeakMemory(
        parameters=states.parameters,
        gathered=gathered,
        gradients=states.gradients + states.partial_sums + gradients,
        optimizer=states.optimizer_states,
        activations=activations,
        other=states.buffers + reduced,
        margin=margin,
        capacity=plan.cluster.device_memory,
    )


def recomputation(plan: Plan) -> str:
    """Return the mode of recomputation that was traced."""
    mode = plan.knobs.activations.checkpoint
    if mode not in ("none", "selective", "full"):
        raise ValueError(f"activations.checkpoint={mode!r} is not planned with; allowed: 'none', 'selective', 'full'")
    return str(mode)


def kept_blocks(plan: Plan, blocks: int) -> int:
    """Count the blocks whose kept activations are on the device at one time."""
    return blocks if plan.activations.offloaded_bytes is None else min(blocks, plan.activations.horizon)


def _inputs(trace: ModelTrace, micro_batch: int, tokens: float) -> float:
    """Return the bytes of a block's input: all that full recomputation keeps."""
    figures: Figures = trace.block["full"].at(micro_batch, tokens)
    return figures.kept


def _of_tensor_rank(kept: float, inputs: float, plan: Plan, mode: str) -> float:
    degree = plan.layout.tensor
    gathered = 0.0 if mode == "full" else 2 * inputs * (1 - 1 / degree)
    return kept / degree + gathered


@dataclass(frozen=True)
class _UnitBytes:
    """Bytes of one block as it is gathered and reduced, and of gradients that wait for their reduction."""

    gathered: float
    reduced: float
    gradients: float

    @classmethod
    def of(cls, plan: Plan, trace: ModelTrace) -> _UnitBytes:
        block = trace.block_parameters / trace.blocks / plan.layout.tensor
        root = (trace.parameters - trace.block_parameters) / plan.layout.tensor
        first = plan.shapes.parameters[0]
        gathered, reduced = plan.dtypes.of_gathered(first).itemsize, plan.dtypes.of_reduced(first).itemsize
        return cls(block * gathered, block * reduced, (block + root) * gathered)

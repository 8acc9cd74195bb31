"""StagePart: what one pipeline stage has of a traced model, and how much of a step;
without stages all of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from smp_core.plan import (
    OPTIMIZERS,
    GradientBytes,
    MemoryEstimate,
    OptimizerStates,
    Plan,
    Shapes,
    blocks_kept,
    estimate,
    gradient_bytes,
)
from smp_core.planner.model_trace import ModelTrace


@dataclass(frozen=True)
class StagePart:
    """The part of a model that one stage has.

    Attributes:
        stage: its number.
        blocks: that it has.
        chunk: blocks that one of its computations goes through.
        elements: of its parameters, as one tensor rank holds them.
        block_elements: of them in each block.
        root: of them outside of blocks; ``behind`` of these work behind the blocks.
        is_first, is_last: whether it has what comes before the blocks, and behind them.
    """

    stage: int
    blocks: int
    chunk: int
    elements: float
    block_elements: float
    root: float
    behind: float
    is_first: bool = True
    is_last: bool = True

    @classmethod
    def of(cls, plan: Plan, trace: ModelTrace, stage: int = 0) -> StagePart:
        of_block = trace.block_elements(plan.layout.tensor)
        if plan.stages is None:
            # Without stages one part has everything, and all outside of blocks may work
            # behind them.
            outside = plan.split_shapes.elements - trace.blocks * of_block
            return cls(
                stage,
                trace.blocks,
                trace.blocks,
                plan.split_shapes.elements,
                of_block,
                outside,
                outside,
            )
        sizes = plan.stages.blocks_of(stage)
        elements = shapes_of_stage(plan, stage).over(plan.layout.tensor).elements
        # Only the last stage has the head and the loss; what other stages hold outside
        # of blocks comes before them.
        blocks, is_last = sum(sizes), stage == plan.stages.count - 1
        root = elements - blocks * of_block
        behind = root if is_last else 0.0
        return cls(
            stage,
            blocks,
            max(sizes),
            elements,
            of_block,
            root,
            behind,
            stage == 0,
            is_last,
        )

    def kept(self, plan: Plan, in_stages: int) -> int:
        """Return the most blocks whose activations wait for backward at one time, those
        of several micro-batches counted one by one.

        Args:
            in_stages: micro-batches that go through the stages in one batch.
        """
        if plan.stages is None:
            return self.blocks
        schedule, stages = plan.knobs.pipeline.schedule, plan.stages
        return blocks_kept(
            schedule, stages.count, self.stage, in_stages, stages.blocks_of(self.stage)
        )


@dataclass(frozen=True)
class StageStates:
    """Model states of one stage, or of a model without stages."""

    stage: int
    memory: MemoryEstimate
    gradients: GradientBytes


def states_of(
    plan: Plan, optimizer: OptimizerStates = OPTIMIZERS["adamw"]
) -> tuple[StageStates, ...]:
    """Return the states of each stage that no earlier one is like; without stages of
    the model."""
    if plan.stages is None:
        return (StageStates(0, estimate(plan, optimizer), gradient_bytes(plan)),)
    found = []
    # Stages in the middle are alike, and are looked at once.
    for stage in plan.stages.unlike:
        own = replace(plan, shapes=shapes_of_stage(plan, stage), stages=None)
        found.append(StageStates(stage, estimate(own, optimizer), gradient_bytes(own)))
    return tuple(found)


def token_ranks(plan: Plan) -> int:
    """Return over how many tensor ranks the tokens between blocks are split."""
    return plan.layout.tensor if plan.knobs.tensor_parallel.sequence_parallel else 1


def shapes_of_stage(plan: Plan, stage: int) -> Shapes:
    """Return the shapes of a stage's parameters alone."""
    assert plan.stages is not None
    # Kept with the shapes, which all plans of a search share.
    known: dict[Any, Shapes] = plan.shapes.stages.setdefault("shapes", {})
    key = (plan.stages.count, plan.stages.sizes, stage)
    if key not in known:
        known[key] = plan.stages.shapes_of(stage, plan.shapes)
    return known[key]

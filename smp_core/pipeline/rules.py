"""Rules for pipeline stages: which blocks are on which, and what pipelines do not go
together with yet.

A stage is a stretch of consecutive ranks, and a world of its own for everything that is
decided about partition and replication groups
(:meth:`smp_core.topology.Topology.of_stage`).
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import replace
from typing import Any

from smp_core.config import Clash, SmpConfig
from smp_core.plan import (
    FOREIGN_FP8,
    SYMMETRIC_MEMORY,
    ModelDraft,
    Plan,
    Shapes,
    Stages,
    Subject,
    asked_for,
    came_sharded,
    chunks_of,
    describe_stages,
)
from smp_core.plan.chain import EXTRA_STATE, Chain


def _leaves_units_out(draft: ModelDraft) -> str | None:
    asked = draft.knobs.units.optional
    return (
        f"units.optional={asked if asked == 'auto' else list(asked)!r}"
        if asked
        else None
    )


def _checkpoints_itself(draft: ModelDraft) -> str | None:
    return (
        "the model's own activation checkpointing"
        if draft.shapes.checkpoints_itself
        else None
    )


class PipelineParallelism(Subject):
    """Pipeline stages, as one of the subjects."""

    name = "pipeline parallelism"
    page = "pipeline-parallelism.md"
    knobs = ("pipeline_parallel_degree", "pipeline")
    optional = True
    apart = (
        FOREIGN_FP8,
        Clash(
            "sharding",
            "units that some ranks leave out (`units.optional`)",
            _leaves_units_out,
            "leave it out: stages take every batch through all blocks",
        ),
        SYMMETRIC_MEMORY,
        Clash(
            "sharding",
            "`forward_methods`",
            asked_for("forward_methods"),
            "leave it out: only forward goes through the stages",
        ),
        Clash(
            "sharding",
            "models that came sharded",
            came_sharded,
            "give the model as it is built",
        ),
        Clash(
            "activations",
            "`activations.checkpoint` of models that checkpoint themselves",
            _checkpoints_itself,
            "call model.gradient_checkpointing_disable()",
        ),
    )

    def settle(self, draft: ModelDraft) -> None:
        """Deal the blocks out to stages; resolve the fields of ``pipeline`` that are
        "auto".

        Raises:
            ValueError: a split of another number of stages or blocks, and what it does
                not go together with.
        """
        draft.stages, asked = None, draft.knobs.pipeline
        if draft.knobs.pipeline_parallel_degree > 1:
            self.require_together(
                draft,
                f"pipeline_parallel_degree={draft.knobs.pipeline_parallel_degree}",
            )
            draft.stages = _settle_stages(draft)
        elif asked != type(asked)():
            draft.drop("pipeline", type(asked)(), "pipeline_parallel_degree=1")

    def describe(self, plan: Plan, made: Any) -> list[str]:
        """Return lines about the stages: their blocks, the bubble, their ranks and
        memory."""
        return (
            []
            if plan.stages is None
            else [plan.stages.describe(), *describe_stages(plan)]
        )


PIPELINE_PARALLELISM = PipelineParallelism()


def _settle_stages(draft: ModelDraft) -> Stages:
    """Resolve the schedule, the micro-batches and the split."""
    shapes = draft.shapes
    count = draft.knobs.pipeline_parallel_degree
    asked = draft.knobs.pipeline
    # The schedule.
    if asked.schedule == "auto":
        draft.settle(
            "pipeline.schedule",
            "1f1b",
            "no planner chose one: it keeps the fewest activations",
        )
        asked = draft.knobs.pipeline
    chain = shapes.chain
    assert chain is not None, "the chain is recorded where there are stages"
    # What cannot be dealt is refused before the cut is looked for.
    _require_no_buffers_between_chunks(chain, asked.schedule)
    chunks = count * chunks_of(asked.schedule)
    _require_blocks(draft.knobs, len(chain.blocks), chunks, shapes.kind)
    # The micro-batches.
    if asked.microbatches == "auto":
        draft.settle("pipeline.microbatches", count, "as many as there are stages")
    elif chunks > count and asked.microbatches % count:
        raise ValueError(
            f"pipeline.microbatches={asked.microbatches} with pipeline.schedule={asked.schedule!r}: stages begin their "
            f"next chunk after as many micro-batches as there are stages; write a multiple of {count}"
        )
    # The split.
    sizes = asked.split
    if sizes == "auto":
        sizes = _balanced(chain, shapes, chunks)
        draft.settle(
            "pipeline.split",
            sizes,
            "the largest stage has as few parameters as possible",
        )
    # The planner asks for many cuts of one model; each is dealt once.
    if (count, sizes) not in shapes.stages:
        shapes.stages[count, sizes] = _dealt(chain, shapes, count, sizes)
    return shapes.stages[count, sizes]


def _dealt(chain: Chain, shapes: Shapes, count: int, sizes: tuple[int, ...]) -> Stages:
    names = tuple(parameter.name for parameter in shapes.parameters)
    # Elements are counted by the stages themselves, which know what is tied.
    stages = Stages(chain, sizes, (0,) * count, names, len(sizes) // count)
    elements = []
    for stage in range(count):
        elements.append(
            sum(shapes.of_name(name).elements for name in stages.owned(stage))
        )
    return replace(stages, elements=tuple(elements))


def _require_blocks(knobs: SmpConfig, blocks: int, chunks: int, kind: str) -> None:
    count, split = knobs.pipeline_parallel_degree, knobs.pipeline.split
    each = (
        "stage"
        if chunks == count
        else f"chunk (pipeline.schedule={knobs.pipeline.schedule!r})"
    )
    if chunks > blocks:
        raise ValueError(
            f"pipeline_parallel_degree={count}: {kind} has {blocks} blocks, and every {each} needs one; write "
            f"{blocks * count // chunks} or less"
        )
    if split != "auto" and (len(split) != chunks or sum(split) != blocks):
        raise ValueError(
            f"pipeline.split={list(split)} is not {chunks} numbers that add up to the {blocks} blocks of {kind}; write "
            f"a number of blocks for each {each}, or 'auto'"
        )


def _require_no_buffers_between_chunks(chain: Chain, schedule: str) -> None:
    # Such a buffer would be computed once for each chunk, and count too often.
    outside = [
        name
        for name, place in chain.buffers
        if place not in range(len(chain.blocks))
        and name.rpartition(".")[2] != EXTRA_STATE
    ]
    if outside and schedule.startswith("interleaved"):
        raise ValueError(
            f"pipeline.schedule={schedule!r} and buffers outside of the blocks that are saved "
            f"({', '.join(outside[:3])}), around which a stage comes once for each chunk; "
            "write pipeline={'schedule': '1f1b'}, or register them with persistent=False if they are constant"
        )


def _balanced(chain: Chain, shapes: Shapes, count: int) -> tuple[int, ...]:
    """Cut so that the largest stage is as small as can be: of all limits that are sums
    of neighbours, the least that ``count`` stages keep to. Of the cuts within it the
    one whose blocks are the most even: embeddings and heads take memory, and blocks
    take time."""

    if ("cut", count) in shapes.stages:
        return shapes.stages["cut", count]

    def elements(names: tuple[str, ...]) -> int:
        return sum(shapes.of_name(name).elements for name in names)

    # What stands before and behind the blocks goes with the first and the last one.
    blocks = [elements(names) for names in chain.of_blocks]
    weights = list(blocks)
    weights[0] += elements(chain.before)
    weights[-1] += elements(chain.after)
    # The least limit is the sum of some stretch of neighbours, so only these are tried.
    ends = itertools.accumulate(weights, initial=0)
    sums = sorted({end - first for first, end in itertools.combinations(ends, 2)})
    least = bisect.bisect_left(
        sums, True, key=lambda limit: _fits(weights, count, limit)
    )
    shapes.stages["cut", count] = cut = _most_even(blocks, weights, count, sums[least])
    return cut


def _fits(weights: list[int], count: int, limit: int) -> bool:
    """Return whether stages that are filled one by one, leaving a block for each
    further one, take all blocks."""
    place = 0
    # As full as the limit allows, but with a block left for each further stage.
    for stage in range(count):
        latest = len(weights) - (count - stage - 1)
        total, end = weights[place], place + 1
        while end < latest and total + weights[end] <= limit:
            total, end = total + weights[end], end + 1
        if total > limit:
            return False
        place = end
    return place == len(weights)


def _most_even(
    blocks: list[int], weights: list[int], count: int, limit: int
) -> tuple[int, ...]:
    """Return the sizes of the cut within the limit whose sums of ``blocks`` have the
    least sum of squares."""
    of_blocks, of_all = (
        list(itertools.accumulate(each, initial=0)) for each in (blocks, weights)
    )
    # For the blocks up to each place, in as many stages as there were rounds: the least
    # sum, and the sizes.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for _ in range(count):
        # Dynamic programming over the places of cuts; ties go to the smaller sizes
        # first.
        further: dict[int, tuple[int, tuple[int, ...]]] = {}
        for begin, (squares, sizes) in best.items():
            for end in range(begin + 1, len(blocks) + 1):
                if of_all[end] - of_all[begin] > limit:
                    break
                found = (
                    squares + (of_blocks[end] - of_blocks[begin]) ** 2,
                    (*sizes, end - begin),
                )
                further[end] = min(found, further.get(end, found))
        best = further
    return best[len(blocks)][1]

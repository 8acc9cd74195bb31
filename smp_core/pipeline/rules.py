"""Rules for pipeline stages: which blocks are on which, and what pipelines do not go together with yet.

A stage is a stretch of consecutive ranks, and a world of its own for everything that is decided about partition and
replication groups (:meth:`smp_core.topology.Topology.of_stage`).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from smp_core.config import SmpConfig
from smp_core.plan.chain.chain import Chain
from smp_core.plan.draft import Draft
from smp_core.plan.schedules import chunks_of
from smp_core.plan.shapes import Shapes
from smp_core.plan.units import WrapPlan


@dataclass(frozen=True)
class Stages:
    """The pipeline stages of one model.

    Each stage holds one chunk of blocks, or several, every ``count``-th (``schedule="interleaved:V"``).

    Attributes:
        chain: its blocks.
        sizes: how many of them each chunk has.
        elements: of the parameters of each stage.
        names: of all parameters.
        per_stage: chunks of each stage.
    """

    chain: Chain
    sizes: tuple[int, ...]
    elements: tuple[int, ...]
    names: tuple[str, ...]
    per_stage: int = 1

    @property
    def count(self) -> int:
        return len(self.elements)

    @property
    def n_chunks(self) -> int:
        return len(self.sizes)

    def chunks(self, stage: int) -> range:
        """Return the numbers of a stage's chunks."""
        return range(stage, self.n_chunks, self.count)

    def blocks(self, chunk: int) -> range:
        """Return the numbers of a chunk's blocks."""
        first = sum(self.sizes[:chunk])
        return range(first, first + self.sizes[chunk])

    def owned(self, stage: int) -> frozenset[str]:
        """Return the names of a stage's parameters."""
        return self._owned[stage]

    @cached_property
    def _owned(self) -> tuple[frozenset[str], ...]:
        found: tuple[set[str], ...] = tuple(set() for _ in range(self.count))
        for name, owners in self.owners.items():
            for stage in owners:
                found[stage].add(name)
        return tuple(map(frozenset, found))

    @cached_property
    def owners(self) -> dict[str, tuple[int, ...]]:
        """Each parameter's stages: one, or where it works before and behind the blocks the first and the last."""
        found = {name: (0,) for name in self.names}  # also what no forward uses
        for chunk in range(self.n_chunks):
            for number in self.blocks(chunk):
                found |= dict.fromkeys(self.chain.of_blocks[number], (chunk % self.count,))
        last = self.count - 1
        found |= dict.fromkeys(self.chain.after, (last,))
        return found | dict.fromkeys(set(self.chain.before) & set(self.chain.after), (0, last))

    def used(self, chunk: int) -> frozenset[str]:
        """Return the names of the parameters that work in one chunk, as far as the recorded forward shows them."""
        found = {name for number in self.blocks(chunk) for name in self.chain.of_blocks[number]}
        found |= set(self.chain.before) if chunk == 0 else set()
        return frozenset(found | (set(self.chain.after) if chunk == self.n_chunks - 1 else set()))

    @property
    def tied(self) -> tuple[str, ...]:
        """Parameters of the first and of the last stage, whose gradients are added up between these."""
        return tuple(name for name, owners in self.owners.items() if len(owners) > 1)

    @cached_property
    def buffers(self) -> dict[str, int]:
        """The stage on which each saved buffer works, and may change: its block's, or the first; of what is no module
        that runs before the blocks the last, which runs all of the code."""
        stages = {number: chunk % self.count for chunk in range(self.n_chunks) for number in self.blocks(chunk)}
        others = {-1: 0, None: self.count - 1}
        return {name: stages[place] if place in stages else others[place] for name, place in self.chain.buffers}

    def units(self, stage: int, units: WrapPlan, first_name: dict[str, str]) -> WrapPlan:
        """Return what a stage shards, its parameters' units and roots, and what it replicates."""
        own = self.owned(stage)
        held = []
        for unit in units.units:
            parameters = tuple(name for name in unit.parameters if first_name.get(name, name) in own)
            if parameters or unit.is_root:
                held.append(replace(unit, parameters=parameters))
        replicated = tuple(name for name in units.replicated if first_name.get(name, name) in own)
        return replace(units, units=tuple(held), replicated=replicated)

    def blocks_of(self, stage: int) -> tuple[int, ...]:
        """Return how many blocks each of a stage's chunks has."""
        return tuple(self.sizes[chunk] for chunk in self.chunks(stage))

    @cached_property
    def unlike(self) -> tuple[int, ...]:
        """Stages of which no earlier one takes as much memory: the first, the last, and of those between them with as
        many blocks the first, which has most micro-batches on their way."""
        between = range(1, self.count - 1)
        found = {sum(self.blocks_of(stage)): stage for stage in reversed(between)}
        return (0, *sorted(found.values()), self.count - 1)

    def shapes_of(self, stage: int, shapes: Shapes) -> Shapes:
        """Return the shapes of a stage's parameters alone."""
        own = self.owned(stage)
        parameters = tuple(each for each in shapes.parameters if each.name in own)
        return replace(shapes, parameters=parameters, units=self.units(stage, shapes.units, shapes.aliases))

    def describe(self) -> str:
        """Return a line for people."""
        sizes = [" + ".join(str(self.sizes[chunk]) for chunk in self.chunks(stage)) for stage in range(self.count)]
        parts = ", ".join(f"{size} ({count:,} parameters)" for size, count in zip(sizes, self.elements, strict=True))
        return f"{self.count} pipeline stages, blocks: {parts}"


def settle_pipeline_stages(draft: Draft, shapes: Shapes, given: bool) -> Stages | None:
    """Deal the blocks out to stages; resolve the fields of ``pipeline`` that are "auto".

    Raises:
        ValueError: a split of another number of stages or blocks, and what :func:`require_known_pipeline` refuses.
    """
    count, asked = draft.knobs.pipeline_parallel_degree, draft.knobs.pipeline
    if count == 1:
        if asked != type(asked)():
            draft.drop("pipeline", type(asked)(), "pipeline_parallel_degree=1")
        return None
    require_known_pipeline(draft.knobs, shapes, given)
    if asked.schedule == "auto":
        draft.settle("pipeline.schedule", "1f1b", "no planner chose one: it keeps the fewest activations")
        asked = draft.knobs.pipeline
    chain = shapes.chain
    assert chain is not None, "the chain is recorded where there are stages"
    chunks = count * chunks_of(asked.schedule)
    _require_blocks(draft.knobs, len(chain.blocks), chunks, shapes.kind)
    if asked.microbatches == "auto":
        draft.settle("pipeline.microbatches", count, "as many as there are stages")
    elif chunks > count and asked.microbatches % count:
        raise ValueError(
            f"pipeline.microbatches={asked.microbatches} with pipeline.schedule={asked.schedule!r}: stages begin their "
            f"next chunk after as many micro-batches as there are stages; write a multiple of {count}"
        )
    sizes = asked.split
    if sizes == "auto":
        sizes = _balanced(chain, shapes, chunks)
        draft.settle("pipeline.split", sizes, "the largest stage has as few parameters as possible")
    if (count, sizes) not in shapes.stages:
        shapes.stages[count, sizes] = _dealt(chain, shapes, count, sizes)
    found: Stages = shapes.stages[count, sizes]
    return found


def _dealt(chain: Chain, shapes: Shapes, count: int, sizes: tuple[int, ...]) -> Stages:
    names = tuple(parameter.name for parameter in shapes.parameters)
    stages = Stages(chain, sizes, (0,) * count, names, len(sizes) // count)
    elements = tuple(sum(shapes.of_name(name).elements for name in stages.owned(stage)) for stage in range(count))
    return replace(stages, elements=elements)


def _require_blocks(knobs: SmpConfig, blocks: int, chunks: int, kind: str) -> None:
    count, split = knobs.pipeline_parallel_degree, knobs.pipeline.split
    each = "stage" if chunks == count else f"chunk (pipeline.schedule={knobs.pipeline.schedule!r})"
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


def _balanced(chain: Chain, shapes: Shapes, count: int) -> tuple[int, ...]:
    """Cut so that the largest stage is as small as can be: of all limits that are sums of neighbours, the least that
    ``count`` stages keep to. Of the cuts within it the one whose blocks are the most even: embeddings and heads take
    memory, and blocks take time."""

    if ("cut", count) in shapes.stages:
        cut: tuple[int, ...] = shapes.stages["cut", count]
        return cut

    def elements(names: tuple[str, ...]) -> int:
        return sum(shapes.of_name(name).elements for name in names)

    blocks = [elements(names) for names in chain.of_blocks]
    weights = list(blocks)
    weights[0] += elements(chain.before)
    weights[-1] += elements(chain.after)
    ends = itertools.accumulate(weights, initial=0)
    sums = sorted({end - first for first, end in itertools.combinations(ends, 2)})
    least = bisect.bisect_left(sums, True, key=lambda limit: _fits(weights, count, limit))
    shapes.stages["cut", count] = cut = _most_even(blocks, weights, count, sums[least])
    return cut


def _fits(weights: list[int], count: int, limit: int) -> bool:
    """Tell whether stages that are filled one by one, leaving a block for each further one, take all blocks."""
    place = 0
    for stage in range(count):
        latest = len(weights) - (count - stage - 1)
        total, end = weights[place], place + 1
        while end < latest and total + weights[end] <= limit:
            total, end = total + weights[end], end + 1
        if total > limit:
            return False
        place = end
    return place == len(weights)


def _most_even(blocks: list[int], weights: list[int], count: int, limit: int) -> tuple[int, ...]:
    """Return the sizes of the cut within the limit whose sums of ``blocks`` have the least sum of squares."""
    of_blocks, of_all = (list(itertools.accumulate(each, initial=0)) for each in (blocks, weights))
    # For the blocks up to each place, in as many stages as there were rounds: the least sum, and the sizes.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for _ in range(count):
        further: dict[int, tuple[int, tuple[int, ...]]] = {}
        for begin, (squares, sizes) in best.items():
            for end in range(begin + 1, len(blocks) + 1):
                if of_all[end] - of_all[begin] > limit:
                    break
                found = (squares + (of_blocks[end] - of_blocks[begin]) ** 2, (*sizes, end - begin))
                further[end] = min(found, further.get(end, found))
        best = further
    return best[len(blocks)][1]


def require_known_pipeline(knobs: SmpConfig, shapes: Shapes, given: bool) -> None:
    """Refuse what pipelines have not been shown to be exact with.

    Raises:
        ValueError: names every such knob, its value, and what to write.
    """
    if knobs.pipeline_parallel_degree == 1:
        return
    found = [*_unknown_knobs(knobs), *_unknown_models(knobs, shapes, given)]
    if found:
        lines = "\n".join(f"- {what}; {instead}" for what, instead in found)
        raise ValueError(
            f"pipeline_parallel_degree={knobs.pipeline_parallel_degree} is not built yet together with\n{lines}"
        )


def _unknown_knobs(knobs: SmpConfig) -> Iterator[tuple[str, str]]:
    if knobs.fp8 is not None and knobs.fp8.backend != "native":
        yield f"fp8.backend={knobs.fp8.backend!r}", "write fp8={'backend': 'native'}"
    if knobs.units.optional:
        asked = knobs.units.optional
        yield (
            f"units.optional={asked if asked == 'auto' else list(asked)!r}",
            "leave it out: stages take every batch through all blocks",
        )
    if knobs.collectives.symmetric_memory:
        yield "collectives.symmetric_memory=True", "leave it out"
    if knobs.forward_methods:
        yield f"forward_methods={knobs.forward_methods!r}", "leave it out: only forward goes through the stages"


def _unknown_models(knobs: SmpConfig, shapes: Shapes, given: bool) -> Iterator[tuple[str, str]]:
    if given:
        yield f"a model that came sharded ({shapes.kind})", "give the model as it is built"
    if shapes.checkpoints_itself:
        yield "the model's own activation checkpointing", "call model.gradient_checkpointing_disable()"
    chain = shapes.chain
    outside = [] if chain is None else [n for n, place in chain.buffers if place not in range(len(chain.blocks))]
    if outside and knobs.pipeline.schedule.startswith("interleaved"):
        yield (
            f"pipeline.schedule={knobs.pipeline.schedule!r} and buffers outside of the blocks that are saved "
            f"({', '.join(outside[:3])}), around which a stage comes once for each chunk",
            "write pipeline={'schedule': '1f1b'}, or register them with persistent=False if they are constant",
        )

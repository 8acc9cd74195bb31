"""Stages: which blocks and parameters of a model are on which pipeline stage.

A stage is a stretch of consecutive ranks, and a world of its own for everything that is
decided about partition and replication groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from smp_core.plan.chain.chain import Chain
from smp_core.plan.shapes import Shapes
from smp_core.plan.units import WrapPlan


@dataclass(frozen=True)
class Stages:
    """The pipeline stages of one model.

    Each stage holds one chunk of blocks, or several, every ``count``-th
    (``schedule="interleaved:V"``).

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
        """Each parameter's stages: one, or where it works before and behind the blocks
        the first and the last."""
        found = dict.fromkeys(self.names, (0,))  # also what no forward uses
        # Later entries win: a parameter behind the blocks is the last stage's, a tied
        # one both ends'.
        for chunk in range(self.n_chunks):
            for number in self.blocks(chunk):
                found |= dict.fromkeys(
                    self.chain.of_blocks[number], (chunk % self.count,)
                )
        last = self.count - 1
        found |= dict.fromkeys(self.chain.after, (last,))
        return found | dict.fromkeys(
            set(self.chain.before) & set(self.chain.after), (0, last)
        )

    def used(self, chunk: int) -> frozenset[str]:
        """Return the names of the parameters that work in one chunk, as far as the
        recorded forward shows them."""
        found = {
            name
            for number in self.blocks(chunk)
            for name in self.chain.of_blocks[number]
        }
        found |= set(self.chain.before) if chunk == 0 else set()
        return frozenset(
            found | (set(self.chain.after) if chunk == self.n_chunks - 1 else set())
        )

    @property
    def tied(self) -> tuple[str, ...]:
        """Parameters of the first and of the last stage, whose gradients are added up
        between these."""
        return tuple(name for name, owners in self.owners.items() if len(owners) > 1)

    @cached_property
    def buffers(self) -> dict[str, int]:
        """The stage on which each saved buffer, and each module's extra state, works and
        may change: its block's, or the first; of what is no module that runs before the
        blocks the last, which runs all of the code."""
        # By the block's stage; outside of blocks by what runs there.
        stages: dict[int | None, int] = {-1: 0, None: self.count - 1}
        for chunk in range(self.n_chunks):
            stages |= dict.fromkeys(self.blocks(chunk), chunk % self.count)
        return {name: stages[place] for name, place in self.chain.buffers}

    def units(
        self, stage: int, units: WrapPlan, first_name: dict[str, str]
    ) -> WrapPlan:
        """Return what a stage shards, its parameters' units and roots, and what it
        replicates."""
        # Units keep their place, with this stage's parameters.
        own = self.owned(stage)
        held = []
        for unit in units.units:
            parameters = tuple(
                name for name in unit.parameters if first_name.get(name, name) in own
            )
            if parameters or unit.is_root:
                held.append(replace(unit, parameters=parameters))
        replicated = tuple(
            name for name in units.replicated if first_name.get(name, name) in own
        )
        return replace(units, units=tuple(held), replicated=replicated)

    def blocks_of(self, stage: int) -> tuple[int, ...]:
        """Return how many blocks each of a stage's chunks has."""
        return tuple(self.sizes[chunk] for chunk in self.chunks(stage))

    @cached_property
    def unlike(self) -> tuple[int, ...]:
        """Stages of which no earlier one takes as much memory: the first, the last, and
        of those between them with as many blocks the first, which has most
        micro-batches on their way."""
        between = range(1, self.count - 1)
        # Reversed, so that of stages with equal numbers of blocks the first one stays.
        found = {sum(self.blocks_of(stage)): stage for stage in reversed(between)}
        return (0, *sorted(found.values()), self.count - 1)

    def shapes_of(self, stage: int, shapes: Shapes) -> Shapes:
        """Return the shapes of a stage's parameters alone."""
        own = self.owned(stage)
        parameters = tuple(each for each in shapes.parameters if each.name in own)
        return replace(
            shapes,
            parameters=parameters,
            units=self.units(stage, shapes.units, shapes.aliases),
        )

    def describe(self) -> str:
        """Return a line for people."""
        parts = []
        for stage, count in enumerate(self.elements):
            sizes = [str(self.sizes[chunk]) for chunk in self.chunks(stage)]
            parts.append(f"{' + '.join(sizes)} ({count:,} parameters)")
        return f"{self.count} pipeline stages, blocks: {', '.join(parts)}"

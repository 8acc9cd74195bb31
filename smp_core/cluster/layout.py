"""Layout: the named axes on which the ranks of a run are laid out. Pure arithmetic: no processes, no groups.

Outer to inner, so that what talks most is closest together:

    pipeline    stages of the model
    replicate   replicas of the model states (MiCS: replication group)
    shard       ranks that each hold a part of the model states and read different samples
    context     ranks that hold pieces of one sequence; they hold parts of the model states too
    tensor      ranks that hold parts of one layer

Several axes together are named where they mean something: ``PARTITION`` is the MiCS partition group, ``DATA`` the ranks
that read different samples, ``GRADIENTS`` those whose gradients are added up, ``SAME_MODEL`` those that compute the
same layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from smp_core.topology import Topology

PARTITION = ("shard", "context")
DATA = ("replicate", "shard")
GRADIENTS = ("replicate", "shard", "context")
SAME_MODEL = ("replicate", "shard", "context", "tensor")

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The size of every axis. Rank 0 has coordinate 0 on all of them; the innermost axis counts first."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @classmethod
    def of_world(
        cls,
        world_size: int,
        shard_degree: int,
        context_degree: int = 1,
        tensor_degree: int = 1,
        pipeline_degree: int = 1,
    ) -> Layout:
        """Return the layout of a world whose partition groups have ``shard_degree`` ranks, context ranks included and
        tensor ranks not. Degrees below the pipeline's are those of one stage's ranks.

        Raises:
            ValueError: a degree that does not divide what it has to, with those that do.
        """
        if world_size % pipeline_degree:
            raise ValueError(
                f"pipeline_parallel_degree={pipeline_degree} does not divide the world of {world_size} ranks; "
                f"allowed: {_divisors(world_size)}"
            )
        world_size //= pipeline_degree
        if world_size % tensor_degree:
            raise ValueError(
                f"tensor_parallel_degree={tensor_degree} does not divide the world of {world_size} ranks; "
                f"allowed: {_divisors(world_size)}"
            )
        if world_size // tensor_degree % shard_degree:
            split = "" if tensor_degree == 1 else f" in tensor groups of {tensor_degree}"
            raise ValueError(
                f"shard_degree={shard_degree} does not divide the world of {world_size} ranks{split}; "
                f"allowed: {_divisors(world_size // tensor_degree)}"
            )
        if shard_degree % context_degree:
            raise ValueError(
                f"context_parallel_degree={context_degree} does not divide shard_degree={shard_degree}: context ranks "
                f"are part of the partition group; allowed: {_divisors(shard_degree)}"
            )
        return cls(
            pipeline=pipeline_degree,
            replicate=world_size // tensor_degree // shard_degree,
            shard=shard_degree // context_degree,
            context=context_degree,
            tensor=tensor_degree,
        )

    @property
    def world_size(self) -> int:
        return self.size(*_AXES)

    def size(self, *axes: str) -> int:
        """Return the ranks along these axes together."""
        return math.prod(getattr(self, axis) for axis in axes)

    def coordinate(self, rank: int, *axes: str) -> int:
        """Return where the rank stands on an axis; on several axes together, the outer ones first."""
        place = 0
        for axis in _in_order(axes):
            place = place * self.size(axis) + rank // self._stride(axis) % self.size(axis)
        return place

    def ranks(self, rank: int, *axes: str) -> Ranks:
        """Return the rank's group along these axes: all ranks that differ from it on these axes only, in order."""
        ordered = _in_order(axes)
        own = sum(self.coordinate(rank, axis) * self._stride(axis) for axis in ordered)
        places = itertools.product(*(range(self.size(axis)) for axis in ordered))
        strides = [self._stride(axis) for axis in ordered]
        return tuple(rank - own + sum(map(int.__mul__, place, strides)) for place in places)

    def groups(self, *axes: str) -> list[Ranks]:
        """Return all groups along these axes. They tile the world, and are ordered by their first ranks."""
        firsts = self.ranks(0, *(axis for axis in _AXES if axis not in axes))
        return [self.ranks(first, *axes) for first in firsts]

    def _stride(self, axis: str) -> int:
        """Return how far apart neighbours on the axis are."""
        return self.size(*_AXES[_AXES.index(axis) + 1 :])


_AXES = tuple(field.name for field in fields(Layout))


def split(groups: Sequence[Ranks], inner: int) -> tuple[list[Ranks], list[Ranks]]:
    """Return every group as a grid of rows of ``inner`` neighbours: a view of an axis by two.

    Returns:
        (columns, rows): ranks with one place in their rows, and neighbours.
    """
    rows = [group[first : first + inner] for group in groups for first in range(0, len(group), inner)]
    columns = [group[place::inner] for group in groups for place in range(inner)]
    return columns, rows


def stages(groups: Sequence[Ranks], topology: Topology) -> tuple[list[Ranks], list[Ranks]] | None:
    """Return every group by nodes: (its ranks on one node, its ranks with one place on their nodes). None where it lies
    on one node, or has one rank on each: then there is only one stage."""
    on_first_node = sum(topology.same_node(groups[0][0], rank) for rank in groups[0])
    if on_first_node in (1, len(groups[0])):
        return None
    across, inside = split(groups, on_first_node)
    return inside, across


def _in_order(axes: Sequence[str]) -> list[str]:
    return sorted(axes, key=_AXES.index)


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)

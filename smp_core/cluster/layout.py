"""Layout: the named axes on which the ranks of a run are laid out. Pure arithmetic: no
processes, no groups.

:class:`Axis` has their names, outer to inner, so that what talks most is closest
together. Several axes together are named where they mean something: ``PARTITION`` is
the MiCS partition group, ``DATA`` the ranks that read different samples, ``GRADIENTS``
those whose gradients are added up, ``SAME_MODEL`` those that compute the same layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from types import MappingProxyType

from smp_core.config import SmpConfig
from smp_core.topology import Topology, divisors, listed


class Axis(str, Enum):
    """The axes of a layout, outer to inner. Members are texts: names of a DeviceMesh's
    dimensions, keys of logs.

    Attributes:
        PIPELINE: stages of the model.
        REPLICATE: replicas of the model states (MiCS: replication group).
        SHARD: ranks that each hold a part of the model states and read different
            samples.
        CONTEXT: ranks that hold pieces of one sequence; they hold parts of the model
            states too.
        TENSOR: ranks that hold parts of one layer.
    """

    PIPELINE = "pipeline"
    REPLICATE = "replicate"
    SHARD = "shard"
    CONTEXT = "context"
    TENSOR = "tensor"

    __str__ = str.__str__  # the name itself in texts, whatever the version of Python


Axes = tuple[Axis, ...]

DEGREES = {
    Axis.PIPELINE: "pipeline_parallel_degree",
    Axis.TENSOR: "tensor_parallel_degree",
    Axis.CONTEXT: "context_parallel_degree",
}
"""The axes that a run has only if it is asked for them, and the knob with the size of
each; ``shard_degree`` counts context ranks and no others of them."""

PARTITION: Axes = (Axis.SHARD, Axis.CONTEXT)
DATA: Axes = (Axis.REPLICATE, Axis.SHARD)
GRADIENTS: Axes = (Axis.REPLICATE, Axis.SHARD, Axis.CONTEXT)
"""Their size is what gradients are divided by; why, context ranks included, stands at
the top of smp_core/sharding/gradients/accumulation.py."""
SAME_MODEL: Axes = tuple(axis for axis in Axis if axis is not Axis.PIPELINE)

GROUPS: tuple[Axes, ...] = (
    PARTITION,
    (Axis.REPLICATE,),
    GRADIENTS,
    DATA,
    SAME_MODEL,
    *((axis,) for axis in DEGREES),
)
"""The groups of a run: along which axes collectives run. Groups of the same ranks are
one."""

INNER: Axes = (Axis.TENSOR,)
"""Axes inside of partition groups: ranks along them hold parts of one rank's shard, and
count as one rank for what is decided about partition and replication groups."""

Ranks = tuple[int, ...]


def degrees_of(knobs: SmpConfig) -> dict[Axis, int]:
    """Return the sizes that knobs ask of the axes of :data:`DEGREES`."""
    return {axis: getattr(knobs, knob) for axis, knob in DEGREES.items()}


def inner_degree(knobs: SmpConfig) -> int:
    """Return how many ranks count as one for what is decided about partition groups
    (:data:`INNER`)."""
    return math.prod(degrees_of(knobs)[axis] for axis in INNER)


@dataclass(frozen=True)
class Layout:
    """The size of every axis, by its name. Rank 0 has coordinate 0 on all of them; the
    innermost axis counts first."""

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
        degrees: Mapping[Axis, int] = MappingProxyType({}),
    ) -> Layout:
        """Return the layout of a world whose partition groups have ``shard_degree``
        ranks, context ranks included.

        Args:
            degrees: sizes of the axes of :data:`DEGREES`; one that is not named has one
                rank. Each divides the ranks that are left by those before it, and
                context ranks the partition group.

        Raises:
            ValueError: a degree that does not divide what it has to, with those that
                do.
        """
        # An axis that was not asked for has one rank.
        sizes = {axis: degrees.get(axis, 1) for axis in DEGREES}
        context, tensor = sizes[Axis.CONTEXT], sizes[Axis.TENSOR]
        # Axes outside and inside of partition groups divide the world one after the
        # other; context ranks are a part of the partition group.
        left = whole = world_size
        for axis, degree in sizes.items():
            if axis is Axis.CONTEXT:
                continue
            if left % degree:
                raise ValueError(
                    f"{DEGREES[axis]}={degree} does not divide the world of {left} ranks; allowed: "
                    f"{listed(divisors(left))}"
                )
            whole, left = left, left // degree
        # The partition group, and context ranks in it.
        if left % shard_degree:
            split = "" if tensor == 1 else f" in tensor groups of {tensor}"
            raise ValueError(
                f"shard_degree={shard_degree} does not divide the world of {whole} ranks{split}; "
                f"allowed: {listed(divisors(left))}"
            )
        if shard_degree % context:
            raise ValueError(
                f"{DEGREES[Axis.CONTEXT]}={context} does not divide shard_degree={shard_degree}: context ranks "
                f"are part of the partition group; allowed: {listed(divisors(shard_degree))}"
            )
        # Replicas are what is left.
        sizes[Axis.REPLICATE], sizes[Axis.SHARD] = (
            left // shard_degree,
            shard_degree // context,
        )
        return cls(**{axis.value: size for axis, size in sizes.items()})

    @property
    def world_size(self) -> int:
        return self.size(*Axis)

    @property
    def replicas_are_alone(self) -> bool:
        """Return whether ranks that hold the same shard are all whose gradients are
        added up.

        They have a communicator beside that of GRADIENTS then: they send a unit's sum
        before or after what all ranks send in one order.
        """
        return self.size(*GRADIENTS) == self.replicate > 1

    def without(self, *axes: Axis) -> Layout:
        """Return the layout with one rank along these axes."""
        return replace(self, **{axis.value: 1 for axis in axes})

    @lru_cache(maxsize=4096)  # noqa: B019 (layouts are few, small and frozen)
    def size(self, *axes: Axis) -> int:
        """Return the ranks along these axes together; planners ask a million times."""
        return math.prod(getattr(self, axis.value) for axis in axes)

    def coordinate(self, rank: int, *axes: Axis) -> int:
        """Return where the rank stands on an axis; on several axes together, the outer
        ones first."""
        # The rank's coordinates are the digits of its number, the innermost axis last.
        place, below = 0, 1
        for axis in _INNER_FIRST:
            rank, digit = divmod(rank, self.size(axis))
            if axis in axes:
                place += digit * below
                below *= self.size(axis)
        return place

    @lru_cache(maxsize=1024)  # noqa: B019 (as above)
    def ranks(self, rank: int, *axes: Axis) -> Ranks:
        """Return the rank's group along these axes: all ranks that differ from it on
        these axes only, in order. Planners ask thousands of times."""
        found, stride = [rank], 1  # of neighbours on the axis
        # Axis by axis, the inner ones first, so that ranks come out in order.
        for axis in _INNER_FIRST:
            outer_stride = stride * self.size(axis)
            if axis in axes:
                # From this rank back to coordinate 0, then along the axis.
                first = rank % outer_stride // stride * stride
                along = range(-first, outer_stride - first, stride)
                found = [place + step for step in along for place in found]
            stride = outer_stride
        return tuple(found)

    def groups(self, *axes: Axis) -> list[Ranks]:
        """Return all groups along these axes. They tile the world, and are ordered by
        their first ranks."""
        # The first rank of each group has coordinate 0 on the group's axes.
        firsts = self.ranks(0, *(axis for axis in Axis if axis not in axes))
        return [self.ranks(first, *axes) for first in firsts]


_INNER_FIRST = tuple(reversed(Axis))


def split(groups: Sequence[Ranks], inner: int) -> tuple[list[Ranks], list[Ranks]]:
    """Return every group as a grid of rows of ``inner`` neighbours: a view of an axis
    by two.

    Returns:
        (columns, rows): ranks with one place in their rows, and neighbours.
    """
    rows = [
        group[first : first + inner]
        for group in groups
        for first in range(0, len(group), inner)
    ]
    columns = [group[place::inner] for group in groups for place in range(inner)]
    return columns, rows


def stages(
    groups: Sequence[Ranks], topology: Topology
) -> tuple[list[Ranks], list[Ranks]] | None:
    """Return every group by nodes: (its ranks on one node, its ranks with one place on
    their nodes). None where it lies on one node, or has one rank on each: then there is
    only one stage."""
    # Groups are alike on every node, so the first one tells for all.
    on_first_node = sum(topology.same_node(groups[0][0], rank) for rank in groups[0])
    if on_first_node in (1, len(groups[0])):
        return None
    across, inside = split(groups, on_first_node)
    return inside, across

"""Axes, coordinates and groups of a Layout, without processes."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from smp_core.cluster.layout import (
    DATA,
    GRADIENTS,
    PARTITION,
    Axis,
    Layout,
    split,
    stages,
)
from smp_core.topology import Topology

AXES = tuple(Axis)
LAYOUTS = st.builds(Layout, **{axis.value: st.integers(1, 4) for axis in AXES})
SOME_AXES = st.sets(st.sampled_from(AXES)).map(tuple)


@given(LAYOUTS, SOME_AXES)
def test_groups_tile_the_world(layout: Layout, axes: tuple[Axis, ...]) -> None:
    groups = layout.groups(*axes)
    assert sorted(rank for ranks in groups for rank in ranks) == list(
        range(layout.world_size)
    )
    assert {len(ranks) for ranks in groups} == {layout.size(*axes)}
    assert [ranks[0] for ranks in groups] == sorted(ranks[0] for ranks in groups)
    assert all(list(ranks) == sorted(ranks) for ranks in groups)
    for ranks in groups:
        assert {layout.ranks(rank, *axes) for rank in ranks} == {ranks}


@given(LAYOUTS, SOME_AXES)
def test_members_of_a_group_differ_on_its_axes_only(
    layout: Layout, axes: tuple[Axis, ...]
) -> None:
    others = [axis for axis in AXES if axis not in axes]
    for ranks in layout.groups(*axes):
        assert [layout.coordinate(rank, *axes) for rank in ranks] == list(
            range(len(ranks))
        )
        assert (
            len(
                {
                    tuple(layout.coordinate(rank, axis) for axis in others)
                    for rank in ranks
                }
            )
            == 1
        )


@given(LAYOUTS)
def test_coordinates_name_a_rank(layout: Layout) -> None:
    seen = [
        tuple(layout.coordinate(rank, axis) for axis in AXES)
        for rank in range(layout.world_size)
    ]
    assert seen == sorted(set(seen))  # the innermost axis counts first
    assert all(
        layout.coordinate(rank, *AXES) == rank for rank in range(layout.world_size)
    )


@pytest.mark.parametrize("world", [8, 96, 10_000])
@pytest.mark.parametrize("context", [1, 2])
def test_partition_groups_are_neighbours_and_data_does_not_depend_on_them(
    world: int, context: int
) -> None:
    for degree in (2, 4, 8):
        layout = Layout.of_world(world, degree, {Axis.CONTEXT: context})
        assert layout.world_size == world
        for rank in {0, 1, world // 2 + 1, world - 1}:
            first = rank - rank % degree
            assert layout.ranks(rank, *PARTITION) == tuple(range(first, first + degree))
            assert layout.ranks(rank, Axis.REPLICATE) == tuple(
                range(rank % degree, world, degree)
            )
            assert layout.ranks(rank, Axis.CONTEXT) == tuple(
                range(rank - rank % context, rank - rank % context + context)
            )
            assert layout.coordinate(rank, *DATA) == rank // context
            assert layout.ranks(rank, *GRADIENTS) == tuple(range(world))


def test_tensor_ranks_are_neighbours_and_pipeline_stages_far_apart() -> None:
    layout = Layout(pipeline=2, replicate=2, shard=2, tensor=2)
    assert layout.ranks(5, Axis.TENSOR) == (4, 5)
    assert layout.ranks(5, *PARTITION) == (5, 7)
    assert layout.ranks(5, Axis.REPLICATE) == (1, 5)
    assert layout.ranks(5, Axis.PIPELINE) == (5, 13)
    assert layout.ranks(5, *GRADIENTS) == (1, 3, 5, 7)


@pytest.mark.parametrize(
    ("world", "degree", "context", "message"),
    [
        (
            8,
            3,
            1,
            "shard_degree=3 does not divide the world of 8 ranks; allowed: 1, 2, 4, 8",
        ),
        (
            8,
            4,
            3,
            "context_parallel_degree=3 does not divide shard_degree=4: .*allowed: 1, 2, 4",
        ),
        (8, 2, 4, "context_parallel_degree=4 does not divide shard_degree=2"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_by_name(
    world: int, degree: int, context: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Layout.of_world(world, degree, {Axis.CONTEXT: context})


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([(Axis.SHARD,), (Axis.REPLICATE,), GRADIENTS]),
)
def test_stages_are_a_grid_of_each_group(
    per_node: int, nodes: int, axes: tuple[Axis, ...]
) -> None:
    topology = Topology.uniform(nodes * per_node, per_node)
    for degree in topology.allowed_shard_degrees():
        layout = Layout.of_world(topology.world_size, degree)
        groups = layout.groups(*axes)
        found = stages(groups, topology)
        on_nodes = [{topology.node_of(rank) for rank in ranks} for ranks in groups]
        if found is None:
            assert all(
                len(on) in (1, len(ranks))
                for on, ranks in zip(on_nodes, groups, strict=True)
            )
            continue
        inside, across = found
        assert all(not topology.spans_nodes(ranks) for ranks in inside)
        assert all(
            len({topology.node_of(rank) for rank in ranks}) == len(ranks)
            for ranks in across
        )
        for ranks, on in zip(groups, on_nodes, strict=True):
            rows = [row for row in inside if set(row) <= set(ranks)]
            columns = [column for column in across if set(column) <= set(ranks)]
            assert len(rows) == len(on)
            assert sorted(rank for row in rows for rank in row) == sorted(
                rank for c in columns for rank in c
            )
            assert all(
                len(set(row) & set(column)) == 1 for row in rows for column in columns
            )


def test_an_axis_is_split_into_neighbours_and_those_across() -> None:
    across, neighbours = split([(0, 2, 4, 6), (1, 3, 5, 7)], 2)
    assert neighbours == [(0, 2), (4, 6), (1, 3), (5, 7)]
    assert across == [(0, 4), (2, 6), (1, 5), (3, 7)]

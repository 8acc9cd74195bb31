"""Layouts to verify: text, degrees that fit the ranks, a cluster's layout on a few
ranks."""

from __future__ import annotations

import pytest

from smp_core.verify.layouts import Trial, read_layout, shrink

DEGREES = (
    "shard_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
)


@pytest.mark.parametrize(
    ("text", "ranks", "per_node"),
    [
        ("shard_degree=2", 4, None),
        ("shard_degree=2 ranks=2", 2, None),
        ("tensor_parallel_degree=2", 4, None),
        ("context_parallel_degree=2", 4, None),
        (
            "shard_degree=2, tensor_parallel_degree=2, pipeline_parallel_degree=2",
            8,
            None,
        ),
        ("shard_degree=node ranks=4", 4, 2),
        ("shard_degree=world ranks=2", 2, None),
        ("shard_degree=2 ranks=4 ranks_per_node=2", 4, 2),
    ],
)
def test_a_layout_is_read_with_its_ranks(
    text: str, ranks: int, per_node: int | None
) -> None:
    trial = read_layout(text)
    assert (trial.ranks, trial.ranks_per_node) == (ranks, per_node)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("shard_degree", "write it as shard_degree=2"),
        ("shard_degre=2", "did you mean 'shard_degree'"),
        ("shard_degree=two", "shard_degree='two'"),
        ("shard_degree=4 ranks=6", "do not divide ranks=6; write ranks=4 or 8"),
        ("shard_degree=2 ranks=none", "ranks='none': write a number"),
        ("shard_degree=64", "64 ranks on one machine"),
    ],
)
def test_a_layout_that_is_none_is_refused_with_what_to_write(
    text: str, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        read_layout(text)


@pytest.mark.parametrize(
    ("degrees", "world", "small", "ranks"),
    [
        (("auto", 1, 1, 1), 64, (2, 1, 1, 1), 4),
        (("world", 1, 1, 1), 64, (2, 1, 1, 1), 2),
        ((16, 1, 1, 1), 64, (2, 1, 1, 1), 4),
        ((64, 1, 1, 1), 64, (2, 1, 1, 1), 2),
        ((8, 8, 1, 1), 16, (2, 2, 1, 1), 4),
        ((16, 8, 1, 1), 16, (4, 2, 1, 1), 4),
        (("node", 1, 8, 1), 64, (2, 1, 2, 1), 8),
        ((16, 8, 4, 4), 256, (2, 2, 2, 2), 8),
    ],
)
def test_a_clusters_layout_keeps_its_axes_on_few_ranks(
    degrees: tuple[object, ...], world: int, small: tuple[int, ...], ranks: int
) -> None:
    assert shrink(dict(zip(DEGREES, degrees, strict=True)), world) == Trial(
        dict(zip(DEGREES, small, strict=True)), ranks
    )

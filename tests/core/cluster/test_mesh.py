"""Axes, groups and ranks of SmpMesh, and the degrees it refuses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from smp_core.cluster.agreement import agreed
from smp_core.cluster.layout import PARTITION, Axis
from smp_core.cluster.links import LINKS_VARIABLE
from smp_core.config import SmpConfig
from smp_core.entry import build_mesh, parallelize
from smp_core.topology import Topology
from tests.harness import run_ranks


@dataclass(frozen=True)
class Seen:
    """What one rank's mesh says; groups as global ranks."""

    shard: list[int]
    replicate: list[int]
    intra: list[int] | None
    inter: list[int] | None
    context: list[int] | None
    ranks: dict[str, int]
    sums: dict[str, float]
    effective: dict[str, Any]
    axes: tuple[str, ...] | None


def ranks_of(group: dist.ProcessGroup | None) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


def look(knobs: dict[str, Any]) -> Seen:
    mesh, config = build_mesh(SmpConfig(**knobs), Topology.discover(), "cpu")
    sums = {}
    effective = config.effective()
    in_two = mesh.stages(*PARTITION) if effective["collectives.hierarchical"] else None
    intra, inter = in_two or (None, None)
    stages = (ranks_of(intra), ranks_of(inter))
    named = {
        "shard": mesh.shard_group,
        "replicate": mesh.replicate_group,
        "intra": intra,
        "inter": inter,
    }
    shared = mesh.group(Axis.CONTEXT) if mesh.context_degree > 1 else None
    for name, group in {**named, "context": shared}.items():
        if group is not None:  # the group works, and is the one it says
            total = torch.tensor(float(10**mesh.rank))
            dist.all_reduce(total, group=group)
            sums[name] = total.item()
    assert mesh.world_group is dist.group.WORLD
    shards = mesh.device_mesh["shard"]
    assert shards.ndim == 1
    assert shards.mesh.tolist() == ranks_of(mesh.shard_group)
    places = ("shard_rank", "replicate_rank", "context_rank", "data_rank", "data_size")
    degrees = ("shard_degree", "replicate_degree", "context_degree")
    return Seen(
        shard=ranks_of(mesh.shard_group) or [],
        replicate=ranks_of(mesh.replicate_group) or [],
        intra=stages[0],
        inter=stages[1],
        context=ranks_of(shared),
        ranks={name: getattr(mesh, name) for name in (*places, *degrees)},
        sums=sums,
        effective=effective,
        axes=mesh.device_mesh.mesh_dim_names,
    )


def look_several(cases: list[dict[str, Any]]) -> list[Seen]:
    return [look(knobs) for knobs in cases]


def meshes(
    cases: list[dict[str, Any]], world: int, ranks_per_node: int
) -> list[list[Seen]]:
    """By case, then by rank."""
    by_rank = run_ranks(look_several, world, cases, ranks_per_node=ranks_per_node)
    by_case = [list(seen) for seen in zip(*by_rank, strict=True)]
    for case in by_case:
        for rank, seen in enumerate(case):
            for name, total in seen.sums.items():
                group = getattr(seen, name)
                assert rank in group
                assert total == sum(10.0**member for member in group), name
    return by_case


def test_partition_groups_are_neighbours_and_replication_groups_hold_equal_shards() -> (
    None
):
    one, two, four = meshes([{"shard_degree": degree} for degree in (1, 2, 4)], 4, 2)
    assert [seen.shard for seen in one] == [[0], [1], [2], [3]]
    assert [seen.replicate for seen in one] == [[0, 1, 2, 3]] * 4
    assert [seen.shard for seen in two] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [seen.replicate for seen in two] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [seen.shard for seen in four] == [[0, 1, 2, 3]] * 4
    assert [seen.replicate for seen in four] == [[0], [1], [2], [3]]
    assert {seen.axes for seen in [*one, *two, *four]} == {("replicate", "shard")}
    assert [seen.ranks["shard_rank"] for seen in two] == [0, 1, 0, 1]
    assert [seen.ranks["replicate_rank"] for seen in two] == [0, 0, 1, 1]
    assert {seen.ranks["replicate_degree"] for seen in two} == {2}


def split_the_world() -> list[list[list[int]]]:
    """What a mesh of a world that can be split asks ``split_group`` for, which is
    played with ``new_group``."""
    asked: list[list[list[int]]] = []

    def split(
        split_ranks: list[list[int]], timeout: timedelta | None
    ) -> dist.ProcessGroup:
        asked.append(split_ranks)
        made = [dist.new_group(ranks, timeout=timeout) for ranks in split_ranks]
        return next(
            group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER
        )

    with (
        mock.patch("smp_core.cluster.mesh._can_split", lambda *_: True),
        mock.patch("torch.distributed.split_group", split),
    ):
        seen = look({"shard_degree": 4})
    assert (seen.intra, seen.inter) == (
        [dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1],
        ranks_across(),
    )
    return asked


def ranks_across() -> list[int]:
    return [dist.get_rank() % 2, dist.get_rank() % 2 + 2]


def test_all_groups_of_an_axis_are_one_split_of_the_world() -> None:
    """The two stages; the others are the mesh's and the world."""
    assert (
        run_ranks(split_the_world, 4, ranks_per_node=2)
        == [[[[0, 1], [2, 3]], [[0, 2], [1, 3]]]] * 4
    )


def test_named_degrees_are_resolved_and_shown() -> None:
    node, world = meshes([{"shard_degree": "node"}, {"shard_degree": "world"}], 4, 2)
    assert {seen.effective["shard_degree"] for seen in node} == {2}
    assert {seen.effective["shard_degree"] for seen in world} == {4}


def test_two_stages_are_chosen_where_there_are_two() -> None:
    cases = [
        {"shard_degree": 4},
        {"shard_degree": 4, "collectives": {"hierarchical": False}},
        {"shard_degree": 4, "collectives": {"hierarchical": True}},
        {"shard_degree": 2},
    ]
    auto, off, on, inside = meshes(cases, 4, 2)
    for case in (auto, on):
        assert [seen.intra for seen in case] == [[0, 1], [0, 1], [2, 3], [2, 3]]
        assert [seen.inter for seen in case] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    for case in (off, inside):
        assert all(seen.intra is None and seen.inter is None for seen in case)
    in_effect = [
        case[0].effective["collectives.hierarchical"]
        for case in (auto, off, on, inside)
    ]
    assert in_effect == [True, False, True, False]


def test_one_rank_per_node_has_one_stage() -> None:
    (case,) = meshes([{"shard_degree": "world"}], 2, 1)
    assert [seen.effective["collectives.hierarchical"] for seen in case] == [
        False,
        False,
    ]


@pytest.mark.slow
def test_stages_of_groups_that_span_some_of_the_nodes() -> None:
    """Four nodes of two ranks, partition groups of two nodes each."""
    (case,) = meshes([{"shard_degree": 4}], 8, 2)
    assert [seen.shard for seen in case] == [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4
    assert [seen.replicate for seen in case] == [
        [rank % 4, rank % 4 + 4] for rank in range(8)
    ]
    assert [seen.intra for seen in case] == [
        [rank // 2 * 2, rank // 2 * 2 + 1] for rank in range(8)
    ]
    assert [seen.inter for seen in case] == [
        [0, 2],
        [1, 3],
        [0, 2],
        [1, 3],
        [4, 6],
        [5, 7],
        [4, 6],
        [5, 7],
    ]


def test_context_ranks_are_inside_the_partition_group() -> None:
    """As in SMP: hybrid_shard_degree=4 with context_parallel_degree=4 on 4 ranks is
    legal."""
    cases = [
        {"shard_degree": degree, "context_parallel_degree": context}
        for degree, context in ((4, 4), (4, 2), (2, 2))
    ]
    all_four, half, pairs = meshes(cases, 4, 2)
    assert [seen.context for seen in all_four] == [[0, 1, 2, 3]] * 4
    assert [seen.ranks["context_rank"] for seen in all_four] == [0, 1, 2, 3]
    assert {
        (seen.ranks["data_rank"], seen.ranks["data_size"]) for seen in all_four
    } == {(0, 1)}
    for case in (half, pairs):
        assert [seen.context for seen in case] == [[0, 1], [0, 1], [2, 3], [2, 3]]
        assert [seen.ranks["data_rank"] for seen in case] == [0, 0, 1, 1]
        assert {seen.ranks["data_size"] for seen in case} == {2}


def test_the_data_axis_does_not_depend_on_the_shard_degree() -> None:
    for case in meshes([{"shard_degree": degree} for degree in (1, 2, 4)], 4, 2):
        assert [seen.ranks["data_rank"] for seen in case] == [0, 1, 2, 3]
        assert {seen.ranks["data_size"] for seen in case} == {4}
        assert all(seen.context is None for seen in case)


def refusals(cases: list[dict[str, Any]]) -> list[str]:
    found = []
    for knobs in cases:
        try:
            build_mesh(SmpConfig(**knobs), Topology.discover(), "cpu")
        except ValueError as error:
            found.append(str(error))
        else:
            found.append("accepted")
    try:
        build_mesh(SmpConfig(shard_degree=2), Topology.uniform(8, 2), "cpu")
    except ValueError as error:
        found.append(str(error))
    return found


def test_impossible_degrees_are_refused_on_all_ranks_with_what_is_allowed() -> None:
    cases = [
        {"shard_degree": 3},
        {"shard_degree": 8},
        {"shard_degree": "auto"},
        {"shard_degree": 2, "collectives": {"hierarchical": True}},
        {"shard_degree": 4, "context_parallel_degree": 3},
    ]
    found = run_ranks(refusals, 4, cases, ranks_per_node=2)
    assert found == [found[0]] * 4
    three, eight, auto, inside, context, foreign = found[0]
    assert (
        "shard_degree=3 does not divide the world of 4 ranks; allowed: 1, 2, 4" in three
    )
    assert "shard_degree=8" in eight and "allowed: 1, 2, 4" in eight
    assert "'auto'" in auto and "allowed here: 1, 2, 4" in auto
    assert (
        "hierarchical=True" in inside
        and "shard_degree=2" in inside
        and "{'hierarchical': 'auto'}" in inside
    )
    assert (
        "context_parallel_degree=3 does not divide shard_degree=4" in context
        and "allowed: 1, 2, 4" in context
    )
    assert "8 ranks" in foreign and "process group has 4" in foreign


def build_with_ones_own(knobs: list[dict[str, Any]], links: list[str]) -> str:
    rank = dist.get_rank()
    if links[rank]:
        os.environ[LINKS_VARIABLE] = links[rank]
    try:
        build_mesh(
            SmpConfig(**{"shard_degree": 2, **knobs[rank]}), Topology.discover(), "cpu"
        )
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        (
            [{"shard_degree": 2}] * 3 + [{"shard_degree": 4}],
            "shard_degree differs between ranks (2 on ranks 0-2; 4 on rank 3); start every rank with the same",
        ),
        (
            [{"fp8": {"amax_history_len": n}} for n in (16, 32, 16, 32)],
            "fp8 differs between ranks (",
        ),
        (
            [
                {"units": "auto"},
                {"units": partial(print, 1)},
                {"units": partial(print, 2)},
                {"units": partial(print, 3)},
            ],
            "units.modules differs between ranks ('auto' on rank 0; 'partial' on ranks 1-3)",
        ),
        ([{"units": partial(print, n)} for n in range(4)], "accepted"),
        ([{"activations": {"offload_host_gib": n}} for n in (1, 1, 2, 2)], "accepted"),
    ],
)
def test_a_configuration_that_differs_between_ranks_is_an_error_on_all_of_them(
    knobs: list[dict[str, Any]], said: str
) -> None:
    found = run_ranks(build_with_ones_own, 4, knobs, [""] * 4, ranks_per_node=2)
    assert found == [found[0]] * 4
    assert said in found[0]


def build_with_or_without_planning(knobs: list[dict[str, Any]]) -> str:
    config, topology, device = (
        SmpConfig(**knobs[dist.get_rank()]),
        Topology.discover(),
        torch.device("cpu"),
    )
    try:
        parallelize(torch.nn.Linear(2, 2), config, topology=topology, device=device)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_ranks_that_plan_their_degree_and_ranks_that_were_given_one_are_an_error_on_all_of_them() -> (
    None
):
    found = run_ranks(
        build_with_or_without_planning,
        2,
        [{"shard_degree": 2}, {"shard_degree": "auto"}],
    )
    assert (
        found[0] == found[1]
        and "shard_degree differs between ranks (2 on rank 0; 'auto' on rank 1)"
        in found[0]
    )


def parallelize_ones_own(case: str) -> str:
    model = torch.nn.Linear(4, 4, bias=dist.get_rank() == 0 or case != "parameters")
    if case == "meta" and dist.get_rank() == 1:
        model = model.to("meta")
    model.weight.requires_grad_(dist.get_rank() == 0 or case != "flags")
    try:
        parallelize(model, SmpConfig(shard_degree=2))
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("case", ["parameters", "meta", "flags"])
def test_a_model_that_differs_between_ranks_is_an_error_on_all_of_them(
    case: str,
) -> None:
    found = run_ranks(parallelize_ones_own, 2, case)
    assert (
        found[0] == found[1]
        and "the model differs between ranks ('Linear with" in found[0]
    )
    first = {
        "parameters": "number 1 ('bias [4] torch.float32' on rank 0; 'none' on rank 1)",
        "flags": "number 0 ('weight [4, 4] torch.float32' on rank 0; 'weight [4, 4] torch.float32, frozen' on rank 1)",
        "meta": None,
    }[case]
    assert (
        first is None
        or f"the first parameter or buffer that differs is {first}" in found[0]
    ), found[0]
    assert ("on the meta device" in found[0]) == (case == "meta")


def decide_ones_own() -> str:
    def decide() -> bool:
        if dist.get_rank() == 1:
            raise RuntimeError("no memory")
        return True

    try:
        agreed(SmpConfig(), decide)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_a_rank_that_cannot_decide_is_an_error_on_all_of_them() -> None:
    # The others would wait for it until their timeout.
    said = "RuntimeError: no memory"
    assert run_ranks(decide_ones_own, 2) == [f"ValueError: rank 1: {said}", said]


def with_the_mesh_of_another_degree() -> str:
    mesh, _ = build_mesh(SmpConfig(shard_degree=2), Topology.discover(), "cpu")
    with pytest.raises(ValueError) as refused:
        parallelize(torch.nn.Linear(2, 2), SmpConfig(shard_degree=1), mesh=mesh)
    return str(refused.value)


def test_the_mesh_of_a_model_before_has_to_fit() -> None:
    for said in run_ranks(with_the_mesh_of_another_degree, 2):
        assert said.startswith("shard_degree=1") and "has 2" in said


def test_measured_links_are_those_of_all_ranks(tmp_path: Path) -> None:
    path, other = tmp_path / "links.json", tmp_path / "other.json"
    path.write_text("{}")
    other.write_text("{}")
    assert (
        run_ranks(build_with_ones_own, 2, [{}] * 2, [str(path), str(other)])
        == ["accepted"] * 2
    )
    other.write_text("{ }")
    for second, said in (
        (str(other), "a file with the digest"),
        ("", "not set on rank 1"),
        ("gone", "No such file"),
    ):
        found = run_ranks(build_with_ones_own, 2, [{}] * 2, [str(path), second])
        assert (
            found[0] == found[1]
            and "SMP_LINKS differs between ranks" in found[0]
            and said in found[0]
        )


def test_a_context_degree_above_the_shard_degree_is_refused_before_any_mesh() -> None:
    with pytest.raises(ValueError, match=r"context_parallel_degree=4.*shard_degree=2"):
        SmpConfig(shard_degree=2, context_parallel_degree=4)


def degrees_over_three_ranks_a_node() -> str:
    with pytest.raises(ValueError) as caught:
        build_mesh(SmpConfig(shard_degree=2), Topology.discover(), "cpu")
    return str(caught.value)


@pytest.mark.slow
def test_a_degree_that_straddles_nodes_is_refused() -> None:
    for message in run_ranks(degrees_over_three_ranks_a_node, 6, ranks_per_node=3):
        assert "straddle nodes of 3 ranks" in message and "allowed: 1, 3, 6" in message

"""Groups are made on all ranks alike, connected from the start, and give up with the
default one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from smp_core.cluster.layout import GRADIENTS, PARTITION, Axis
from smp_core.cluster.mesh import SmpMesh
from smp_core.config import SmpConfig
from smp_core.entry import build_mesh
from smp_core.topology import Topology
from tests.harness import run_ranks


def groups_of(mesh: SmpMesh) -> dict[str, dist.ProcessGroup]:
    both = {
        "partition": mesh.stages(*PARTITION),
        "replicas": mesh.stages(Axis.REPLICATE),
        "gradients": mesh.stages(*GRADIENTS),
    }
    named = {
        f"{name}, stage {i}": group
        for name, two in both.items()
        for i, group in enumerate(two or ())
    }
    named |= {
        "shard": mesh.shard_group,
        "replicate": mesh.replicate_group,
        "gradients": mesh.gradient_group,
    }
    if mesh.context_degree > 1:
        named["context"] = mesh.group(Axis.CONTEXT)
    return named | {"secondary": mesh.secondary(2)}


def look_at_new_groups(
    cases: list[dict[str, Any]], limit: float
) -> list[tuple[list[str], list[str]]]:
    """Groups of several ranks that nobody has used when the mesh is there, and used
    ones of one rank; and those with a time limit of their own."""
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(timedelta(seconds=limit))
    found, used = [], set()

    def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        used.add(group)
        plain(tensor, group=group)

    for knobs in cases:
        plain = dist.all_reduce
        with mock.patch.object(dist, "all_reduce", all_reduce):
            mesh, _ = build_mesh(SmpConfig(**knobs), Topology.discover(), "cpu")
            groups = groups_of(mesh)
        limits = {
            name: group._get_backend(mesh.device).options._timeout
            for name, group in groups.items()
        }
        others = [
            name for name, its in limits.items() if its != timedelta(seconds=limit)
        ]
        alone = [group for group in used if dist.get_world_size(group) == 1]
        unused = [
            name
            for name, group in groups.items()
            if group not in used and dist.get_world_size(group) > 1
        ]
        found.append(([*unused, *map(str, alone)], others))
    return found


def test_every_group_is_connected_when_it_is_made_and_gives_up_when_the_default_one_does() -> (
    None
):
    """NCCL holds the host while ranks connect; and the limit that a strategy was given
    holds for all its traffic."""
    cases = [
        {"shard_degree": 4},
        {"shard_degree": 2},
        {"shard_degree": 2, "context_parallel_degree": 2},
    ]
    for of_rank in run_ranks(look_at_new_groups, 4, cases, 77.0, ranks_per_node=2):
        assert of_rank == [([], [])] * len(cases)


def groups_between_end_stages() -> list[list[int]]:
    made: list[list[int]] = []
    new_group = dist.new_group

    def noting(ranks: list[int], **options: Any) -> Any:
        made.append(ranks)
        return new_group(ranks, **options)

    mesh, _ = build_mesh(
        SmpConfig(shard_degree=1, pipeline_parallel_degree=4),
        Topology.discover(),
        "cpu",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", noting)
        for _ in range(2):
            between = mesh.between_stages((0, 3))
    assert (between is None) == (mesh.stage in (1, 2))
    return made


def test_all_ranks_make_the_groups_between_end_stages() -> None:
    """Groups that only some ranks make keep all from making any further one
    together."""
    assert run_ranks(groups_between_end_stages, 4) == [[[0, 3], [1], [2]]] * 4

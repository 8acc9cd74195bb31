"""SmpMesh: the axes and process groups of one run.

Ranks are laid out (replicate, shard), shard innermost, and inside shard (data, context), context innermost, so that a
partition group is as close together as the cluster allows:

    replicate   world / shard_degree replicas of the model states (MiCS: replication group)
    shard       the partition group, context ranks included
    context     ranks that hold pieces of one sequence
    data        ranks that read different samples: replicate x shard / context, whatever the shard degree
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from smp_core.agreement import require_agreement
from smp_core.config import SmpConfig
from smp_core.topology import Topology

Stages = tuple[dist.ProcessGroup, dist.ProcessGroup]


@dataclass(frozen=True)
class SmpMesh:
    """The degrees, the DeviceMesh and the groups this rank belongs to. Built once per run by :meth:`build`.

    Attributes:
        device_mesh: 2-D, axes ("replicate", "shard").
        shard_mesh: its 1-D slice over this rank's partition group: what FSDP2 gets.
        hierarchical: whether collectives over the partition group run in two stages.
        intra_group: ranks of the partition group on this node; None unless hierarchical.
        inter_group: ranks of the partition group with this local rank; None unless hierarchical.
        context_group: ranks that share this rank's sequences; None when the context degree is 1.
        replica_stages: for a replication group with several ranks on a node and several nodes: its ranks on this node,
            and its ranks with this place on their nodes. None: its sums have one stage.
        world_stages: the same for the world.
        secondary_mesh: (across, secondary) over the partition group: ranks that each hold a whole copy, sharded among
            them, between forward and backward. None unless ``reshard_after_forward`` asks for one.
    """

    topology: Topology
    rank: int
    device: torch.device
    device_mesh: DeviceMesh
    shard_degree: int
    replicate_degree: int
    context_degree: int
    hierarchical: bool
    intra_group: dist.ProcessGroup | None
    inter_group: dist.ProcessGroup | None
    context_group: dist.ProcessGroup | None
    replica_stages: Stages | None
    world_stages: Stages | None
    secondary_mesh: DeviceMesh | None

    @classmethod
    def build(cls, config: SmpConfig, topology: Topology, device: torch.device | str) -> tuple[SmpMesh, SmpConfig]:
        """Make axes and groups. Collective over the world.

        Args:
            config: ``shard_degree`` may be an int, "node" or "world"; "auto" has been resolved before
                (:func:`smp_core.planning.memory.smallest_shard_degree`).
            device: this rank's device.

        Returns:
            the mesh, and the config with the degrees and ``hierarchical`` in effect; measured links may take "auto"
            back to one stage once a model is known (:mod:`smp_core.sharding.stages`).

        Raises:
            ValueError: a degree that does not divide the world or straddles nodes, a context degree that does not
                divide the shard degree, ``hierarchical=True`` for a group that has only one stage, a configuration that
                is not the same on all ranks.
        """
        device = torch.device(device)
        world, rank = topology.world_size, dist.get_rank()
        if dist.get_world_size() != world:
            raise ValueError(f"the topology has {world} ranks but the process group has {dist.get_world_size()}")
        require_agreement(config)
        degree = topology.resolve_shard_degree(config.shard_degree)
        if degree != config.shard_degree:
            config = config.with_resolved(
                "shard_degree",
                degree,
                f"{config.shard_degree!r} of {topology.num_nodes} x {topology.ranks_per_node} ranks",
            )
        context = config.context_parallel_degree
        if degree % context:
            raise ValueError(
                f"context_parallel_degree={context} does not divide shard_degree={degree}: context ranks are part of "
                f"the partition group; allowed: {', '.join(str(c) for c in range(1, degree + 1) if degree % c == 0)}"
            )
        in_stages = config.hierarchical is not False
        hierarchical, why = _resolve_hierarchical(config.hierarchical, degree, topology)
        if hierarchical is not config.hierarchical:
            config = config.with_resolved("hierarchical", hierarchical, why)

        device_mesh = init_device_mesh(device.type, (world // degree, degree), mesh_dim_names=("replicate", "shard"))
        groups = _Groups(rank)
        for axis in ("replicate", "shard"):
            groups.know(device_mesh.get_group(axis))
        k = topology.ranks_per_node
        nodes = [list(range(first, first + k)) for first in range(0, world, k)]
        intra = inter = replica_stages = world_stages = None
        if two_stages(degree, topology) and hierarchical:
            starts = range(0, world, degree)
            intra = groups.own(nodes)
            inter = groups.own([list(range(s + i, s + degree, k)) for s in starts for i in range(k)])
        if in_stages and k > 1 and topology.num_nodes > 1:
            world_stages = (groups.own(nodes), groups.own([list(range(i, world, k)) for i in range(k)]))
            if degree < k:
                inside = [list(range(n[0] + i, n[0] + k, degree)) for n in nodes for i in range(degree)]
                replica_stages = (groups.own(inside), world_stages[1])
        config = _with_secondary_degree(config, degree, topology)
        secondary = None
        if type(config.reshard_after_forward) is int:
            n = config.reshard_after_forward
            held = groups.own([list(range(first, first + n)) for first in range(0, world, n)])
            across = groups.own([list(range(s + i, s + degree, n)) for s in range(0, world, degree) for i in range(n)])
            first = rank - rank % degree
            ranks = torch.arange(first, first + degree).view(-1, n)
            secondary = DeviceMesh.from_group(
                [across, held], device.type, mesh=ranks, mesh_dim_names=("across", "secondary")
            )
        sharing = groups.own([list(range(s, s + context)) for s in range(0, world, context)]) if context > 1 else None
        mesh = cls(
            topology=topology,
            rank=rank,
            device=device,
            device_mesh=device_mesh,
            shard_degree=degree,
            replicate_degree=world // degree,
            context_degree=context,
            hierarchical=intra is not None,
            intra_group=intra,
            inter_group=inter,
            context_group=sharing,
            replica_stages=replica_stages,
            world_stages=world_stages,
            secondary_mesh=secondary,
        )
        return mesh, config

    @property
    def shard_mesh(self) -> DeviceMesh:
        return self.device_mesh["shard"]

    @property
    def shard_group(self) -> dist.ProcessGroup:
        return self.device_mesh.get_group("shard")

    @property
    def replicate_group(self) -> dist.ProcessGroup:
        return self.device_mesh.get_group("replicate")

    @property
    def shard_ranks(self) -> range:
        """Global ranks of the partition group."""
        first = self.rank - self.shard_rank
        return range(first, first + self.shard_degree)

    @property
    def replicate_ranks(self) -> range:
        """Global ranks of the replication group."""
        return range(self.shard_rank, self.topology.world_size, self.shard_degree)

    @property
    def world_group(self) -> dist.ProcessGroup:
        return cast(dist.ProcessGroup, dist.group.WORLD)

    @property
    def shard_rank(self) -> int:
        return self.rank % self.shard_degree

    @property
    def replicate_rank(self) -> int:
        return self.rank // self.shard_degree

    @property
    def context_rank(self) -> int:
        return self.rank % self.context_degree

    @property
    def data_size(self) -> int:
        """Ranks that read different samples."""
        return self.topology.world_size // self.context_degree

    @property
    def data_rank(self) -> int:
        return self.rank // self.context_degree


def two_stages(degree: int, topology: Topology) -> bool:
    """Whether partition groups of ``degree`` ranks span nodes with several of their ranks on each."""
    return degree > topology.ranks_per_node > 1


def _resolve_hierarchical(asked: bool | str, degree: int, topology: Topology) -> tuple[bool, str]:
    k, nodes = topology.ranks_per_node, topology.num_nodes
    replicas_meet = degree < k and nodes > 1
    if asked == "auto":
        if two_stages(degree, topology):
            return True, f"the partition group spans {degree // k} nodes with {k} ranks each"
        if degree > k:
            return False, "one rank per node: there is only one stage"
        if replicas_meet:
            return True, f"the replication group spans {nodes} nodes with {k // degree} ranks each"
        return False, "the partition group lies inside one node"
    if asked and not two_stages(degree, topology) and not replicas_meet:
        raise ValueError(
            "hierarchical=True needs a partition or replication group that spans nodes with more than one rank on "
            f"each, but with shard_degree={degree} on nodes of {k} ranks there is none; write hierarchical='auto' or "
            "False, or a larger shard_degree"
        )
    return bool(asked), "as asked"


def _with_secondary_degree(config: SmpConfig, degree: int, topology: Topology) -> SmpConfig:
    """Settle how many ranks hold a copy after forward: an integer below the shard degree, True or False."""
    asked = config.reshard_after_forward
    if isinstance(asked, bool):
        return config
    k = topology.ranks_per_node
    if asked == "node" and degree <= k:
        return config.with_resolved("reshard_after_forward", True, "the partition group lies inside one node already")
    if asked == "node" and k == 1:
        return config.with_resolved("reshard_after_forward", False, "one rank per node: its copy is a whole one")
    if asked == "node":
        return config.with_resolved("reshard_after_forward", k, f"a copy sharded over the {k} ranks of each node")
    assert isinstance(asked, int)
    if degree % asked:
        allowed = ", ".join(["true", "false", *(str(n) for n in range(2, degree + 1) if degree % n == 0)])
        raise ValueError(f"reshard_after_forward={asked} does not divide shard_degree={degree}; allowed: {allowed}")
    if asked == degree:
        return config.with_resolved("reshard_after_forward", True, "as many ranks as the partition group has")
    return config


class _Groups:
    """Process groups by their ranks, each made once."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._known: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def know(self, group: dist.ProcessGroup) -> None:
        self._known[tuple(dist.get_process_group_ranks(group))] = group

    def own(self, groups: list[list[int]]) -> dist.ProcessGroup:
        """The one this rank is in. All are made, on every rank in the same order as torch.distributed wants it."""
        mine = next(tuple(ranks) for ranks in groups if self._rank in ranks)
        if mine not in self._known:
            for ranks in groups:
                group = dist.new_group(ranks)
                if self._rank in ranks:
                    self._known[mine] = group
        return self._known[mine]

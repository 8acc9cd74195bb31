"""SmpMesh: the process groups of one run, on the axes of its layout (:mod:`smp_core.layout`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from smp_core.agreement import require_agreement
from smp_core.config import SmpConfig
from smp_core.layout import DATA, GRADIENTS, PARTITION, Layout, Ranks, split, stages
from smp_core.topology import Topology

Stages = tuple[dist.ProcessGroup, dist.ProcessGroup]


@dataclass(frozen=True)
class SmpMesh:
    """The layout, the DeviceMesh and the groups this rank belongs to. Built once per run by :meth:`build`.

    Attributes:
        layout: the axes and their sizes.
        device_mesh: 2-D, axes ("replicate", "shard").
        shard_mesh: its 1-D slice over this rank's partition group: what FSDP2 gets.
        replicate_group: ranks that hold the same shard. No other collectives use its communicator: replicas may send a
            unit's sum before or after what all ranks send in one order.
        hierarchical: whether collectives over the partition group run in two stages.
        intra_group: ranks of the partition group on this node; None unless hierarchical.
        inter_group: ranks of the partition group with this local rank; None unless hierarchical.
        context_group: ranks that share this rank's sequences; None when the context degree is 1.
        gradient_group: ranks whose gradients are added up.
        replica_stages: for a replication group with several ranks on a node and several nodes: its ranks on this node,
            and its ranks with this place on their nodes. None: its sums have one stage.
        gradient_stages: the same for all ranks whose gradients are added up.
        secondary_mesh: (across, secondary) over the partition group: ranks that each hold a whole copy, sharded among
            them, between forward and backward. None unless ``reshard_after_forward`` asks for one.
    """

    topology: Topology
    layout: Layout
    rank: int
    device: torch.device
    device_mesh: DeviceMesh
    replicate_group: dist.ProcessGroup
    hierarchical: bool
    intra_group: dist.ProcessGroup | None
    inter_group: dist.ProcessGroup | None
    context_group: dist.ProcessGroup | None
    gradient_group: dist.ProcessGroup
    replica_stages: Stages | None
    gradient_stages: Stages | None
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
        layout = Layout.of_world(world, degree, config.context_parallel_degree)
        in_stages = config.hierarchical is not False
        hierarchical, why = _resolve_hierarchical(config.hierarchical, degree, topology)
        if hierarchical is not config.hierarchical:
            config = config.with_resolved("hierarchical", hierarchical, why)

        sizes = (layout.size("replicate"), layout.size(*PARTITION))
        device_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))
        groups = _Groups(rank)
        for known in (device_mesh.get_group("replicate"), device_mesh.get_group("shard"), _world_group()):
            groups.know(known)
        partitions, replications = layout.groups(*PARTITION), layout.groups("replicate")
        replicate = device_mesh.get_group("replicate")
        if layout.size(*GRADIENTS) == layout.replicate > 1:  # the same ranks: torch gives the same group
            replicate = groups.make(replications)
        partition_stages = groups.own_stages(partitions, topology) if hierarchical else None
        replica_stages = groups.own_stages(replications, topology) if in_stages else None
        gradient_stages = groups.own_stages(layout.groups(*GRADIENTS), topology) if in_stages else None
        intra, inter = partition_stages or (None, None)
        config = _with_secondary_degree(config, degree, topology)
        secondary = None
        if type(config.reshard_after_forward) is int:
            columns, rows = split(partitions, config.reshard_after_forward)
            held, across = groups.own(rows), groups.own(columns)
            grid = torch.tensor(layout.ranks(rank, *PARTITION)).view(-1, config.reshard_after_forward)
            secondary = DeviceMesh.from_group(
                [across, held], device.type, mesh=grid, mesh_dim_names=("across", "secondary")
            )
        sharing = groups.own(layout.groups("context")) if layout.context > 1 else None
        mesh = cls(
            topology=topology,
            layout=layout,
            rank=rank,
            device=device,
            device_mesh=device_mesh,
            replicate_group=replicate,
            hierarchical=intra is not None,
            intra_group=intra,
            inter_group=inter,
            context_group=sharing,
            gradient_group=groups.own(layout.groups(*GRADIENTS)),
            replica_stages=replica_stages,
            gradient_stages=gradient_stages,
            secondary_mesh=secondary,
        )
        return mesh, config

    @property
    def shard_degree(self) -> int:
        """Ranks of a partition group, context ranks included."""
        return self.layout.size(*PARTITION)

    @property
    def replicate_degree(self) -> int:
        return self.layout.replicate

    @property
    def context_degree(self) -> int:
        return self.layout.context

    @property
    def shard_mesh(self) -> DeviceMesh:
        return self.device_mesh["shard"]

    @property
    def shard_group(self) -> dist.ProcessGroup:
        return self.device_mesh.get_group("shard")

    @property
    def shard_ranks(self) -> Ranks:
        """Global ranks of the partition group."""
        return self.layout.ranks(self.rank, *PARTITION)

    @property
    def replicate_ranks(self) -> Ranks:
        """Global ranks of the replication group."""
        return self.layout.ranks(self.rank, "replicate")

    @property
    def world_group(self) -> dist.ProcessGroup:
        return _world_group()

    @property
    def gradient_degree(self) -> int:
        """Ranks whose gradients are added up: what sums are divided by."""
        return self.layout.size(*GRADIENTS)

    @property
    def shard_rank(self) -> int:
        return self.layout.coordinate(self.rank, *PARTITION)

    @property
    def replicate_rank(self) -> int:
        return self.layout.coordinate(self.rank, "replicate")

    @property
    def context_rank(self) -> int:
        return self.layout.coordinate(self.rank, "context")

    @property
    def data_size(self) -> int:
        """Ranks that read different samples."""
        return self.layout.size(*DATA)

    @property
    def data_rank(self) -> int:
        return self.layout.coordinate(self.rank, *DATA)


def _world_group() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.group.WORLD)


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

    def own(self, groups: Sequence[Ranks]) -> dist.ProcessGroup:
        """The one this rank is in. All are made, on every rank in the same order as torch.distributed wants it."""
        mine = next(ranks for ranks in groups if self._rank in ranks)
        if mine not in self._known:
            self._known[mine] = self.make(groups)
        return self._known[mine]

    def make(self, groups: Sequence[Ranks]) -> dist.ProcessGroup:
        """The same, with a communicator of its own."""
        made = {ranks: dist.new_group(list(ranks)) for ranks in groups}
        return next(group for ranks, group in made.items() if self._rank in ranks)

    def own_stages(self, groups: Sequence[Ranks], topology: Topology) -> Stages | None:
        """This rank's groups of the two stages of its group (:func:`smp_core.layout.stages`)."""
        both = stages(groups, topology)
        return None if both is None else (self.own(both[0]), self.own(both[1]))

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

from smp_core.config import SmpConfig
from smp_core.topology import Topology


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

    @classmethod
    def build(cls, config: SmpConfig, topology: Topology, device: torch.device | str) -> tuple[SmpMesh, SmpConfig]:
        """Make axes and groups. Collective over the world.

        Args:
            config: ``shard_degree`` may be an int, "node" or "world"; "auto" has been resolved before
                (:func:`smp_core.planning.memory.smallest_shard_degree`).
            device: this rank's device.

        Returns:
            the mesh, and the config with the degrees and ``hierarchical`` in effect.

        Raises:
            ValueError: a degree that does not divide the world or straddles nodes, a context degree that does not
                divide the shard degree, ``hierarchical=True`` for a group that has only one stage.
        """
        device = torch.device(device)
        world, rank = topology.world_size, dist.get_rank()
        if dist.get_world_size() != world:
            raise ValueError(f"the topology has {world} ranks but the process group has {dist.get_world_size()}")
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
        hierarchical, why = _resolve_hierarchical(config.hierarchical, degree, topology)
        if hierarchical is not config.hierarchical:
            config = config.with_resolved("hierarchical", hierarchical, why)

        device_mesh = init_device_mesh(device.type, (world // degree, degree), mesh_dim_names=("replicate", "shard"))
        intra = inter = None
        if hierarchical:
            k = topology.ranks_per_node
            starts = range(0, world, degree)
            intra = _own_group([list(range(s + n, s + n + k)) for s in starts for n in range(0, degree, k)], rank)
            inter = _own_group([list(range(s + i, s + degree, k)) for s in starts for i in range(k)], rank)
        sharing = (
            _own_group([list(range(s, s + context)) for s in range(0, world, context)], rank) if context > 1 else None
        )
        mesh = cls(
            topology=topology,
            rank=rank,
            device=device,
            device_mesh=device_mesh,
            shard_degree=degree,
            replicate_degree=world // degree,
            context_degree=context,
            hierarchical=hierarchical,
            intra_group=intra,
            inter_group=inter,
            context_group=sharing,
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


def _resolve_hierarchical(asked: bool | str, degree: int, topology: Topology) -> tuple[bool, str]:
    two_stages = degree > topology.ranks_per_node > 1
    if asked == "auto":
        if two_stages:
            nodes = degree // topology.ranks_per_node
            return True, f"the partition group spans {nodes} nodes with {topology.ranks_per_node} ranks each"
        if degree > topology.ranks_per_node:
            return False, "one rank per node: there is only one stage"
        return False, "the partition group lies inside one node"
    if asked and not two_stages:
        raise ValueError(
            f"hierarchical=True needs a partition group that spans nodes with more than one rank on each, but "
            f"shard_degree={degree} on nodes of {topology.ranks_per_node} ranks does not; write hierarchical='auto' or "
            "False, or a larger shard_degree"
        )
    return bool(asked), "as asked"


def _own_group(groups: list[list[int]], rank: int) -> dist.ProcessGroup:
    """Make all the groups, on every rank in the same order as torch.distributed wants it, and return the own one."""
    own = None
    for ranks in groups:
        group = dist.new_group(ranks)
        if rank in ranks:
            own = group
    assert own is not None
    return own

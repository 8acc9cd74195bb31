"""SmpMesh: the process groups of one run, on the axes of its layout
(:mod:`smp_core.cluster.layout`).

Every group gives up when the default one does: by itself torch gives each new group its
own default. Private names: a group's timeout can be set but not read
(``_device_types``, ``_get_backend``, and ``_timeout`` of its options).

Every group is used once when it is made, while all ranks are here. NCCL connects ranks
in the first collective that needs them, and holds the host meanwhile; later ranks meet
where replicas may differ in what comes next, and one that is held in a sum of a unit
cannot tell the other, which has not used the unit, to join.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from smp_core.cluster.layout import (
    DATA,
    DEGREES,
    GRADIENTS,
    GROUPS,
    PARTITION,
    SAME_MODEL,
    Axes,
    Axis,
    Layout,
    Ranks,
    split,
    stages,
)
from smp_core.config import SmpConfig
from smp_core.topology import Topology
from smp_core.torch_facts import streams

Stages = tuple[dist.ProcessGroup, dist.ProcessGroup]


@dataclass(frozen=True)
class Column:
    """The ranks that hold the pipeline stages of one model. All three groups have the
    same ranks.

    Attributes:
        forward: carries activations, from each stage to the next.
        backward: carries their gradients, so that a receive of the one does not wait
            behind the other.
        host: carries numbers and words from host to host; no device waits for them.
    """

    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    host: dist.ProcessGroup


@dataclass(frozen=True)
class ExpertRanks:
    """The partition group as ranks that divide experts, and ranks that hold parts of
    the same ones.

    Attributes:
        mesh: "rest" x "experts", with tensor ranks "tensor" inside.
        all: the ranks that divide experts; its communicator is used for tokens only, as
            those of ``stages``.
        stages: those on this node, and those with this place on their nodes; None where
            there is one stage.
    """

    mesh: DeviceMesh
    all: dist.ProcessGroup
    stages: Stages | None


@dataclass(frozen=True)
class SmpMesh:
    """A layout with the groups this rank belongs to on its axes. Built once per run by
    :meth:`build`.

    Attributes:
        layout: the axes and their sizes.
        device_mesh: axes "replicate" and "shard", with tensor ranks "tensor" inside,
            with stages "pipeline" outside.
        shard_degree: ranks of a partition group, context ranks included.
        gradient_degree: ranks whose gradients are added up: what sums are divided by.
        stage: the pipeline stage of this rank.
        shard_ranks: global ranks of the partition group.
        shard_group: the partition group.
        replicate_group: ranks that hold the same shard. Nothing but sums of gradients
            uses its communicator.
        model_group: ranks that compute the same layers, tensor ranks included: they
            begin with equal values.
        gradient_group: ranks whose gradients are added up: they hold different tokens.
            Counts of tokens are added up over them.
        data_group: ranks that read different samples, in the order of
            :attr:`data_rank`. Counts of samples are added up over them.
    """

    topology: Topology
    layout: Layout
    rank: int
    device: torch.device
    device_mesh: DeviceMesh
    shard_degree: int
    replicate_degree: int
    context_degree: int
    tensor_degree: int
    pipeline_degree: int
    gradient_degree: int
    stage: int
    shard_ranks: Ranks
    shard_group: dist.ProcessGroup
    replicate_group: dist.ProcessGroup
    model_group: dist.ProcessGroup
    gradient_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    _groups: _Groups
    _by_axes: Mapping[Axes, dist.ProcessGroup]
    _column: Column | None
    _stages: dict[Axes, Stages | None] = field(default_factory=dict)
    _expert_ranks: dict[tuple[int, bool], ExpertRanks] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        knobs: SmpConfig,
        layout: Layout,
        topology: Topology,
        device: torch.device | str,
    ) -> SmpMesh:
        """Make the groups of a layout that was settled, as its knobs have them.
        Collective over the world.

        Args:
            device: this rank's device.

        Raises:
            ValueError: the topology is another world's.
        """
        device, rank = torch.device(device), dist.get_rank()
        if dist.get_world_size() != topology.world_size:
            raise ValueError(
                f"the topology has {topology.world_size} ranks but the process group has {dist.get_world_size()}"
            )
        # Context ranks hold shards too: to torch they are ranks of the shard axis.
        sizes = {axis: layout.size(axis) for axis in Axis if axis is not Axis.CONTEXT}
        sizes[Axis.SHARD] = layout.size(*PARTITION)
        # Axes that were not asked for would be dimensions of size 1.
        sizes = {
            axis: size
            for axis, size in sizes.items()
            if size > 1 or axis not in DEGREES
        }
        names = tuple(axis.value for axis in sizes)
        device_mesh = init_device_mesh(
            device.type, tuple(sizes.values()), mesh_dim_names=names
        )
        # Groups that torch has made already are used again, under the common timeout.
        groups = _Groups(rank, device, map(device_mesh.get_group, names))
        by_axes: dict[Axes, dist.ProcessGroup] = {}
        for axes in GROUPS:
            if set(axes) <= DEGREES.keys() and layout.size(*axes) == 1:
                continue  # such a group is never used
            # Sums over replicas get a communicator of their own where GRADIENTS has the
            # same ranks (Layout.replicas_are_alone).
            members = layout.groups(*axes)
            alone = axes == (Axis.REPLICATE,) and layout.replicas_are_alone
            by_axes[axes] = groups.make(members) if alone else groups.own(members)
        column = None
        # Activations and their gradients must not wait for each other.
        if layout.pipeline > 1:
            members = layout.groups(Axis.PIPELINE)
            column = Column(
                by_axes[Axis.PIPELINE,], groups.make(members), groups.of_hosts(members)
            )
        mesh = cls(
            topology,
            layout,
            rank,
            device,
            device_mesh,
            shard_degree=layout.size(*PARTITION),
            replicate_degree=layout.replicate,
            context_degree=layout.context,
            tensor_degree=layout.tensor,
            pipeline_degree=layout.pipeline,
            gradient_degree=layout.size(*GRADIENTS),
            stage=layout.coordinate(rank, Axis.PIPELINE),
            shard_ranks=layout.ranks(rank, *PARTITION),
            shard_group=by_axes[PARTITION],
            replicate_group=by_axes[Axis.REPLICATE,],
            model_group=by_axes[SAME_MODEL],
            gradient_group=by_axes[GRADIENTS],
            data_group=by_axes[DATA],
            _groups=groups,
            _by_axes=by_axes,
            _column=column,
        )
        # All connections are made here, while all ranks are at the same place.
        groups.connect()
        # A number: of ranks that hold a copy between forward and backward.
        keep = knobs.reshard_after_forward
        if type(keep) is int:
            mesh.secondary(keep)
        return mesh

    def secondary(self, degree: int) -> dist.ProcessGroup:
        """Return the ``degree`` neighbours in the partition group that hold the
        unsharded parameters between forward and backward, a part each. Collective over
        the world at its first use."""
        _, rows = split(self.layout.groups(*PARTITION), degree)
        holders = self._groups.own(rows)
        self._groups.connect()
        return holders

    def experts(self, degree: int, in_stages: bool) -> ExpertRanks:
        """Return the groups of ``degree`` neighbours in the partition group that divide
        experts. Collective over the world at its first use.

        Args:
            in_stages: make groups for exchanges in two stages, where there are two.
        """
        if (degree, in_stages) not in self._expert_ranks:
            # Neighbours divide the experts (rows); ranks of one place in their rows
            # hold the same ones (columns).
            columns, rows = split(self.layout.groups(*PARTITION), degree)
            # The mesh that each rank's experts are sharded over, with tensor ranks
            # inside.
            axes = [self._groups.own(columns), self._groups.own(rows)]
            shape = [-1, degree]
            names = ["rest", "experts"]
            if self.tensor_degree > 1:
                axes.append(self.group(Axis.TENSOR))
                shape.append(self.tensor_degree)
                names.append(Axis.TENSOR.value)
            ranks = torch.tensor(
                self.layout.ranks(self.rank, *PARTITION, Axis.TENSOR)
            ).view(shape)
            mesh = DeviceMesh.from_group(
                axes, self.device.type, ranks, mesh_dim_names=tuple(names)
            )
            # The groups that tokens travel in.
            # Tokens have communicators of their own: their exchanges run beside gathers
            # of parameters.
            two = stages(rows, self.topology) if in_stages else None
            pair = (
                None
                if two is None
                else (self._groups.make(two[0]), self._groups.make(two[1]))
            )
            self._expert_ranks[degree, in_stages] = ExpertRanks(
                mesh, self._groups.make(rows), pair
            )
            self._groups.connect()
        return self._expert_ranks[degree, in_stages]

    def holders(self) -> list[DeviceMesh]:
        """Return each pipeline stage's first partition group as a mesh. Its ranks show
        which stage holds a parameter.

        No groups are made for them: where this rank is not in a mesh, its own partition
        group stands in, and torch calls no collective there."""
        partitions = [
            self.layout.ranks(first, *PARTITION)
            for first in self.layout.ranks(0, Axis.PIPELINE)
        ]
        # The group is a stand-in: torch needs one, and uses it on its own ranks only.
        own, names = [self.shard_group], (Axis.SHARD.value,)
        return [
            DeviceMesh.from_group(
                own, self.device.type, torch.tensor(ranks), mesh_dim_names=names
            )
            for ranks in partitions
        ]

    def between_stages(self, stages: Sequence[int]) -> dist.ProcessGroup | None:
        """Return the ranks of some pipeline stages that differ from this one in their
        stage only; None if this rank's stage is none of them. Collective over the world
        at its first use."""
        columns = self.layout.groups(Axis.PIPELINE)
        # A group of each column's ranks on these stages; every other rank is one by
        # itself.
        groups: list[tuple[int, ...]] = []
        for column in columns:
            groups.append(tuple(column[stage] for stage in stages))
        groups += [
            (rank,)
            for column in columns
            for stage, rank in enumerate(column)
            if stage not in stages
        ]
        group = self._groups.own(groups)
        self._groups.connect()
        return group if self.stage in stages else None

    def group(self, *axes: Axis) -> dist.ProcessGroup:
        """Return this rank's group along these axes of the layout: all ranks that
        differ from it on these axes only."""
        return self._by_axes[axes]

    def stages(self, *axes: Axis) -> Stages | None:
        """Return the same group's ranks on this node, and its ranks with this place on
        their nodes; None where its collectives have one stage, because it lies on one
        node or has one rank on each. Collective over the world at its first use."""
        # Made when first asked for; None is an answer that is kept, too.
        if axes not in self._stages:
            both = stages(self.layout.groups(*axes), self.topology)
            self._stages[axes] = (
                None
                if both is None
                else (self._groups.own(both[0]), self._groups.own(both[1]))
            )
            self._groups.connect()
        return self._stages[axes]

    @property
    def column(self) -> Column:
        """The pipeline stages' ranks; there only where there are several."""
        assert self._column is not None, "a run without pipeline stages"
        return self._column

    @property
    def communicators(self) -> list[int]:
        """The ranks of each group that has several and that devices talk in: what NCCL
        takes memory for."""
        # Groups of one rank have no communicator (connect).
        return sorted(filter(lambda ranks: ranks > 1, self._groups.sizes))

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """The ranks that hold parts of one layer; there only where they are several."""
        return self.device_mesh[Axis.TENSOR.value]

    @property
    def world_group(self) -> dist.ProcessGroup:
        return self._groups.world

    @property
    def model_degree(self) -> int:
        """Ranks of :attr:`model_group`."""
        return self.layout.size(*SAME_MODEL)

    @property
    def shard_rank(self) -> int:
        return self.layout.coordinate(self.rank, *PARTITION)

    @property
    def replicate_rank(self) -> int:
        return self.layout.coordinate(self.rank, Axis.REPLICATE)

    @property
    def context_rank(self) -> int:
        return self.layout.coordinate(self.rank, Axis.CONTEXT)

    @property
    def batch_degree(self) -> int:
        """Ranks that read the same batch: neighbours, and the same ranks of other
        pipeline stages."""
        return self.layout.world_size // self.data_size

    @property
    def data_size(self) -> int:
        """Ranks that read different samples."""
        return self.layout.size(*DATA)

    @property
    def data_rank(self) -> int:
        return self.layout.coordinate(self.rank, *DATA)


def collective_timeout(group: dist.ProcessGroup | None = None) -> timedelta | None:
    """Return the limit of a group's collectives, by default the default group's; None
    where its backend has none."""
    group = group or dist.group.WORLD
    assert group is not None
    # The limit of the first of the group's backends that has one.
    for device in group._device_types:
        timeout = getattr(
            getattr(group._get_backend(device), "options", None), "_timeout", None
        )
        if isinstance(timeout, timedelta):
            return timeout
    return None


def prefers_messages(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether stages of collectives over ``group`` are made of messages (gloo)
    or the library's collectives."""
    return device.type == "cpu" and "gloo" in str(dist.get_backend(group))


def _can_split(world: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the default group can be split: NCCL can, once it is connected."""
    return world.bound_device_id is not None and bool(
        getattr(world._get_backend(device), "supports_splitting", False)
    )


class _Groups:
    """Process groups by their ranks, each made once.

    Args:
        made: those of one mesh, which are used again, as the world is.
    """

    def __init__(
        self, rank: int, device: torch.device, made: Iterable[dist.ProcessGroup]
    ) -> None:
        self._rank, self._device = rank, device
        self.world = cast(dist.ProcessGroup, dist.group.WORLD)
        self._known: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._uneven: dict[tuple[Ranks, ...], dist.ProcessGroup] = {}
        self._unused: list[dist.ProcessGroup] = []
        self.sizes: list[int] = []
        self._limit = collective_timeout()
        self._splits = _can_split(self.world, device)
        for group in (*made, self.world):
            # By itself torch gives each new group its own default.
            if self._limit is not None:
                group.set_timeout(self._limit)
            ranks = tuple(dist.get_process_group_ranks(group))
            if ranks not in self._known:
                self.sizes.append(len(ranks))
            self._known[ranks] = group
            self._unused.append(group)

    def connect(self) -> None:
        """Use each group that was made since the last call. Collective."""
        # For large tensors NCCL takes other ways, which it connects apart.
        sizes = (1,) if self._device.type == "cpu" else (1, 2**22)
        for group in self._unused:
            if dist.get_world_size(group) == 1:
                # No collective runs in it, and NCCL may take half a GiB for its
                # communicator.
                continue
            for size in sizes:
                dist.all_reduce(torch.zeros(size, device=self._device), group=group)
        self._unused.clear()

    def own(self, groups: Sequence[Ranks]) -> dist.ProcessGroup:
        """Return the one this rank is in. All are made, on every rank in the same order
        as torch.distributed wants it."""
        # Groups of an axis tile the world, so each rank is in exactly one.
        mine = next(ranks for ranks in groups if self._rank in ranks)
        if len({len(ranks) for ranks in groups}) > 1:
            # Some ranks may know theirs of another axis, and others not.
            if tuple(groups) not in self._uneven:
                self._uneven[tuple(groups)] = self.make(groups)
            return self._uneven[tuple(groups)]
        # The same ranks on another axis share the group.
        if mine not in self._known:
            self._known[mine] = self.make(groups)
        return self._known[mine]

    def make(self, groups: Sequence[Ranks]) -> dist.ProcessGroup:
        """Make the same, with a communicator of its own."""
        # split_group is one call for all groups; new_group has to be called for each,
        # on all ranks.
        if self._splits:
            own = dist.split_group(
                split_ranks=[list(ranks) for ranks in groups], timeout=self._limit
            )
            assert own is not None, "every rank is in one of the groups of an axis"
        else:
            made = {
                ranks: dist.new_group(list(ranks), timeout=self._limit)
                for ranks in groups
            }
            own = next(group for ranks, group in made.items() if self._rank in ranks)
        self._unused.append(own)
        self.sizes.append(dist.get_world_size(own))
        return own

    def of_hosts(self, groups: Sequence[Ranks]) -> dist.ProcessGroup:
        """Return the same between hosts, which have one of their own where devices run
        behind them."""
        # On the CPU devices do not run behind, and the group of the axis serves.
        if not streams.run_behind(self._device):
            return self.own(groups)
        mine = next(ranks for ranks in groups if self._rank in ranks)
        return dist.new_group(
            list(mine),
            timeout=self._limit,
            backend="gloo",
            use_local_synchronization=True,
        )


# Meshes of the sharded models of this process, the newest last.
_noted: list[weakref.ref[SmpMesh]] = []
# A copy of the newest run's mesh, with the default group that it was made in: metrics are
# computed when their model is gone, and torch holds the groups in any case.
_newest: tuple[SmpMesh, object] | None = None


def note_mesh(mesh: SmpMesh) -> None:
    """Let :func:`mesh_on` and :func:`mesh_of_run` find the mesh of a sharded model."""
    global _newest
    # References to meshes that are gone are dropped.
    _noted[:] = [each for each in _noted if each() not in (None, mesh)]
    _noted.append(weakref.ref(mesh))
    _newest = (copy.copy(mesh), dist.group.WORLD)


def mesh_of_run() -> SmpMesh | None:
    """Return the mesh that was noted last; None once its process groups are gone."""
    if _newest is None or not dist.is_initialized():
        return None
    mesh, world = _newest
    return mesh if dist.group.WORLD is world else None


def mesh_on(device_mesh: DeviceMesh) -> SmpMesh | None:
    """Return the mesh of a sharded model that the ranks of a DTensor's mesh belong
    to."""
    # Several models may be sharded, on meshes of the same or of other ranks.
    ranks = set(device_mesh.mesh.flatten().tolist())
    meshes = [mesh for each in _noted if (mesh := each()) is not None]
    return next((each for each in meshes if ranks <= _ranks_of(each)), None)


def _ranks_of(mesh: SmpMesh) -> set[int]:
    """Return the ranks that hold parts of the mesh's models; none once its groups were
    destroyed."""
    try:
        return set(dist.get_process_group_ranks(mesh.model_group))
    except KeyError:
        return set()

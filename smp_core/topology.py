"""Topology: the nodes of a cluster, and the ranks on each of them.

This module owns the map from global ranks to nodes. Every process reports its place
(hostname and boot id; two containers on one host share the boot id but not the
hostname, two hosts may share a hostname but not the boot id), the reports are exchanged
over the process group, and every rank draws the same conclusion from the same reports,
errors included. `SMP_RANKS_PER_NODE` overrides the reports, so that processes of one
machine can pose as a cluster.

The partition groups of MiCS (arXiv 2205.00119, section 3) are consecutive ranks, which
is why a layout must be node by node and even.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger("smp")

RANKS_PER_NODE_VARIABLE = "SMP_RANKS_PER_NODE"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_REMEDY = (
    "start the same number of processes on each node, numbered node by node: torchrun --nproc-per-node=N; "
    "srun --ntasks-per-node=N --distribution=block; mpirun --map-by ppr:N:node"
)


@dataclass(frozen=True)
class Topology:
    """The nodes and their ranks. Ranks are numbered node by node and every node has the
    same number of them.

    Args:
        nodes: global ranks of each node, in rank order, as in ((0, 1), (2, 3)).
        node_names: a name for each node, for people.

    Raises:
        ValueError: uneven nodes, or ranks that are not numbered node by node; the
            layout is printed.
    """

    nodes: tuple[tuple[int, ...], ...]
    node_names: tuple[str, ...]
    # Read a thousand times, and so counted once.
    num_nodes: int = field(init=False, repr=False, compare=False)
    ranks_per_node: int = field(init=False, repr=False, compare=False)
    world_size: int = field(init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        # Fields are compared in full. A hash of all ranks would take long.
        return hash((len(self.nodes), self.node_names[0]))

    def __post_init__(self) -> None:
        if (
            len(self.nodes) != len(self.node_names)
            or not self.nodes
            or not all(self.nodes)
        ):
            raise ValueError(
                f"nodes={self.nodes} and node_names={self.node_names} do not describe a cluster; "
                "give at least one node, one name for each node, and at least one rank on each"
            )
        counted = {
            "num_nodes": len(self.nodes),
            "ranks_per_node": len(self.nodes[0]),
            "world_size": len(self.nodes) * len(self.nodes[0]),
        }
        for name, count in counted.items():
            object.__setattr__(self, name, count)
        # Every rank once, on nodes of one size, numbered node by node: groups are
        # consecutive ranks.
        ranks = [rank for node in self.nodes for rank in node]
        if sorted(ranks) != list(range(len(ranks))):
            raise ValueError(
                f"nodes hold the ranks {ranks}; each rank from 0 to {len(ranks) - 1} must be there once"
            )
        if len({len(node) for node in self.nodes}) > 1:
            raise ValueError(
                f"nodes have different numbers of ranks ({self._layout()}); {_REMEDY}"
            )
        if ranks != sorted(ranks):
            raise ValueError(
                f"ranks are not numbered node by node ({self._layout()}); {_REMEDY}"
            )

    @classmethod
    def uniform(cls, world_size: int, ranks_per_node: int) -> Topology:
        """Make the topology of `world_size` ranks with `ranks_per_node` on each node,
        without asking any process.

        Raises:
            ValueError: `ranks_per_node` does not divide `world_size`.
        """
        if ranks_per_node < 1 or world_size < 1 or world_size % ranks_per_node:
            raise ValueError(
                f"ranks_per_node={ranks_per_node} does not divide the world of {world_size} ranks; "
                f"allowed: {listed(divisors(world_size))}"
            )
        return _uniform(world_size, ranks_per_node)

    @classmethod
    def discover(cls, group: dist.ProcessGroup | None = None) -> Topology:
        """Discover the topology from all ranks of the process group. Collective: every
        rank of the group has to call it.

        Args:
            group: process group to ask; default the world. Ranks are numbered as in the
                group. Without an initialised process group the answer is one node with
                one rank.

        Raises:
            ValueError: uneven nodes, ranks that are not numbered node by node, or an
                SMP_RANKS_PER_NODE that differs between ranks or does not divide the
                world. All ranks raise the same error.
        """
        # What reads a topology from a log does not need torch.
        import torch.distributed as dist

        # A process by itself is a node with one rank.
        if not (dist.is_available() and dist.is_initialized()):
            return cls(((0,),), (socket.gethostname(),))
        own = RankReport.of_this_process()
        reports = [own] * dist.get_world_size(group)
        # All ranks judge the same reports, so that errors are raised on all of them.
        dist.all_gather_object(reports, own, group=group)
        topology, warnings = topology_of_reports(reports)
        if dist.get_rank(group) == 0:
            for warning in warnings:
                logger.warning("%s", warning)
        return topology

    def of_groups(self, size: int) -> Topology:
        """Return the topology in which every `size` neighbours count as one rank: those
        of a group inside a node, or of a group that fills nodes.
        """
        return (
            self
            if size == 1
            else Topology.uniform(
                self.world_size // size, max(1, self.ranks_per_node // size)
            )
        )

    def of_stage(self, stages: int) -> Topology:
        """Return the topology of one of `stages` equal stretches of ranks.

        Raises:
            ValueError: stages that are neither one or more full nodes nor equal parts
                of one, with those that are.
        """
        if stages == 1:
            return self
        # Stages that fill nodes, or divide one evenly.
        fitting = [
            n
            for n in divisors(self.world_size)
            if self._fills_nodes(self.world_size // n)
        ]
        if stages not in fitting:
            raise ValueError(
                f"pipeline_parallel_degree={stages} does not cut {self.num_nodes} x {_ranks(self.ranks_per_node)} into "
                f"stages of whole nodes or of equal parts of a node; allowed: {listed(fitting)}"
            )
        # What one stage sees: its own ranks, counted from 0.
        size = self.world_size // stages
        return Topology.uniform(size, min(size, self.ranks_per_node))

    def has_two_stages(self, degree: int) -> bool:
        """Return whether groups of ``degree`` neighbours span nodes with several of
        their ranks on each."""
        return degree > self.ranks_per_node > 1

    def replicas_share_nodes(self, degree: int) -> bool:
        """Return whether replicas of groups of ``degree`` neighbours span nodes with
        several of their ranks on each."""
        return degree < self.ranks_per_node and self.num_nodes > 1

    def _fills_nodes(self, size: int) -> bool:
        return size % self.ranks_per_node == 0 or self.ranks_per_node % size == 0

    def node_of(self, rank: int) -> int:
        """Return the index of the node of `rank`."""
        return self._position(rank)[0]

    def same_node(self, a: int, b: int) -> bool:
        """Return whether two ranks share a node, and with it the fast link."""
        return self.node_of(a) == self.node_of(b)

    def spans_nodes(self, ranks: Iterable[int]) -> bool:
        """Return whether the ranks are on more than one node."""
        held = tuple(ranks)  # numbered node by node
        if self.num_nodes == 1 or not held:
            return False
        return not self.same_node(min(held), max(held))

    def allowed_shard_degrees(self) -> tuple[int, ...]:
        """List the degrees whose partition groups fill the world and cut it along
        nodes: parts of a node, or full nodes.
        """
        per_node = self.ranks_per_node
        return tuple(
            n
            for n in divisors(self.world_size)
            if per_node % n == 0 or n % per_node == 0
        )

    def resolve_shard_degree(self, requested: int | str) -> int:
        """Resolve a shard degree to the number of ranks in a partition group.

        Args:
            requested: an integer, "node" or "world". "auto" is refused: it is resolved
                by the planner.

        Raises:
            ValueError: the degree does not divide the world, or its groups would
                straddle nodes unevenly.
        """
        # Nodes are even, so that both words fit always.
        if requested == "node":
            return self.ranks_per_node
        if requested == "world":
            return self.world_size
        allowed = self.allowed_shard_degrees()
        if not isinstance(requested, int) or isinstance(requested, bool):
            raise ValueError(
                f"shard_degree={requested!r} is not a number of ranks; allowed here: {listed(allowed)}, 'node', "
                "'world' ('auto' is resolved once the model is known)"
            )
        if requested < 1 or self.world_size % requested:
            raise ValueError(
                f"shard_degree={requested} does not divide the world of {_ranks(self.world_size)}; "
                f"allowed: {listed(allowed)}"
            )
        if requested not in allowed:
            raise ValueError(
                f"shard_degree={requested} makes partition groups that straddle nodes of {_ranks(self.ranks_per_node)} "
                f"unevenly; allowed: {listed(allowed)}"
            )
        return requested

    def describe(self) -> str:
        """Return a few lines for people: the number of nodes and ranks, and the ranks
        of each node."""
        nodes = "1 node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        width = max(len(name) for name in self.node_names)
        lines = [f"{nodes} x {_ranks(self.ranks_per_node)}"]
        # Eight nodes are shown in full, of more the first four and the last three.
        shown = list(zip(self.node_names, self.nodes, strict=True))
        if len(shown) > 8:
            shown = [*shown[:4], *shown[-3:]]
        for name, ranks in shown:
            if len(lines) == 5 and self.num_nodes > 8:
                lines.append(f"  ... {self.num_nodes - 7} more nodes")
            lines.append(f"  {name:<{width}}  {_span(ranks)}")
        return "\n".join(lines)

    def _position(self, rank: int) -> tuple[int, int]:
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank={rank} is not in the world of {_ranks(self.world_size)}"
            )
        return divmod(rank, self.ranks_per_node)

    def _layout(self) -> str:
        nodes = []
        for name, ranks in zip(self.node_names, self.nodes, strict=True):
            word = "rank" if len(ranks) == 1 else "ranks"
            nodes.append(f"node {name}: {word} {listed(ranks)}")
        return "; ".join(nodes)


@dataclass(frozen=True)
class RankReport:
    """The report of one process about its place. Variables are reported as text, so
    that all ranks judge them alike.

    Attributes:
        hostname: name of the host, or of the container.
        boot_id: the kernel's boot id, "" where there is none.
        local_rank: LOCAL_RANK, None when not set.
        local_world_size: LOCAL_WORLD_SIZE, None when not set.
        ranks_per_node: SMP_RANKS_PER_NODE, None when not set.
    """

    hostname: str
    boot_id: str = ""
    local_rank: str | None = None
    local_world_size: str | None = None
    ranks_per_node: str | None = None

    @classmethod
    def of_this_process(cls) -> RankReport:
        """Make the report of the calling process."""
        # Where there is no such file the hostname alone tells hosts apart.
        try:
            boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
        except OSError:
            boot_id = ""
        return cls(
            socket.gethostname(),
            boot_id,
            os.environ.get("LOCAL_RANK"),
            os.environ.get("LOCAL_WORLD_SIZE"),
            os.environ.get(RANKS_PER_NODE_VARIABLE),
        )


def topology_of_reports(reports: Sequence[RankReport]) -> tuple[Topology, list[str]]:
    """Return the topology that follows from the ranks' reports, and warnings about
    reports that do not fit it.

    Args:
        reports: one for each rank, in rank order.

    Raises:
        ValueError: as `Topology.discover`.
    """
    # In the order in which ranks appear, which the topology checks.
    found: dict[tuple[str, str], list[int]] = {}
    for rank, report in enumerate(reports):
        found.setdefault((report.hostname, report.boot_id), []).append(rank)
    posed = _posed_ranks_per_node(reports)
    # Found nodes are used unless the variable poses as others.
    if posed is None:
        hostnames = [hostname for hostname, _ in found]
        names = []
        for hostname, boot_id in found:
            # Where hosts share a name, the beginning of the boot id tells them apart.
            is_shared = hostnames.count(hostname) > 1
            names.append(f"{hostname}/{boot_id[:8]}" if is_shared else hostname)
        topology = Topology(tuple(map(tuple, found.values())), tuple(names))
        return topology, _misfits(topology, reports)
    topology = Topology.uniform(len(reports), posed)
    # Posed nodes are not refused, but may be a mistake.
    for node in topology.nodes:
        hosts = {reports[rank].hostname for rank in node}
        if len(hosts) > 1:
            return topology, [
                f"{RANKS_PER_NODE_VARIABLE}={posed} counts {listed(sorted(hosts))} as one node"
            ]
    return topology, []


def _posed_ranks_per_node(reports: Sequence[RankReport]) -> int | None:
    values = [report.ranks_per_node for report in reports]
    # Each value is judged on all ranks alike, as text.
    if len(set(values)) > 1:
        raise ValueError(
            f"{RANKS_PER_NODE_VARIABLE} differs between ranks ({by_rank(values)}); export the same value to all of them"
        )
    text = values[0]
    if text is None:
        return None
    world = len(reports)
    if not text.strip().isdecimal() or int(text) not in divisors(world):
        raise ValueError(
            f"{RANKS_PER_NODE_VARIABLE}={text} does not divide the world of {_ranks(world)}; "
            f"allowed: {listed(divisors(world))}; or unset it to have the nodes found"
        )
    return int(text)


def by_rank(values: Sequence[object]) -> str:
    """Describe each rank's value, for people: ``4 on ranks 0-2; 2 on rank 3``. None is
    "not set"."""
    described = []
    for first, value in enumerate(values):
        if value not in values[:first]:
            ranks = [rank for rank, other in enumerate(values) if other == value]
            shown = "not set" if value is None else repr(value)
            described.append(f"{shown} on {_span(ranks)}")
    return "; ".join(described)


def _misfits(topology: Topology, reports: Sequence[RankReport]) -> list[str]:
    warnings = []
    # Launchers set these; they may know less than what was found.
    sizes = {
        report.local_world_size
        for report in reports
        if report.local_world_size is not None
    }
    if sizes and sizes != {str(topology.ranks_per_node)}:
        warnings.append(
            f"LOCAL_WORLD_SIZE={listed(sorted(sizes))} but {_ranks(topology.ranks_per_node)} were found on each node "
            f"({topology._layout()}); the found nodes are used, set {RANKS_PER_NODE_VARIABLE} if they are wrong"
        )
    for name, ranks in zip(topology.node_names, topology.nodes, strict=True):
        local = [
            reports[rank].local_rank
            for rank in ranks
            if reports[rank].local_rank is not None
        ]
        # One warning is enough: the second has the same reason.
        if not warnings and len(set(local)) < len(local):
            warnings.append(
                f"{_span(ranks)} on node {name} have LOCAL_RANK {listed(map(str, local))}; ranks of a node with "
                "equal LOCAL_RANK may share a device"
            )
    return warnings


@lru_cache(maxsize=256)
def _uniform(world_size: int, ranks_per_node: int) -> Topology:
    """Make what :meth:`Topology.uniform` checked; planners ask for the same ones
    thousands of times."""
    nodes = tuple(
        tuple(range(first, first + ranks_per_node))
        for first in range(0, world_size, ranks_per_node)
    )
    return Topology(nodes, tuple(f"node{index}" for index in range(len(nodes))))


def divisors(number: int) -> list[int]:
    """Return the numbers that divide a number, the smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def listed(items: Iterable[object]) -> str:
    """Return what is allowed, as errors name it: "1, 2, 4"."""
    return ", ".join(map(str, items))


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _span(ranks: Sequence[int]) -> str:
    """Describe ranks: `ranks 0-3` for consecutive ones, `ranks 0, 2` for others."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {listed(ranks)}"

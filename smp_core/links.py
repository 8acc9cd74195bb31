"""How fast the links are: measured, fitted to latency and bandwidth, stored, and asked by ``hierarchical="auto"``.

A message of n bytes takes ``latency + n / bandwidth`` seconds (the alpha-beta model). Two fits are made, inside a node
and between nodes: neighbours exchange messages of growing sizes, all pairs at once, as collectives do. The slowest rank
counts, the median of some repetitions, and a least-squares line through the sizes.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from smp_core.topology import Topology

LINKS_VARIABLE = "SMP_LINKS"
"""Names the file of a stored measurement."""

SIZES = tuple(1 << exponent for exponent in range(10, 23, 3))


@dataclass(frozen=True)
class LinkFit:
    """One class of links.

    Attributes:
        latency: seconds of an empty message.
        bandwidth: bytes per second of one rank's messages while its neighbours send too.
    """

    latency: float
    bandwidth: float

    def seconds(self, messages: int, n_bytes: float) -> float:
        """Of ``messages`` one after the other, ``n_bytes`` in all."""
        return messages * self.latency + n_bytes / self.bandwidth


@dataclass(frozen=True)
class Links:
    """A cluster's links. ``inter`` is None with one node, ``intra`` with one rank per node."""

    nodes: int
    ranks_per_node: int
    intra: LinkFit | None
    inter: LinkFit | None

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Links:
        """
        Raises:
            ValueError: no such file, or not one that :meth:`save` wrote; the file is named.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            fits = {name: None if values[name] is None else LinkFit(**values[name]) for name in ("intra", "inter")}
            return cls(int(values["nodes"]), int(values["ranks_per_node"]), fits["intra"], fits["inter"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{LINKS_VARIABLE}={os.fspath(path)}: no measurement of links ({error}); make one on the cluster with "
                "`torchrun ... -m smp_core.cli topology --measure --store FILE`"
            ) from error

    @classmethod
    def stored(cls, topology: Topology) -> Links | None:
        """What ``SMP_LINKS`` names, if it was measured on a cluster of this shape; None otherwise."""
        path = os.environ.get(LINKS_VARIABLE)
        if not path:
            return None
        links = cls.load(path)
        fits = (links.nodes, links.ranks_per_node) == (topology.num_nodes, topology.ranks_per_node)
        return links if fits else None


def gather_seconds(links: Links, degree: int, n_bytes: float) -> tuple[float, float]:
    """Predicted time of an all-gather of ``n_bytes`` over a partition group of ``degree`` ranks that spans nodes.

    Returns:
        (in one stage: a ring over all ranks, in two stages: between nodes, then inside).
    """
    assert links.inter is not None and links.intra is not None
    k = links.ranks_per_node
    m, shard = degree // k, n_bytes / degree
    # The fit between nodes was made with all k ranks of a node sending; a ring has one sender per node: k times as
    # fast.
    alone = LinkFit(links.inter.latency, links.inter.bandwidth * k)
    flat = alone.seconds(degree - 1, (degree - 1) * shard)
    staged = links.inter.seconds(m - 1, (m - 1) * shard) + links.intra.seconds(k - 1, (k - 1) * m * shard)
    return flat, staged


def measure(topology: Topology, device: torch.device, *, repeats: int = 5, sizes: Sequence[int] = SIZES) -> Links:
    """Time the links. Collective over the world; takes a few seconds on slow ones."""
    rank, k = dist.get_rank(), topology.ranks_per_node
    node, local = topology.node_of(rank), topology.local_rank_of(rank)
    intra = inter = None
    if k > 1:
        peers = (topology.nodes[node][(local + 1) % k], topology.nodes[node][(local - 1) % k])
        intra = _fit(sizes, [_time(size, *peers, device, repeats) for size in sizes])
    if topology.num_nodes > 1:
        m = topology.num_nodes
        peers = (topology.nodes[(node + 1) % m][local], topology.nodes[(node - 1) % m][local])
        inter = _fit(sizes, [_time(size, *peers, device, repeats) for size in sizes])
    return Links(topology.num_nodes, k, intra, inter)


def _time(n_bytes: int, right: int, left: int, device: torch.device, repeats: int) -> float:
    """Seconds of sending to the right and receiving from the left; of the slowest rank."""
    sent, got = (torch.zeros(n_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = []
    for turn in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        batch = [dist.P2POp(dist.irecv, got, left), dist.P2POp(dist.isend, sent, right)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        if turn:  # the first one makes connections
            seconds.append(time.perf_counter() - began)
    slowest = torch.tensor(statistics.median(seconds), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _fit(sizes: Sequence[int], seconds: Sequence[float]) -> LinkFit:
    """Least squares of relative errors, so that small messages count as much as large ones; latency is not negative."""
    weights = [1 / s**2 for s in seconds]
    total = sum(weights)
    mean_n = sum(w * n for w, n in zip(weights, sizes, strict=True)) / total
    mean_s = sum(w * s for w, s in zip(weights, seconds, strict=True)) / total
    spread = sum(w * (n - mean_n) ** 2 for w, n in zip(weights, sizes, strict=True))
    slope = sum(w * (n - mean_n) * (s - mean_s) for w, n, s in zip(weights, sizes, seconds, strict=True)) / spread
    # A noisy machine may time a large message no longer than a small one.
    slope = max(slope, 1e-12)
    return LinkFit(max(mean_s - slope * mean_n, 0.0), 1 / slope)

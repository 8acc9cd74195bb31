"""The speed of links: fits of measured collectives, stored, and the predicted times of
gathers and sums.

A collective of g ranks in which each of them sends n bytes in r rounds takes r x
latency + n / bandwidth seconds: the alpha-beta model, with rounds and bytes of the ring
algorithms (Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005, section 4). S is the
whole tensor, the gathered one or the one to be reduced:

    all_gather, reduce_scatter    r = g - 1        n = (g - 1) / g x S
    all_reduce                    r = 2 (g - 1)    n = 2 (g - 1) / g x S

Measured in three places (:mod:`smp_core.comm.measuring` does it): inside nodes, between
nodes, and over all ranks as one group. Stages of two-stage collectives run in the first
two, collectives in one stage in the third, so that one can be compared with the other
whatever the backend's algorithm is.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from smp_core.outside import StrPath, read_json
from smp_core.topology import Topology

if TYPE_CHECKING:
    from rich.table import Table

LINKS_VARIABLE = "SMP_LINKS"
"""Names the file of a stored measurement."""

Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]
KINDS: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "all_reduce")
Place = Literal["intra", "inter", "flat"]
PLACES: dict[Place, str] = {
    "intra": "inside a node",
    "inter": "between nodes",
    "flat": "over all ranks",
}

LARGEST_ERROR = 0.5
"""A fit that is further than this off one of its points, relative to the point, is
pointed out."""

_VERSION = 2  # 1 had times of messages between neighbours


def rounds(kind: Kind, ranks: int) -> int:
    """Count the messages that each of ``ranks`` sends one after the other in a ring."""
    # A sum is a reduce-scatter and a gather: twice the rounds.
    return (2 if kind == "all_reduce" else 1) * (ranks - 1)


def ring_bytes(kind: Kind, ranks: int, n_bytes: float) -> float:
    """Count the bytes that each of ``ranks`` sends in a ring for a tensor of
    ``n_bytes``."""
    return rounds(kind, ranks) * n_bytes / ranks


@dataclass(frozen=True)
class LinkFit:
    """The fit of one kind of collective in one place.

    Attributes:
        latency: seconds of one round without bytes.
        bandwidth: bytes per second that one rank sends while all others of its kind do.
        error: largest difference between the line and a point, relative to the point.
        points: (bytes that a rank sends, seconds), as measured.
        by: the algorithm: "library" (the backend's own collective) or "messages"
            between all pairs of ranks.
    """

    latency: float
    bandwidth: float
    error: float = 0.0
    points: tuple[tuple[float, float], ...] = ()
    by: str = ""

    def seconds(self, messages: int, n_bytes: float) -> float:
        """Predict the time of ``messages`` one after the other, ``n_bytes`` in all."""
        return messages * self.latency + n_bytes / self.bandwidth

    @classmethod
    def through(
        cls, points: Sequence[tuple[float, float]], messages: int, by: str = ""
    ) -> LinkFit:
        """Fit a line through measured points, by least squares weighted by 1 / seconds.

        The weights suit noise whose variance grows with the time. Without weights the
        largest size alone would count, and the latency could be anything; with relative
        errors the large sizes, which models have, would be off by the gain of small
        ones from buffers on the way. Neither latency nor bandwidth is negative.

        Args:
            points: (bytes that a rank sends, seconds), two sizes or more.
            messages: rounds of each of them.
        """
        weights = [1 / seconds for _, seconds in points]
        # The normal equations of the weighted fit, of five sums.
        sums = []
        for terms in _terms(points):
            sums.append(
                sum(weight * term for weight, term in zip(weights, terms, strict=True))
            )
        one, n, nn, s, ns = sums
        # slope is seconds per byte, alpha seconds of all rounds without bytes.
        slope = (one * ns - n * s) / (one * nn - n * n)
        alpha = (s - slope * n) / one
        if alpha < 0:  # the best line through the origin
            alpha, slope = 0.0, ns / nn
        # A noisy machine may time a large tensor no longer than a small one.
        slope = max(slope, 1e-12)
        error = max(
            abs((alpha + slope * n_bytes) / seconds - 1) for n_bytes, seconds in points
        )
        return cls(
            alpha / messages,
            1 / slope,
            error,
            tuple((float(n), float(s)) for n, s in points),
            by,
        )


def _terms(points: Sequence[tuple[float, float]]) -> list[list[float]]:
    ones = [1.0] * len(points)
    sizes = [n for n, _ in points]
    squares = [n * n for n in sizes]
    seconds = [s for _, s in points]
    products = [n * s for n, s in points]
    return [ones, sizes, squares, seconds, products]


@dataclass(frozen=True)
class Collectives:
    """The measurements in one place, in groups of ``ranks``."""

    ranks: int
    all_gather: LinkFit
    reduce_scatter: LinkFit
    all_reduce: LinkFit

    def seconds(self, kind: Kind, ranks: int, n_bytes: float) -> float:
        """Predict the time for a group of ``ranks`` and a tensor of ``n_bytes``."""
        fit: LinkFit = getattr(self, kind)
        return fit.seconds(rounds(kind, ranks), ring_bytes(kind, ranks, n_bytes))


@dataclass(frozen=True)
class Links:
    """A cluster's links.

    Attributes:
        intra: the ranks of a node, on all nodes at once; None with one rank per node.
        inter: ranks with the same place on their nodes, all places at once; None with
            one node.
        flat: all ranks as one group; None where it would be one of the two others.
        measured_with: backend, versions and machine, for people.
    """

    nodes: int
    ranks_per_node: int
    intra: Collectives | None
    inter: Collectives | None
    flat: Collectives | None
    measured_with: str = ""

    def save(self, path: StrPath) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(
            json.dumps({"version": _VERSION, **asdict(self)}, indent=1) + "\n",
            encoding="utf-8",
        )

    @classmethod
    def load(cls, path: StrPath, asked_by: str = "") -> Links:
        """Read the file of :meth:`save`.

        Args:
            asked_by: the option that names it; "": ``SMP_LINKS``.

        Raises:
            ValueError: no such file, or not one that :meth:`save` of this version
                wrote; the file is named.
        """
        try:
            # The file may be another program's: every field is checked before it is
            # used.
            values = read_json(path)
            if values.get("version") != _VERSION:
                raise ValueError(f"its version is not {_VERSION}")
            intra, inter, flat = (_collectives(values[place]) for place in PLACES)
            nodes = int(values["nodes"])
            ranks_per_node = int(values["ranks_per_node"])
            return cls(
                nodes, ranks_per_node, intra, inter, flat, str(values["measured_with"])
            )
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
        ) as error:
            raise ValueError(
                f"{asked_by or LINKS_VARIABLE}={os.fspath(path)}: no measurement of links ({error}); make one on the "
                "cluster with `torchrun ... -m smp_core.cli topology --measure --store FILE`"
            ) from error

    @classmethod
    def stored(cls, topology: Topology) -> Links | None:
        """Read the file that ``SMP_LINKS`` names, if it was measured on a cluster of
        this shape; else return None."""
        path = os.environ.get(LINKS_VARIABLE)
        if not path:
            return None
        links = cls.load(path)
        # A measurement says nothing about a cluster of another shape.
        fits = (links.nodes, links.ranks_per_node) == (
            topology.num_nodes,
            topology.ranks_per_node,
        )
        return links if fits else None

    def poor_fits(self) -> str | None:
        """Return a sentence that names the fits whose points are far from them; None if
        there are none."""
        poor = [
            f"{kind} {PLACES[place]} ({fit.error:.0%})"
            for place, kind, fit in self._fits()
            if fit.error > LARGEST_ERROR
        ]
        if not poor:
            return None
        return (
            f"times are up to that far off the line of latency and bandwidth: {', '.join(poor)}; so may be what is "
            "predicted from it. Measure again when nothing else uses the machines"
        )

    def table(self) -> Table:
        """Make a table of all fits, for the terminal."""
        from rich import box
        from rich.table import Table

        title = (
            f"{self.nodes} nodes x {self.ranks_per_node} ranks: {self.measured_with}"
        )
        table = Table(
            title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
        )
        for column in (
            "where",
            "by",
            "latency",
            "per rank",
            "per node",
            "off",
            "up to",
        ):
            left = column in ("where", "by")
            table.add_column(column, justify="left" if left else "right", no_wrap=True)
        # A place's name stands once, above its kinds.
        place = None
        for where, kind, fit in self._fits():
            if where != place:
                table.add_row(f"[bold]{PLACES[where]}")
                place = where
            per_node = (
                _rate(fit.bandwidth * self.ranks_per_node) if where == "inter" else ""
            )
            largest = f"{max((n for n, _ in fit.points), default=0) / 2**20:.3g} MiB"
            latency = f"{fit.latency * 1e6:,.0f} us"
            table.add_row(
                f"  {kind}",
                fit.by,
                latency,
                _rate(fit.bandwidth),
                per_node,
                f"{fit.error:.0%}",
                largest,
            )
        return table

    def _fits(self) -> list[tuple[Place, Kind, LinkFit]]:
        found: list[tuple[Place, Kind, LinkFit]] = []
        for place in PLACES:
            collectives: Collectives | None = getattr(self, place)
            if collectives is not None:
                found += [(place, kind, getattr(collectives, kind)) for kind in KINDS]
        return found


def _collectives(values: dict[str, Any] | None) -> Collectives | None:
    if values is None:
        return None
    fits = {}
    # Unknown fields of a fit are an error of its constructor, which becomes one of the
    # file.
    for kind in KINDS:
        fit = dict(values[kind])
        points = tuple((_positive(n), _positive(s)) for n, s in fit.pop("points"))
        bandwidth = _positive(fit.pop("bandwidth"))
        if bandwidth == 0:  # times are bytes over it
            raise ValueError(f"the bandwidth of {kind} is 0")
        fits[kind] = LinkFit(
            _positive(fit.pop("latency")),
            bandwidth,
            _positive(fit.pop("error", 0.0)),
            points,
            str(fit.pop("by", "")),
            **fit,
        )
    return Collectives(int(values["ranks"]), **fits)


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{value!r} is no time, size or rate")
    return number


def _rate(bytes_per_second: float) -> str:
    return (
        f"{bytes_per_second / 1e9:.3g} GB/s"
        if bytes_per_second >= 1e9
        else f"{bytes_per_second / 1e6:.3g} MB/s"
    )


# The times of partition and replication groups, in one stage and in two (MiCS, arXiv
# 2205.00119, 3.2). ``encoded`` is the size of a compressed payload relative to its
# tensor; only bytes that cross nodes are compressed, in one stage all.


def gather_seconds(
    links: Links, degree: int, n_bytes: float, encoded: float = 1.0
) -> tuple[float, float]:
    """Predict the time of an all-gather of ``n_bytes`` over a partition group of
    ``degree`` ranks that spans nodes.

    Returns:
        (in one stage, in two: between nodes, then inside).
    """
    return _in_one_and_two_stages(links, "all_gather", degree, n_bytes, encoded)


def reduce_seconds(
    links: Links, degree: int, n_bytes: float, encoded: float = 1.0
) -> tuple[float, float]:
    """Predict the time of a reduce-scatter of ``n_bytes``: (in one stage, in two:
    inside nodes, then between them)."""
    return _in_one_and_two_stages(links, "reduce_scatter", degree, n_bytes, encoded)


def _in_one_and_two_stages(
    links: Links, kind: Kind, degree: int, n_bytes: float, encoded: float
) -> tuple[float, float]:
    assert (
        links.intra is not None and links.inter is not None and links.flat is not None
    )
    # Between nodes each rank sends the k-th part of the tensor, inside its node all of
    # it.
    k = links.ranks_per_node
    between = links.inter.seconds(kind, degree // k, n_bytes / k * encoded)
    return links.flat.seconds(
        kind, degree, n_bytes * encoded
    ), between + links.intra.seconds(kind, k, n_bytes)


def replica_sum_seconds(
    links: Links, degree: int, n_bytes: float, encoded: float = 1.0
) -> tuple[float, float]:
    """Predict the time of the sum of ``n_bytes`` across replicas that have several
    ranks on each node.

    Args:
        degree: less than the ranks of a node, which are then in ``degree`` replication
            groups.

    Returns:
        (one all-reduce, whose ``degree`` rings share the node's link; in stages:
        inside, between nodes, inside).
    """
    assert (
        links.intra is not None and links.inter is not None and links.flat is not None
    )
    inside, m = links.ranks_per_node // degree, links.nodes
    # A rank holds the degree-th part of the tensor.
    held = n_bytes / degree
    one = links.flat.seconds("all_reduce", inside * m, held * degree * encoded)
    stages = 0.0
    # A sum in stages: reduce-scatter inside and between, then the gathers back.
    for kind in ("reduce_scatter", "all_gather"):
        stages += links.intra.seconds(kind, inside, held) + links.inter.seconds(
            kind, m, held / inside * encoded
        )
    return one, stages

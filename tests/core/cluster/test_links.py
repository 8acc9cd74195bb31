"""Links: the fit finds what it was made of, `hierarchical="auto"` follows it, the
picture shows every rank once."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from smp_core.cli import app
from smp_core.cluster.layout import Layout
from smp_core.cluster.links import (
    KINDS,
    Collectives,
    Kind,
    LinkFit,
    Links,
    gather_seconds,
    reduce_seconds,
    replica_sum_seconds,
    ring_bytes,
    rounds,
)
from smp_core.comm import measuring
from smp_core.comm.flat import FlatAllGather, FlatReduceScatter
from smp_core.comm.hierarchical import HierarchicalAllGather, HierarchicalReduceScatter
from smp_core.plan.picture import svg_picture, text_picture
from smp_core.topology import Topology
from tests.core.gpt import SmallGpt
from tests.core.scenarios import parallel_model
from tests.harness import run_ranks


def alike(ranks: int, latency: float, bandwidth: float) -> Collectives:
    """All kinds of collectives on links like these."""
    fit = LinkFit(latency, bandwidth)
    return Collectives(ranks, fit, fit, fit)


def links_of(
    nodes: int, k: int, inside: tuple[float, float], between: tuple[float, float]
) -> Links:
    """(latency, bytes/s): inside of one rank, between of a whole node, which its ranks
    share; a ring over all ranks has one sender for each node."""
    latency, bandwidth = between
    return Links(
        nodes,
        k,
        alike(k, *inside),
        alike(nodes, latency, bandwidth / k),
        alike(nodes * k, latency, bandwidth),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("latency", "bandwidth"), [(1e-3, 25e6), (2e-6, 200e9), (0.0, 1e9)]
)
def test_a_fit_finds_latency_and_bandwidth(
    latency: float, bandwidth: float, kind: Kind
) -> None:
    """Eight ranks: 7 rounds of an eighth of the tensor, 14 for an all-reduce."""
    steps = 14 if kind == "all_reduce" else 7
    points = [
        (steps * size / 8, steps * latency + steps * size / 8 / bandwidth)
        for size in measuring.SIZES
    ]
    assert [n for n, _ in points] == [
        ring_bytes(kind, 8, size) for size in measuring.SIZES
    ]
    fit = LinkFit.through(points, rounds(kind, 8))
    assert fit.latency == pytest.approx(latency, rel=1e-6, abs=1e-12)
    assert fit.bandwidth == pytest.approx(bandwidth, rel=1e-6)
    assert fit.error == pytest.approx(0.0, abs=1e-6) and fit.points == tuple(points)
    assert Collectives(8, fit, fit, fit).seconds(kind, 8, 2**20) == pytest.approx(
        steps * (latency + 2**17 / bandwidth), rel=1e-6
    )


def test_noise_of_both_signs_is_evened_out() -> None:
    noisy = [
        (n, (1e-3 + n / 25e6) * (1.1 if place % 2 else 0.9))
        for place, n in enumerate(measuring.SIZES)
    ]
    fit = LinkFit.through(noisy, 1)
    assert fit.latency == pytest.approx(
        1e-3, rel=0.3
    ) and fit.bandwidth == pytest.approx(25e6, rel=0.1)
    assert 0.09 < fit.error < 0.2


def test_times_that_make_no_sense_still_give_a_fit() -> None:
    flat = LinkFit.through([(n, 1e-3) for n in measuring.SIZES], 1)
    assert flat.latency == pytest.approx(1e-3, rel=1e-2) and flat.bandwidth > 0
    falling = LinkFit.through([(1e3, 1.0), (1e4, 0.5), (1e5, 0.25)], 1)
    assert falling.latency > 0 and falling.bandwidth > 0
    # Faster than in proportion: no latency explains it, and none below zero is given.
    steep = LinkFit.through([(1e3, 1e-6), (1e6, 1.0)], 1)
    assert steep.latency == 0.0 and steep.bandwidth > 0


def test_a_line_that_its_points_are_far_from_is_pointed_out() -> None:
    curved = LinkFit.through([(n, 1e-9 * n**1.5) for n in (1e3, 1e5, 1e7)], 1)
    straight = LinkFit.through([(n, 1e-3 + 1e-9 * n) for n in (1e3, 1e5, 1e7)], 1)
    assert curved.error > 0.5
    links = Links(2, 1, None, Collectives(2, straight, curved, straight), None)
    assert f": reduce_scatter between nodes ({curved.error:.0%}); " in str(
        links.poor_fits()
    )
    assert (
        Links(
            2, 1, None, Collectives(2, straight, straight, straight), None
        ).poor_fits()
        is None
    )


def test_a_measurement_is_stored_and_read_for_its_own_cluster_only(
    tmp_path: Path, monkeypatch: Any
) -> None:
    fit = LinkFit.through([(1e3, 2e-6), (1e6, 1.2e-5), (3e6, 3.1e-5)], 3, "messages")
    intra = Collectives(4, fit, LinkFit(1e-6, 1e11, 0.25), LinkFit(2e-6, 2e11))
    links = Links(2, 4, intra, None, alike(8, 1e-5, 1e9), "gloo on cpu")
    path = tmp_path / "made" / "links.json"
    links.save(path)
    monkeypatch.setenv("SMP_LINKS", str(path))
    assert Links.stored(Topology.uniform(8, 4)) == links
    assert Links.stored(Topology.uniform(8, 2)) is None
    monkeypatch.setenv("SMP_LINKS", str(tmp_path / "absent.json"))
    with pytest.raises(ValueError, match=r"absent\.json.*--measure --store"):
        Links.stored(Topology.uniform(8, 4))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            '{"nodes": 2, "ranks_per_node": 2, "intra": {"latency": 1e-6, "bandwidth": 1e9}}',
            "its version is not",
        ),
        ('{"nodes": 2, "ranks_per_node": 2, "version": 3}', "its version is not"),
        ('{"version": 2, "nodes": 2, "ranks_per_node": 2}', "intra"),
        ("[1]", "list"),
        ("{", "Expecting"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_what_to_type(
    text: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(
        ValueError,
        match=rf"SMP_LINKS=.*old\.json: no measurement.*{why}.*topology --measure --store",
    ):
        Links.load(path)
    shown = CliRunner().invoke(app, ["topology"], env={"SMP_LINKS": str(path)})
    assert shown.exit_code == 2 and "--measure" in shown.output


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"bandwidth": 0}, "the bandwidth of all_gather is 0"),
        ({"error": "much"}, "could not convert"),
    ],
)
def test_a_fit_that_predicts_nothing_is_refused(
    fields: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = tmp_path / "links.json"
    Links(2, 1, None, alike(2, 1e-5, 1e9), None).save(path)
    content = json.loads(path.read_text())
    content["inter"]["all_gather"].update(fields)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"links\.json: no measurement.*{why}"):
        Links.load(path)


FAST, NO_LATENCY = 1e15, 0.0


@pytest.mark.parametrize("seconds", [gather_seconds, reduce_seconds])
def test_two_stages_pay_where_the_link_between_nodes_is_slow(seconds: Any) -> None:
    """A node's bytes: (p - k) / p of the tensor against (p - 1) / p. With 2 x 8 ranks 8
    / 16 against 15 / 16."""
    slow = links_of(2, 8, (NO_LATENCY, FAST), (NO_LATENCY, 1e9))
    flat, staged = seconds(slow, 16, 1e9)
    assert (flat, staged) == (
        pytest.approx(15 / 16, rel=1e-3),
        pytest.approx(8 / 16, rel=1e-3),
    )
    assert seconds(slow, 16, 1e9, 0.25) == (
        pytest.approx(15 / 64, rel=1e-3),
        pytest.approx(8 / 64, rel=1e-3),
    )
    # Over four nodes of two: 3 rounds between and 1 inside against 7.
    far = links_of(4, 2, (1e-3, FAST), (1e-2, FAST))
    assert seconds(far, 8, 1.0) == (
        pytest.approx(7e-2, rel=1e-3),
        pytest.approx(3.1e-2, rel=1e-3),
    )
    assert seconds(far, 4, 1.0) == (
        pytest.approx(3e-2, rel=1e-3),
        pytest.approx(1.1e-2, rel=1e-3),
    )


def test_two_stages_do_not_pay_where_the_node_is_slow_inside() -> None:
    """2 x 2: 3/4 of the tensor over a node's link in one stage, 2/4 in two, and 1/2
    inside: even at twice the rate."""
    n_bytes, between = 1e9, 1e9
    for inside, pays in ((2.1e9, True), (1.9e9, False)):
        flat, staged = gather_seconds(
            links_of(2, 2, (NO_LATENCY, inside), (NO_LATENCY, between)), 4, n_bytes
        )
        assert (staged < flat) is pays
        assert staged == pytest.approx(1 / 2 + 1e9 / 2 / inside)


def test_sums_across_replicas_that_share_nodes() -> None:
    """2 x 4 ranks, degree 2: each node's link carries 2 (g - 1) / g of the tensor for
    each of two rings of four, or half of the tensor each way in stages, twice; 3/4 x 2
    against 1/2 x 2."""
    links = links_of(2, 4, (NO_LATENCY, FAST), (NO_LATENCY, 1e9))
    one, stages = replica_sum_seconds(links, 2, 1e9)
    assert (one, stages) == (
        pytest.approx(2 * 3 / 4, rel=1e-3),
        pytest.approx(1.0, rel=1e-3),
    )
    one, stages = replica_sum_seconds(links, 1, 1e9)
    assert (one, stages) == (
        pytest.approx(2 * 7 / 8, rel=1e-3),
        pytest.approx(1.0, rel=1e-3),
    )


def ways(cases: list[dict[str, Any]]) -> list[tuple[Any, str, list[str], bool]]:
    """What a model was sharded with: ``hierarchical`` in effect and why, its
    communication objects, the hop's stages; and that a step works that way."""
    found = []
    for knobs in cases:
        torch.manual_seed(0)
        parallel = parallel_model(SmallGpt(layers=2), **knobs)
        parallel.module(torch.randint(101, (2, 9))).backward()
        rows = parallel.config.effective_table().columns
        why = dict(zip(rows[0].cells, rows[3].cells, strict=True)).get(
            "collectives.hierarchical", ""
        )
        unit = parallel.units[0] if parallel.units else None
        makers: list[Any] = [
            parallel.traffic.all_gather,
            parallel.traffic.reduce_scatter,
        ]
        objects = (
            [] if unit is None else [type(make(unit).made).__name__ for make in makers]
        )
        stages = parallel.traffic.route_of(unit).hop.stages is not None
        found.append(
            (parallel.config.collectives.hierarchical, str(why), objects, stages)
        )
    return found


TWO = [HierarchicalAllGather.__name__, HierarchicalReduceScatter.__name__]
ONE = [FlatAllGather.__name__, FlatReduceScatter.__name__]


def test_auto_follows_what_was_measured(tmp_path: Path) -> None:
    """Partition groups over both nodes, and replicas two of which share a node."""
    fast, slow = (1e-6, 1e10), (1e-5, 1e7)
    cases: list[dict[str, Any]] = [
        {"shard_degree": 4},
        {"shard_degree": 1},
        {"shard_degree": 4, "collectives": {"hierarchical": True}},
    ]
    path = tmp_path / "links.json"
    for inside, between, staged in ((fast, slow, True), (slow, fast, False)):
        links_of(2, 2, inside, between).save(path)
        for whole, replicas, asked in run_ranks(
            ways, 4, cases, ranks_per_node=2, env={"SMP_LINKS": str(path)}
        ):
            assert (
                whole[0] is staged
                and "by SMP_LINKS, gathers and sums of a micro-batch take" in whole[1]
            )
            assert whole[2] == (TWO if staged else ONE)
            assert (
                replicas[0] is replicas[3] is staged
                and "by SMP_LINKS, sums across replicas take" in replicas[1]
            )
            assert asked[0] is True and asked[2] == TWO
    # Of another cluster: as without.
    links_of(4, 1, slow, fast).save(path)
    for whole, replicas, _ in run_ranks(
        ways, 4, cases, ranks_per_node=2, env={"SMP_LINKS": str(path)}
    ):
        assert whole[2] == TWO and replicas[3]


class Layers(nn.Module):
    """Square layers of one width, each a unit."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, width, bias=False) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def by_width(widths: list[int]) -> list[bool]:
    return [
        parallel_model(
            Layers(width, 2), shard_degree=4, units=["Linear"]
        ).config.collectives.hierarchical
        is True
        for width in widths
    ]


def test_the_size_of_a_models_units_decides(tmp_path: Path) -> None:
    """Two stages save bytes between nodes and have a round inside nodes that is slow to
    begin: 1 ms + n / 2 / 25 MB/s between, 5 ms inside, against 3 ms + 3/4 n / 25 MB/s
    in one stage: even at n = 300,000 bytes."""
    path = tmp_path / "links.json"
    links_of(2, 2, (5e-3, FAST), (1e-3, 25e6)).save(path)
    small, large = 270, 280  # 291,600 and 313,600 bytes
    assert (
        run_ranks(
            by_width, 4, [small, large], ranks_per_node=2, env={"SMP_LINKS": str(path)}
        )
        == [[False, True]] * 4
    )


def test_the_picture_shows_every_rank_once_with_its_group() -> None:
    topology = Topology.uniform(16, 4)
    text = text_picture(topology, 8)
    assert re.findall(
        r"(\d+)([a-z])\b", text.split("letters")[0].split("groups\n")[1]
    ) == [(str(rank), "ab"[rank // 8]) for rank in range(16)]
    assert "0, 8" in text
    links = Links(4, 4, alike(4, 1e-6, 1e11), alike(4, 1e-5, 1e9), None)
    drawn = svg_picture(topology, Layout.of_world(topology.world_size, 8), links)
    assert "between nodes: 10 us, 1 GB/s per rank" in drawn
    root = ElementTree.fromstring(drawn)
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}circle")) == 16
    assert len(root.findall(f"{space}rect")) == 4
    assert len({disc.get("fill") for disc in root.findall(f"{space}circle")}) == 2
    assert len(root.findall(f"{space}polyline")) == 8


def test_the_command_draws_and_refuses(tmp_path: Path) -> None:
    drawn = CliRunner().invoke(
        app,
        ["topology", "--nodes", "2", "--ranks", "4", "--svg", str(tmp_path / "t.svg")],
    )
    assert drawn.exit_code == 0 and "2 nodes x 4 ranks, shard_degree=4" in drawn.output
    assert (tmp_path / "t.svg").read_text().startswith("<svg")
    for arguments in (
        ["--nodes", "2", "--measure"],
        ["--store", "x"],
        ["--nodes", "2", "--shard-degree", "3"],
    ):
        assert CliRunner().invoke(app, ["topology", *arguments]).exit_code != 0

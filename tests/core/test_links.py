"""Links: the fit finds what it was made of, `hierarchical="auto"` follows it, the picture shows every rank once."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from smp_core.cli import app
from smp_core.config import SmpConfig
from smp_core.links import SIZES, LinkFit, Links, _fit, gather_seconds, measure
from smp_core.mesh import SmpMesh
from smp_core.planning.picture import svg_picture, text_picture
from smp_core.topology import Topology
from tests.harness import run_ranks


@pytest.mark.parametrize(("latency", "bandwidth"), [(1e-3, 25e6), (2e-6, 200e9), (0.0, 1e9)])
def test_a_fit_finds_latency_and_bandwidth(latency: float, bandwidth: float) -> None:
    fit = _fit(SIZES, [latency + n / bandwidth for n in SIZES])
    assert fit.latency == pytest.approx(latency, rel=1e-6, abs=1e-12)
    assert fit.bandwidth == pytest.approx(bandwidth, rel=1e-6)


def test_times_that_make_no_sense_still_give_a_fit() -> None:
    fit = _fit(SIZES, [1e-3] * len(SIZES))
    assert fit.latency == pytest.approx(1e-3, rel=1e-2) and fit.bandwidth > 0


def test_a_measurement_is_stored_and_read_for_its_own_cluster_only(tmp_path: Path, monkeypatch: Any) -> None:
    links = Links(2, 4, LinkFit(1e-6, 1e11), None)
    links.save(tmp_path / "links.json")
    monkeypatch.setenv("SMP_LINKS", str(tmp_path / "links.json"))
    assert Links.stored(Topology.uniform(8, 4)) == links
    assert Links.stored(Topology.uniform(8, 2)) is None
    monkeypatch.setenv("SMP_LINKS", str(tmp_path / "absent.json"))
    with pytest.raises(ValueError, match=r"absent\.json.*--measure --store"):
        Links.stored(Topology.uniform(8, 4))


def test_two_stages_pay_where_the_link_between_nodes_is_slow() -> None:
    """k (m - 1) / m against (p - 1) / p of the bytes per node: 8 x 2 ranks send 47 % less, if the node is fast."""
    slow = Links(2, 8, LinkFit(1e-7, 1e13), LinkFit(1e-7, 1e9))
    flat, staged = gather_seconds(slow, 16, 1e9)
    assert staged / flat == pytest.approx(8 / 15, rel=0.01)
    even = Links(2, 8, LinkFit(1e-3, 1e8), LinkFit(1e-6, 1e11))
    flat, staged = gather_seconds(even, 16, 1e9)
    assert staged > flat


def resolve(shard_degree: int) -> Any:
    return SmpMesh.build(SmpConfig(shard_degree=shard_degree), Topology.discover(), "cpu")[1].effective()[
        "hierarchical"
    ]


@pytest.mark.parametrize(("inside", "between", "staged"), [(1e10, 1e8, True), (1e7, 1e10, False)])
def test_auto_follows_what_was_measured(inside: float, between: float, staged: bool, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    Links(2, 2, LinkFit(1e-6, inside), LinkFit(1e-5, between)).save(path)
    assert run_ranks(resolve, 4, 4, ranks_per_node=2, env={"SMP_LINKS": str(path)}) == [staged] * 4


def measure_here() -> Links:
    return measure(Topology.discover(), torch.device("cpu"), repeats=2, sizes=(1 << 10, 1 << 14, 1 << 18))


def test_links_are_measured_alike_on_all_ranks() -> None:
    """No bound on the figures: that they are there, positive and agreed on."""
    found = run_ranks(measure_here, 4, ranks_per_node=2)
    assert found == [found[0]] * 4
    for fit in (found[0].intra, found[0].inter):
        assert fit is not None and fit.latency >= 0 and fit.bandwidth > 0


def test_the_picture_shows_every_rank_once_with_its_group() -> None:
    topology = Topology.uniform(16, 4)
    text = text_picture(topology, 8, Links(4, 4, LinkFit(1e-6, 1e11), LinkFit(1e-5, 1e9)))
    assert re.findall(r"(\d+)([a-z])\b", text.split("letters")[0].split("groups\n")[1]) == [
        (str(rank), "ab"[rank // 8]) for rank in range(16)
    ]
    assert "0, 8" in text and "1 GB/s" in text
    root = ElementTree.fromstring(svg_picture(topology, 8))
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}circle")) == 16
    assert len(root.findall(f"{space}rect")) == 4
    assert len({disc.get("fill") for disc in root.findall(f"{space}circle")}) == 2
    assert len(root.findall(f"{space}polyline")) == 8


def test_the_command_draws_and_refuses(tmp_path: Path) -> None:
    drawn = CliRunner().invoke(app, ["topology", "--nodes", "2", "--ranks", "4", "--svg", str(tmp_path / "t.svg")])
    assert drawn.exit_code == 0 and "2 nodes x 4 ranks, shard_degree=4" in drawn.output
    assert (tmp_path / "t.svg").read_text().startswith("<svg")
    for arguments in (["--nodes", "2", "--measure"], ["--store", "x"], ["--nodes", "2", "--shard-degree", "3"]):
        assert CliRunner().invoke(app, ["topology", *arguments]).exit_code != 0

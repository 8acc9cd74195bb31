"""benchmarks/scaling_model.py: with free links in nodes and no latency, its seconds are
bytes over the link rate."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from smp_core.cluster.links import Collectives, LinkFit, Links
from tests.harness import ROOT


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        name, Path(ROOT, "benchmarks", f"{name}.py")
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


model: Any = load("scaling_model")
FREE = model.Cluster(
    ranks_per_node=8, latency_inside=0.0, inside=1e30, latency_between=0.0, between=1.0
)
WORK = model.Work(
    gathered=100.0, root=20.0, gradients=200.0, units=5, micro_batches=3, compute=0.0
)


@pytest.mark.parametrize("world", [16, 64, 1024])
def test_schemes_take_as_long_as_their_bytes(world: int) -> None:
    """A node's bytes: gathers of the root once and of blocks twice a micro-batch, sums
    once; in the node's share."""
    gathered, reduced = 3 * (20 + 2 * 80), 3 * 200
    flat, staged = (world - 1) / world, (world - 8) / world
    nodes = world // 8
    expected = {
        "fsdp2": flat * (gathered + reduced),
        "ours-world": staged * (gathered + reduced),
        # Of elements of two bytes.
        "ours-world-int8": staged * (gathered / 2 * model.CODE + reduced),
        "ours-node": 2 * (nodes - 1) / nodes * 200,
        "ours-node-bf16": (nodes - 1) / nodes * 200,
        "hsdp": 3 * 2 * (nodes - 1) / nodes * 200,
    }
    for scheme, seconds in expected.items():
        assert model.step_seconds(scheme, FREE, world, 8, WORK) == pytest.approx(
            seconds
        ), scheme


def test_a_group_inside_a_node_needs_no_link() -> None:
    for scheme in model.SCHEMES:
        assert model.step_seconds(scheme, FREE, 8, 8, WORK) == pytest.approx(
            0.0, abs=1e-20
        )


def test_copies_and_codes_count_what_is_gathered_and_reduced() -> None:
    """Per micro-batch 20 + 2 x 80 gathered; 200 reduced, twice, and as often as the
    backend sends them."""
    slow = replace(FREE, copying=2.0, coding=0.5)
    added = {"fsdp2": 3 * (180 + 400) / 2, "mics": 3 * (180 + 2 * 400) / 2}
    added["ours-node"] = added["fsdp2"]
    added["ours-world-int8"] = added["fsdp2"] + 3 * 180 / 0.5
    for scheme, seconds in added.items():
        plain, more = (
            model.step_seconds(scheme, cluster, 16, 8, WORK, reduce_scatter_times=2.0)
            for cluster in (FREE, slow)
        )
        assert more - plain == pytest.approx(seconds), scheme


def test_overlap_hides_no_more_than_there_is_compute() -> None:
    busy = model.Work(100.0, 20.0, 200.0, 5, 3, compute=10.0)
    plain, hidden = (
        model.step_seconds("fsdp2", FREE, 16, 8, busy, overlap)
        for overlap in (0.0, 1.0)
    )
    assert plain - hidden == pytest.approx(30.0)


def test_the_cluster_may_be_a_measured_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `smp topology --measure --store` writes: of one rank while the four of its
    node send; a node's is theirs."""
    inside, between = (
        Collectives(n, *[fit] * 3)
        for n, fit in ((4, LinkFit(1e-6, 1e9)), (2, LinkFit(1e-3, 6e6)))
    )
    Links(2, 4, inside, between, between).save(tmp_path / "links.json")
    out = tmp_path / "model.json"
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "scaling_model.py",
            "--links",
            str(tmp_path / "links.json"),
            "--out",
            str(out),
        ],
    )
    monkeypatch.setattr(model, "draw", lambda *_: None)
    model.main()
    assert json.loads(out.read_text())["model"]["cluster"] == {
        "ranks_per_node": 4,
        "latency_inside": 1e-6,
        "inside": 1e9,
        "latency_between": 1e-3,
        "between": 24e6,
        "copying": None,
        "coding": None,
    }

"""MemoryReport against what is counted in another way: storages that are alive, and
bytes from shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from smp_core.observe.memory_log import KINDS
from smp_core.observe.memory_report import MemoryReport
from tests.core.activations.models import WIDTH, build, tokens
from tests.core.activations.offloads import LENGTH, OFFLOADED, SAMPLES, LiveStorages
from tests.harness import run_ranks

LAYERS = 12
INPUT_BYTES = SAMPLES * LENGTH * WIDTH * 4
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"activations": "full"},
    "selective": {"activations": "selective"},
    "every:3": {"activations": "every:3"},
    "offload": {"activations": OFFLOADED},
    "offload, horizon 4": {"activations": {**OFFLOADED, "loading_horizon": 4}},
}


def held_for_backward() -> dict[str, tuple[int, int]]:
    """By mode: bytes the report says are held between forward and backward, and those
    of storages that are alive."""
    found = {}
    for name, knobs in MODES.items():
        parallel = build(layers=LAYERS, shard_degree=1, **knobs)
        report = MemoryReport(parallel)
        alive = LiveStorages(ignored=parallel.module.parameters())
        with report.step():
            with alive:
                loss = parallel.module(tokens(0, SAMPLES, LENGTH))
            offloader = parallel.activations.offloader
            on_host = 0 if offloader is None else offloader.pool.n_bytes
            found[name] = (report.activations(), alive.alive() - on_host)
            loss.backward()
        assert report.activations() == 0
    return found


def test_activations_are_those_that_are_alive() -> None:
    for found in run_ranks(held_for_backward, 2):
        for mode, (counted, alive) in found.items():
            # The loss and the token indices live without being held for backward, or
            # are views of the batch.
            assert abs(counted - alive) <= 0.02 * alive + 2000, (
                f"{mode}: {counted} against {alive}"
            )
        outside = found["full"][0] - LAYERS * INPUT_BYTES
        assert 0 < outside < found["full"][0] / 2
        assert found["offload"][0] == outside + 2 * INPUT_BYTES
        assert found["offload, horizon 4"][0] == outside + 4 * INPUT_BYTES
        assert found["full"][0] < found["selective"][0] < found["none"][0]
        assert found["full"][0] < found["every:3"][0] < found["none"][0]


def kinds(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, offload in (("none", None), ("optimizer", "optimizer"), ("all", "all")):
        parallel = build(layers=3, shard_degree=2, state_offload=offload)
        optimizer = torch.optim.AdamW(parallel.module.parameters(), lr=1e-3, fused=True)
        parallel.prepare_optimizer(optimizer)
        report = MemoryReport(parallel, [optimizer])
        for step in range(2):
            with report.step():
                parallel.module(tokens(step)).backward()
                optimizer.step()
        shards = sum(p.to_local().numel() * 4 for p in parallel.module.parameters())
        found[name] = (report.steps[1], shards)
        with pytest.raises(ValueError, match="no step was watched"):
            MemoryReport(parallel).save_plot(f"{folder}/nothing.png")
        report.save_plot(f"{folder}/{name}-{parallel.mesh.rank}.png")
        assert report.table().row_count == 2
    return found


def test_kinds_and_where_they_are(tmp_path: Path) -> None:
    for found in run_ranks(kinds, 2, str(tmp_path)):
        step, shards = found["none"]
        assert set(step.device) == set(KINDS) and step.host == {}
        assert step.device["parameters"] == shards
        assert step.device["optimizer"] == 2 * shards
        assert 0 <= step.device["gradients"] <= shards
        assert step.device["gathered"] > 0 and step.device["activations"] > 0
        assert step.total == sum(step.device.values())
        step, shards = found["optimizer"]
        # Two states, what is stepped and its gradient.
        assert step.device["optimizer"] == 0 and step.host["optimizer"] == 4 * shards
        assert step.device["parameters"] == shards
        step, shards = found["all"]
        assert step.device["optimizer"] == step.device["parameters"] == 0
        assert (
            step.host["parameters"] == shards and step.host["optimizer"] == 2 * shards
        )
    pictures = sorted(tmp_path.iterdir())
    assert len(pictures) == 6 and all(
        p.read_bytes().startswith(b"\x89PNG") for p in pictures
    )

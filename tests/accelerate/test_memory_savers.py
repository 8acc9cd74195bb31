"""The memory knobs under SmpAccelerator: the same losses and weights as without, to the
last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_smp import SmpMonitorCallback
from smp_core.observe.memory_log import read_log
from smp_core.run_log.read import Run
from tests.accelerate.running import fresh_accelerator
from tests.accelerate.trainers import make_trainer
from tests.core.activations.models import DroppingGpt, tokens, whole
from tests.core.activations.offloads import OFFLOADED
from tests.harness import run_ranks

SAVERS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"activations": "selective"},
    "inputs offloaded": {"activations": OFFLOADED},
    "optimizer offloaded": {"state_offload": "optimizer"},
    "all offloaded": {"state_offload": "all"},
    "slices over the world": {"shard_degree": 1, "optimizer_shard": "world"},
    "slices over the world, offloaded": {
        "shard_degree": 1,
        "optimizer_shard": "world",
        "state_offload": "optimizer",
    },
}


def train(**knobs: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], int]:
    torch.manual_seed(0)
    accelerator = fresh_accelerator(
        **{"shard_degree": 2, "gradient_accumulation_steps": 2, **knobs}
    )
    model = DroppingGpt(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(4):
        with accelerator.accumulate(model):
            loss = model(tokens(10 * step + accelerator.process_index))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    offloader = accelerator.parallel.activations.offloader
    fetched = 0 if offloader is None else offloader.bytes_in
    return (
        losses,
        {name: whole(parameter) for name, parameter in model.named_parameters()},
        fetched,
    )


def train_all() -> dict[str, Any]:
    return {name: train(**knobs) for name, knobs in SAVERS.items()}


@pytest.mark.slow
def test_every_saver_trains_the_same() -> None:
    for found in run_ranks(train_all, 2):
        for name, (its_losses, its_weights, _) in found.items():
            # The norm that clips is a sum over other parts where slices are stepped.
            losses, weights, _ = found[
                "slices over the world" if "slices" in name else "none"
            ]
            assert all(map(torch.equal, its_losses, losses)), name
            assert all(
                torch.equal(its_weights[key], value) for key, value in weights.items()
            ), name
        assert found["inputs offloaded"][2] > 0


def planned() -> dict[str, Any]:
    """Shard degrees for two optimizers on a device that holds AdamW's states only when
    they are shared; the model beside its optimizer, and before it."""
    found: dict[str, Any] = {}
    for name, make in (
        ("AdamW", lambda parameters: torch.optim.AdamW(parameters)),
        ("SGD", lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    ):
        model = DroppingGpt()
        gib = (
            3.9 * 4 * sum(parameter.numel() for parameter in model.parameters()) / 2**30
        )
        accelerator = fresh_accelerator(
            shard_degree="auto",
            planner={"device_memory_gib": gib, "memory_headroom": 0.0},
        )
        accelerator.prepare(model, make(model.parameters()))
        found[name] = (
            accelerator.mesh.shard_degree,
            accelerator.smp_config.planner.optimizer,
        )
    model = DroppingGpt()
    accelerator = fresh_accelerator(
        shard_degree="auto", planner={"device_memory_gib": gib, "memory_headroom": 0.0}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = accelerator.prepare(model)
    accelerator.prepare(optimizer)
    found["alone"] = (
        accelerator.mesh.shard_degree,
        accelerator.smp_config.planner.optimizer,
    )
    return found


def test_the_automatic_degree_is_planned_for_the_optimizer_beside_the_model() -> None:
    for found in run_ranks(planned, 2):
        assert found == {
            "AdamW": (2, "AdamW"),
            "SGD": (1, "SGD"),
            "alone": (2, "adamw"),
        }


def trained(folder: str) -> tuple[dict[str, float], int]:
    callback = SmpMonitorCallback(memory_every_n_steps=2)
    trainer, _ = make_trainer(
        folder, 8, 1, {"shard_degree": 2}, max_steps=4, logging_steps=4
    )
    trainer.add_callback(callback)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    shards = (
        sum(parameter.to_local().numel() for parameter in trainer.model.parameters())
        * 4
    )
    callback.save_memory_plot(f"{folder}/{trainer.args.process_index}.png")
    return logged[-1], shards


@pytest.mark.slow
def test_trainers_log_takes_peaks_apart_on_request(tmp_path: Path) -> None:
    ranks = run_ranks(trained, 2, str(tmp_path))
    steps = read_log(tmp_path / "memory.jsonl")
    assert list(steps) == [2, 4]
    shards = max(of_rank for _, of_rank in ranks)
    assert (
        steps[4].device["parameters"] == shards
        and steps[4].device["optimizer"] == 2 * shards
    )
    assert steps[4].device["activations"] > 0
    for logged, _ in ranks[:1]:
        assert logged["peak_optimizer_gib"] == steps[4].device["optimizer"] / 2**30
        assert logged["peak_activations_gib"] == steps[4].device["activations"] / 2**30
    run = Run.read(tmp_path)
    assert (
        run.steps[4]["loss"] == ranks[0][0]["loss"] and "learning_rate" in run.steps[4]
    )
    assert (
        run.memory[4]["device"] == steps[4].device
        and run.end is not None
        and not run.unreadable
    )
    assert (tmp_path / "0.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="memory_every_n_steps=-1"):
        SmpMonitorCallback(memory_every_n_steps=-1)

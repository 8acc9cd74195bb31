"""The memory knobs under the Trainer: the same losses and weights as without, to the
last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from lightning_smp import SmpMonitor
from smp_core.cli import app
from smp_core.observe.memory_log import KINDS, read_log
from tests.core.activations.models import DroppingGpt, tokens
from tests.harness import run_ranks
from tests.lightning.running import make_trainer, whole
from tests.logged import warnings_said


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = DroppingGpt(dropout=0.1)
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.model(batch)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("loss", self.model(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def fit(**knobs: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    module = Module()
    loader = DataLoader(tokens(3, samples=16), batch_size=2)
    trainer = make_trainer(
        {"shard_degree": 2, **knobs},
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
    )
    trainer.fit(module, loader, loader)
    weights = {name: whole(parameter) for name, parameter in module.named_parameters()}
    return module.losses, {**weights, "loss": trainer.callback_metrics["loss"]}


def fit_all(settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: fit(**knobs) for name, knobs in settings.items()}


@pytest.mark.slow  # in the normal run: tests/accelerate/test_memory_savers.py
def test_every_saver_trains_the_same() -> None:
    settings = {
        "none": {},
        "by name": {"activations": {"checkpoint": {"model.blocks.[02]": "full"}}},
        "inputs offloaded": {
            "activations": {
                "checkpoint": "full",
                "offload": True,
                "offload_min_bytes": 0,
            }
        },
        "optimizer offloaded": {"state_offload": "optimizer"},
        "all offloaded": {"state_offload": "all", "activations": "selective"},
        "slices over the world": {"shard_degree": 1, "optimizer_shard": "world"},
        "slices over the world, offloaded": {
            "shard_degree": 1,
            "optimizer_shard": "world",
            "state_offload": "optimizer",
        },
    }
    for found in run_ranks(fit_all, 2, settings):
        assert len(found["none"][0]) == 8
        for name, (its_losses, its_weights) in found.items():
            # The norm that clips is a sum over other parts where slices are stepped.
            losses, weights = found[
                "slices over the world" if "slices" in name else "none"
            ]
            assert all(map(torch.equal, its_losses, losses)), name
            assert all(
                torch.equal(its_weights[key], value) for key, value in weights.items()
            ), name


def watched(folder: str) -> dict[str, Any]:
    """Every second of eight steps (of two micro-batches) is taken apart."""
    torch.manual_seed(0)
    monitor = SmpMonitor(every_n_steps=4, memory_every_n_steps=2)
    module, loader = Module(), DataLoader(tokens(3, samples=32), batch_size=2)
    trainer = make_trainer(
        {"shard_degree": 2, "activations": "full"},
        callbacks=[monitor],
        default_root_dir=folder,
        accumulate_grad_batches=2,
        max_epochs=2,
    )
    trainer.fit(module, loader, loader)
    if trainer.is_global_zero:
        monitor.save_memory_plot(f"{folder}/seen.png")
    shards = sum(parameter.to_local().numel() for parameter in module.parameters()) * 4
    assert monitor._watch is not None
    saved = torch.ones(1000, requires_grad=True).exp()
    return {
        "latest": monitor.latest,
        "shards": shards,
        "still watched": saved.requires_grad and monitor._watch._report.activations(),
        "summary": monitor.summary(),
    }


def test_the_monitor_takes_peaks_apart_on_request(tmp_path: Path) -> None:
    ranks = run_ranks(watched, 2, str(tmp_path))
    steps = read_log(tmp_path / "memory.jsonl")
    assert list(steps) == [2, 4, 6, 8]
    shards = max(found["shards"] for found in ranks)
    last = steps[8].device
    assert (last["parameters"], last["optimizer"]) == (shards, 2 * shards)
    assert (
        last["activations"] > 0
        and last["gathered"] > 0
        and 0 <= last["gradients"] <= shards
    )
    for found in ranks:
        figures = {
            kind: found["latest"][f"peak_{kind}_gib"]
            for kind in KINDS
            if kind != "other"
        }
        assert figures == {kind: last[kind] / 2**30 for kind in figures}
        assert (
            "peak_other_gib" not in found["latest"]
            and "peak_host_rss_gib" in found["latest"]
        )
        assert found["still watched"] == 0, "hooks of saved tensors are left over"
        assert "activations 0.000 GiB" in found["summary"]
    assert (tmp_path / "seen.png").read_bytes().startswith(b"\x89PNG")
    shown = CliRunner().invoke(app, ["memory-report", str(tmp_path / "memory.jsonl")])
    assert shown.exit_code == 0 and "4 watched steps, 2 to 8" in shown.output
    assert f"{last['optimizer'] / 2**20:.2f}" in shown.output
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "broken.jsonl").write_text('{"step": 1}\n{}\n')
    refused = CliRunner().invoke(app, ["memory-report", str(tmp_path / "broken.jsonl")])
    assert (
        refused.exit_code == 1
        and "line 1: not a line of SmpMonitor's memory log" in refused.output
    )


def test_what_is_asked_of_the_monitor_wrongly() -> None:
    with pytest.raises(ValueError, match="memory_every_n_steps=0"):
        SmpMonitor(memory_every_n_steps=0)
    with pytest.raises(
        ValueError,
        match=r"no step was watched; write SmpMonitor\(memory_every_n_steps=100\)",
    ):
        SmpMonitor().save_memory_plot("nothing.png")
    trainer = make_trainer(callbacks=[SmpMonitor(memory_every_n_steps=1)])
    with pytest.raises(ValueError, match="SingleDeviceStrategy; leave it out"):
        trainer.fit(Module(), DataLoader(tokens(3, samples=2)))


class Plain(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def plan_with_sgd(gib: float) -> dict[str, Any]:
    """Degrees and warnings when configure_optimizers makes SGD, by
    planner.optimizer."""
    with warnings_said() as said:
        found = {}
        for planned in ("auto", "sgd"):
            said.clear()
            knobs = {
                "planner": {
                    "device_memory_gib": gib,
                    "memory_headroom": 0.0,
                    "optimizer": planned,
                }
            }
            trainer = make_trainer(knobs, max_steps=1)
            trainer.fit(Plain(), DataLoader(tokens(3, samples=4)))
            found[planned] = (
                trainer.strategy.mesh.shard_degree,
                [line for line in said if "planned for" in line],
            )
    return found


def test_a_plan_for_another_optimizer_is_said_and_can_be_asked_for() -> None:
    """Room for four copies of the parameters: SGD has parameters, gradients and
    (gathered at once) at most a third; AdamW has two states more."""
    model_bytes = sum(parameter.numel() for parameter in Module().parameters()) * 4
    degrees = run_ranks(plan_with_sgd, 2, 3.9 * model_bytes / 2**30)
    for rank, found in enumerate(degrees):
        assert found["auto"][0] == 2 and found["sgd"] == (1, [])
        assert len(found["auto"][1]) == (1 if rank == 0 else 0)
    assert (
        "planned for adamw and gave 2; found SGD, 0 states" in degrees[0]["auto"][1][0]
    )

"""The memory knobs under the Trainer: the same losses and weights as without, to the last bit."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from tests.core.activations.models import DroppingGpt, tokens
from tests.harness import run_ranks
from tests.lightning.running import make_trainer, whole


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
    trainer = make_trainer({"shard_degree": 2, **knobs}, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5)
    trainer.fit(module, loader, loader)
    weights = {name: whole(parameter) for name, parameter in module.named_parameters()}
    return module.losses, {**weights, "loss": trainer.callback_metrics["loss"]}


def fit_all(settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: fit(**knobs) for name, knobs in settings.items()}


def test_every_saver_trains_the_same() -> None:
    settings = {
        "none": {},
        "full": {"activation_checkpointing": "full"},
        "selective": {"activation_checkpointing": "selective"},
        "by name": {"activation_checkpointing": {"model.blocks.[02]": "full"}},
        "inputs offloaded": {
            "activation_checkpointing": "full",
            "activation_offloading": True,
            "activation_offloading_min_bytes": 0,
        },
        "optimizer offloaded": {"state_offload": "optimizer"},
        "all offloaded": {"state_offload": "all", "activation_checkpointing": "selective"},
    }
    for found in run_ranks(fit_all, 2, settings):
        losses, weights = found.pop("none")
        assert len(losses) == 8
        for name, (its_losses, its_weights) in found.items():
            assert all(map(torch.equal, its_losses, losses)), name
            assert all(torch.equal(its_weights[key], value) for key, value in weights.items()), name

"""A mixture of experts under the Trainer: the numbers of one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.core.expert_parallel.models import OwnModel
from tests.core.tensor_parallel.model_cases import batches, own_loss
from tests.lightning.running import Run, assert_same, make_trainer, report, together

BATCH, STEPS = 8, 6


class Experts(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.model = OwnModel()
        self.losses: list[torch.Tensor] = []

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = own_loss(self.model(tokens), tokens)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, tokens: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", own_loss(self.model(tokens), tokens), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)  # no steps made of rounding

    def loader(self) -> DataLoader:
        rows = list(batches(1, STEPS).flatten(0, 2))
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        sampler: Any = DistributedSampler(rows, ranks, rank, shuffle=False)  # type: ignore[arg-type]
        return DataLoader(rows, batch_size=BATCH // ranks, sampler=sampler)  # type: ignore[arg-type]

    train_dataloader = val_dataloader = loader


def trained(knobs: dict[str, Any] | None = None) -> Run:
    module = Experts()
    trainer = make_trainer(knobs, precision="64-true", accumulate_grad_batches=2, gradient_clip_val=0.5)
    trainer.fit(module)
    return report(trainer, module)


def test_a_fit_equals_one_process() -> None:
    """float64, 1e-12: sums in another order."""
    expected = trained()
    assert len(expected.losses) == STEPS
    assert_same(together(trained, {"shard_degree": 4, "expert_parallel_degree": "node"}), expected)

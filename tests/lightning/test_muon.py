"""Muon under Trainer: one process's training on shards, through a checkpoint that another degree goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from smp_core.optim import Muon, muon_groups
from tests.lightning.modules import LanguageModule, PlainModel
from tests.lightning.running import Run, assert_same, make_trainer, report, together


class ByMuon(LanguageModule):
    """Without the matrices of the usual model whose gradients are rounding errors, which Muon makes large."""

    def build(self) -> None:
        self.model = PlainModel()

    def configure_optimizers(self) -> Any:
        groups = muon_groups(self, adamw={"lr": self.lr, "betas": (0.9, 0.95)})
        optimizer = Muon(groups, lr=0.02, ns_dtype=torch.float64)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def in_two_fits(folder: Path, first: dict[str, Any], second: dict[str, Any]) -> Run:
    """Fits an epoch, saves, and goes on in another trainer."""
    flags: dict[str, Any] = {"precision": "64-true", "limit_val_batches": 0}
    trainer, module = make_trainer(first, **flags), ByMuon(batches=3)
    trainer.fit(module)
    path = folder / "half.ckpt"
    trainer.save_checkpoint(path)
    trainer, module = make_trainer(second, max_epochs=2, **flags), ByMuon(batches=3)
    trainer.fit(module, ckpt_path=path, weights_only=False)
    return report(trainer, module)


def test_trains_and_resumes_like_one_process(tmp_path: Path) -> None:
    expected = in_two_fits(tmp_path / "alone", {}, {})
    runs = together(in_two_fits, tmp_path / "together", {"shard_degree": 4}, {"shard_degree": 2})
    assert_same(runs, expected)

"""Muon under Trainer: one process's training on shards, through a checkpoint that
another degree goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from smp_core.optim import Muon, muon_groups
from tests.lightning.modules import LanguageModule, PlainModel
from tests.lightning.running import Run, assert_same, fit, fit_twice, report, together


class ByMuon(LanguageModule):
    """A model without matrices whose gradients are rounding errors, which Muon makes
    large."""

    def build(self) -> None:
        self.model = PlainModel()

    def configure_optimizers(self) -> Any:
        groups = muon_groups(self, adamw={"lr": self.lr, "betas": (0.9, 0.95)})
        optimizer = Muon(groups, lr=0.02, ns_dtype=torch.float64)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


FLAGS: dict[str, Any] = {"precision": "64-true", "limit_val_batches": 0}


def in_two_fits(folder: Path, first: dict[str, Any], second: dict[str, Any]) -> Run:
    return report(*fit_twice(ByMuon, {"batches": 3}, folder, first, second, **FLAGS))


def test_trains_and_resumes_like_one_process(tmp_path: Path) -> None:
    expected = fit(ByMuon, {"batches": 3}, max_epochs=2, **FLAGS)
    assert_same(
        together(in_two_fits, tmp_path, {"shard_degree": 4}, {"shard_degree": 2}),
        expected,
    )

"""Adafactor under Trainer: torch.optim.Adafactor's training in one process on shards,
through a checkpoint that another degree goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from smp_core.optim import Adafactor
from tests.lightning.modules import LanguageModule, PlainModel
from tests.lightning.running import Run, assert_same, fit, fit_twice, report, together


class ByAdafactor(LanguageModule):
    """A model without matrices whose gradients are rounding errors, which Adafactor
    makes large."""

    kind: Any = Adafactor

    def build(self) -> None:
        self.model = PlainModel()

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.parameters(), lr=0.05, weight_decay=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class ByTorchs(ByAdafactor):
    kind = torch.optim.Adafactor


FLAGS: dict[str, Any] = {
    "precision": "64-true",
    "limit_val_batches": 0,
    "accumulate_grad_batches": 2,
}


def in_two_fits(folder: Path, first: dict[str, Any], second: dict[str, Any]) -> Run:
    return report(
        *fit_twice(ByAdafactor, {"batches": 4}, folder, first, second, **FLAGS)
    )


@pytest.mark.slow
def test_trains_and_resumes_like_torchs_in_one_process(tmp_path: Path) -> None:
    expected = fit(ByTorchs, {"batches": 4}, max_epochs=2, **FLAGS)
    assert_same(
        together(in_two_fits, tmp_path, {"shard_degree": 4}, {"shard_degree": 2}),
        expected,
    )

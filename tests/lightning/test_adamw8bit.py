"""AdamW8bit under Trainer: one process's training on shards, through checkpoints that
another degree goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from smp_core.optim import AdamW8bit
from tests.harness import run_ranks
from tests.lightning.modules import LanguageModule, PlainModel
from tests.lightning.running import Run, assert_same, fit, fit_twice, report


class In8Bits(LanguageModule):
    """Without matrices whose gradients are rounding errors, which have codes of their
    own in each order of sums."""

    def build(self) -> None:
        self.model = PlainModel()

    def configure_optimizers(self) -> Any:
        optimizer = AdamW8bit(self.parameters(), lr=torch.tensor(0.02), min_8bit_size=0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


FLAGS: dict[str, Any] = {
    "precision": "64-true",
    "limit_val_batches": 0,
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.5,
}


def in_two_fits(
    folder: Path, first: dict[str, Any], second: dict[str, Any]
) -> tuple[Run, bool]:
    """What both fits showed, and whether there were states in 8 bits."""
    trainer, module = fit_twice(In8Bits, {"batches": 4}, folder, first, second, **FLAGS)
    (optimizer,) = trainer.optimizers
    in_8_bits = any(
        entry["exp_avg"].dtype == torch.uint8 for entry in optimizer.state.values()
    )
    return report(trainer, module), in_8_bits


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({"shard_degree": 4}, {"shard_degree": 2}, marks=pytest.mark.slow),
        (
            {"shard_degree": 2, "checkpoint": "full"},
            {"shard_degree": 4, "state_offload": "optimizer"},
        ),
    ],
    ids=str,
)
def test_trains_and_resumes_like_one_process(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    expected = fit(In8Bits, {"batches": 4}, max_epochs=2, **FLAGS)
    for seen, in_8_bits in run_ranks(
        in_two_fits, 4, tmp_path, first, second, ranks_per_node=2
    ):
        assert in_8_bits
        assert_same(seen, expected)

"""Muon under SmpTrainer: what one process trains with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from smp_core.optim import Muon, muon_groups
from tests.accelerate.trainers import (
    Run,
    assert_close,
    make_trainer,
    noise_between,
    whole_weights,
)
from tests.harness import run_ranks


def fit(
    folder: Path, batch: int, micro_batches: int, knobs: dict[str, Any] | None = None
) -> Run:
    trainer, recorder = make_trainer(folder, batch, micro_batches, knobs, max_steps=4)
    groups = muon_groups(
        trainer.model, adamw={"lr": 3e-3}, split={"*.c_attn.weight": 3}
    )
    trainer.optimizer = Muon(groups, lr=0.02, ns_dtype=torch.float32)
    trainer.train()
    recorder.run.weights = whole_weights(trainer.model)
    return recorder.run


@pytest.mark.slow
def test_trains_like_the_stock_trainer_in_one_process(tmp_path: Path) -> None:
    expected, other = fit(tmp_path, 8, 1), fit(tmp_path, 4, 2)
    for seen in run_ranks(
        fit, 4, tmp_path, 8, 1, {"shard_degree": 2}, ranks_per_node=2
    ):
        assert_close(seen, expected, noise_between(expected, other))

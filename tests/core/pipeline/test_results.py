"""What a step of several micro-batches returns."""

from __future__ import annotations

import torch

from smp_core.pipeline.results import mean_of


def test_means_of_whole_numbers_are_not_cut_off() -> None:
    results = [
        {"loss": torch.tensor(1.0), "right": 3, "skipped": False},
        {"loss": torch.tensor(2.0), "right": 4, "skipped": True},
    ]
    found = mean_of(results, "training_step")
    assert {name: value.item() for name, value in found.items()} == {
        "loss": 1.5,
        "right": 3.5,
        "skipped": 0.5,
    }
    assert found["loss"].dtype == torch.float32

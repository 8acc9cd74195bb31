"""transformers' Trainer on four ranks: what one process trains, saves and resumes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.accelerate.trainers import Run, assert_close, fit, noise_between
from tests.harness import run_ranks

BATCH = 8


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Run, float]]:
    """The stock Trainer in one process, per accumulation, and how far it is from itself in another order."""
    folder = tmp_path_factory.mktemp("alone")
    runs = {}
    for micro_batches in (1, 3):
        run = fit(folder, BATCH, micro_batches)
        other = fit(folder, BATCH // 2, 2 * micro_batches)
        runs[micro_batches] = run, noise_between(run, other)
    return runs


CASES = list(itertools.product((1, 2, 4), (1, 3)))


@pytest.mark.parametrize(("degree", "micro_batches"), CASES)
def test_training_equals_the_stock_trainer_in_one_process(
    alone: dict[int, tuple[Run, float]], tmp_path: Path, degree: int, micro_batches: int
) -> None:
    expected, noise = alone[micro_batches]
    knobs = {"shard_degree": degree}
    for seen in run_ranks(fit, 4, tmp_path, BATCH, micro_batches, knobs, ranks_per_node=2, timeout=120):
        assert_close(seen, expected, noise)

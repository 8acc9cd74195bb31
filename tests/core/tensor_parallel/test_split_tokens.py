"""Blocks hold a part of their tokens where they compute the same with it, and all of them elsewhere: numbers are those
of one process, or refused in words on all ranks.

float64: 1e-8 is many rounding errors of models that sum up over tokens in every block, and any token too few or gradient left out is orders larger.
"""

from __future__ import annotations

import pytest

from tests.core.tensor_parallel.drawn_models import draw, outcomes
from tests.harness import run_ranks


def assert_exact_or_refused(seeds: list[int]) -> None:
    for rank, found in enumerate(run_ranks(outcomes, 4, seeds, timeout=1200)):
        for seed, seen in zip(seeds, found, strict=True):
            refused = isinstance(seen, str) and "tensor_parallel" in seen
            assert refused or seen == [], f"{draw(seed)} on rank {rank}: {seen}"


def test_drawn_models_train_like_one_process_or_are_refused() -> None:
    assert_exact_or_refused(list(range(10)))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10, 210, 20))
def test_more_drawn_models_train_like_one_process_or_are_refused(first: int) -> None:
    assert_exact_or_refused(list(range(first, first + 20)))

"""Random states come back on the same ranks and are derived, not copied, on others; the
interval follows Daly."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from smp_core.checkpoint import CheckpointError, save_checkpoint
from smp_core.checkpoint.interval import IntervalEstimate, SaveSchedule, best_interval
from smp_core.checkpoint.random_state import (
    derived_seed,
    random_state,
    restore_random_state,
)
from tests.harness import run_ranks


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def save_and_draw(path: str) -> Any:
    rank = torch.distributed.get_rank()
    random.seed(rank)
    numpy.random.seed(rank)
    torch.manual_seed(rank)
    draw()
    save_checkpoint(
        path, {"x": 1}, metadata={"step": 5}, per_rank={"random": random_state()}
    )
    return draw()


def restore_and_draw(path: str) -> Any:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    same = restore_random_state(path, rank, world, seed=3)
    return same, draw()


def test_the_same_ranks_draw_on_and_others_are_seeded_by_rank(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    expected = run_ranks(save_and_draw, 2, path)
    assert run_ranks(restore_and_draw, 2, path) == [
        (True, numbers) for numbers in expected
    ]
    first = run_ranks(restore_and_draw, 4, path)
    assert [same for same, _ in first] == [False] * 4
    assert len({numbers for _, numbers in first}) == 4
    assert run_ranks(restore_and_draw, 4, path) == first, (
        "the same every time it is tried"
    )


def test_a_process_that_has_not_used_a_device_does_not_begin_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begin() -> None:
        raise AssertionError("made a context on the device")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", begin)
    assert "cuda" not in random_state()


def test_derived_seeds_differ_by_seed_step_and_rank() -> None:
    seeds = {
        derived_seed(a, b, c) for a in range(5) for b in range(5) for c in range(5)
    }
    assert len(seeds) == 125


def test_the_interval_is_dalys() -> None:
    # d = 60 s, M = 24 h: Young gives 3220 s; Daly's terms by hand: 3219.94 * (1 +
    # 0.018634/3 + 0.00034722/9) - 60.
    assert best_interval(60, 24 * 3600) == pytest.approx(3180.06, abs=0.01)
    assert best_interval(300, 100) == 100
    for wrong in ((0, 1), (1, 0), (float("nan"), 1)):
        with pytest.raises(CheckpointError, match="must be above 0"):
            best_interval(*wrong)


def test_the_estimate_waits_for_measurements_and_ignores_outliers() -> None:
    estimate = IntervalEstimate(24 * 3600)
    estimate.add_step(2.0)
    assert estimate.steps() is None
    for seconds in (60.0, 60.0, 600.0):
        estimate.add_save(seconds)
    assert estimate.steps() == 1590
    assert IntervalEstimate(1.0).steps() is None


def test_the_schedule_follows_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 2 s and saves of 60 s with a failure a day: the first save is the
    measurement, then every 1590 steps."""
    now = 0.0
    monkeypatch.setattr("smp_core.checkpoint.interval.time.perf_counter", lambda: now)
    schedule = SaveSchedule("auto", 24 * 3600)
    due = []
    for number in range(1, 3300):
        now += 2.0
        if schedule.step():
            due.append(number)
            now += 60.0
            schedule.saved(60.0)
    assert due == [10, 1600, 3190]


def test_a_fixed_interval_and_bad_ones() -> None:
    schedule = SaveSchedule(3)
    due = []
    for number in range(1, 10):
        if schedule.step():
            due.append(number)
            schedule.saved(1.0)
    assert due == [3, 6, 9]
    with pytest.raises(
        CheckpointError, match="'auto' needs mean_time_between_failures"
    ):
        SaveSchedule("auto")
    for wrong in (0, "often", True):
        with pytest.raises(
            CheckpointError, match="neither 'auto' nor a number of steps"
        ):
            SaveSchedule(wrong)

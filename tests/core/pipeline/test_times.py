"""What a stage's times are made of. Nothing is timed."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from smp_core.pipeline import times as module
from smp_core.pipeline.times import Computation, StageTimes, draw_timeline, idle_shares


def test_a_batch_lasts_from_its_beginning_to_the_last_computation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = iter([100.0, 101.0, 103.0, 110.0, 114.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    times, entered = StageTimes(), []

    @contextmanager
    def around(direction: str) -> Any:
        entered.append(direction)
        yield

    times.around = around
    with times.batch():
        with times.computing("forward", 1, 0):  # 101 to 103
            pass
        with times.computing("backward", 1, 0):  # 110 to 114
            pass
    with times.computing("forward", 1, 0):  # of an evaluation
        pass
    assert times.last == [
        Computation("forward", 1, 0, 1.0, 3.0),
        Computation("backward", 1, 0, 10.0, 14.0),
    ]
    assert entered == ["forward", "backward"]
    assert times.take() == (6.0, 14.0) and times.take() == (0.0, 0.0)
    draw_timeline([times.last, times.last], tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_stages_are_idle_until_the_last_of_their_column_ends() -> None:
    # Two columns of two stages: (computed, lasted). In one the first stage is the last
    # to end, in the other not.
    assert idle_shares([[(6.0, 10.0), (8.0, 9.0)], [(6.0, 7.0), (3.0, 10.0)]]) == [
        1 - 12 / 20,
        1 - 11 / 20,
    ]

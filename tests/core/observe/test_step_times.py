"""Who is slow, from the times of all ranks' steps."""

from __future__ import annotations

import pytest

from smp_core.observe import step_times
from smp_core.observe.step_times import StepTimes, Straggler, find_straggler
from smp_core.watch.whereabouts import here

USUAL = [0.1, 1.0, 2.0, 0.5]


def ranks(
    changes: dict[tuple[int, int], list[float]], number: int = 4, steps: int = 5
) -> list[list[list[float]]]:
    """Times of equal ranks, but for ``changes`` of (rank, step)."""
    return [
        [changes.get((rank, step), USUAL) for step in range(steps)]
        for rank in range(number)
    ]


def test_the_rank_that_works_longest_in_most_steps_is_named_with_the_part() -> None:
    slow = {(2, step): [0.1, 1.0, 2.72, 0.5] for step in range(4)}
    found = find_straggler(ranks(slow))
    assert found == Straggler(2, "backward", pytest.approx(4 * 0.72 / (5 * 3.6)), 4, 5)
    assert found is not None
    assert (
        found.in_words(1) == "straggler: rank 2 (node 1), backward, +16 %, 4 of 5 steps"
    )


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="all equal"),
        pytest.param(
            {(1, step): [0.1, 1.2, 2.0, 0.5] for step in range(5)}, id="six percent"
        ),
        pytest.param(
            {(step, step): [5.0, 1.0, 2.0, 0.5] for step in range(4)},
            id="another in each step",
        ),
        pytest.param(
            {(0, 0): [9.0, 1.0, 2.0, 0.5], (0, 1): [9.0, 1.0, 2.0, 0.5]},
            id="in two steps of five",
        ),
    ],
)
def test_nobody_is_named_where_nobody_is_slow(
    changes: dict[tuple[int, int], list[float]],
) -> None:
    assert find_straggler(ranks(changes)) is None


def test_two_steps_are_too_few_to_name_anybody() -> None:
    slow = {(1, step): [0.1, 9.0, 2.0, 0.5] for step in range(3)}
    assert (
        find_straggler(ranks(slow, steps=2)) is None
        and find_straggler(ranks(slow, steps=3)) is not None
    )


def test_one_rank_waits_for_nobody() -> None:
    assert find_straggler(ranks({}, number=1)) is None


def test_waits_for_others_are_no_work_of_the_part_they_happen_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([0.0, 10.0, 13.0, 20.0])
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(here, "waited", 0.0)
    times = StepTimes()
    times.enter("forward")
    here.waited += 4.0
    times.enter("backward")  # at 10
    times.enter(None)  # at 13
    times.end_step()  # at 20
    assert times.take() == [[0.0, 6.0, 3.0, 0.0]]
    assert times.take() == []

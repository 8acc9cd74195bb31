"""Whole training programs, drawn at random, are as in one process, or refused by an error that says what to type.

Programs of Trainer: its history, states, predictions, callbacks, weights, and what plain Transformers loads from its
checkpoints, resumptions on other layouts among them. Where stock Trainer itself has other numbers on several ranks
(``program["by"]`` says why), it is run there. Bare loops of Accelerate: losses, norms, samples of each batch,
evaluations, weights and files. float64: 1e-9, and 5e-6 for losses that Trainer adds up in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.accelerate import loops, programs
from tests.accelerate.program_checks import loop_problems, problems, report


def program(seed: int, **changes: Any) -> programs.Program:
    return {**programs.USUAL, "seed": seed, **changes}


def loop(seed: int, **changes: Any) -> loops.Loop:
    return {**loops.USUAL, "seed": seed, **changes}


def check_programs(cases: list[programs.Program], folder: Path, right: int = 1) -> None:
    found = problems(cases, folder)
    assert not report(found, cases), report(found, cases)
    assert list(found.values()).count(None) >= right


def check_loops(cases: list[loops.Loop], folder: Path, right: int = 1) -> None:
    found = loop_problems(cases, folder)
    assert not report(found, cases), report(found, cases)
    assert list(found.values()).count(None) >= right


def test_a_drawn_program_of_trainer_is_as_in_one_process_or_refused(tmp_path: Path) -> None:
    check_programs([programs.draw(seed) for seed in range(6)], tmp_path, right=4)


def test_a_drawn_loop_is_as_in_one_process_or_refused(tmp_path: Path) -> None:
    check_loops([loops.draw(seed) for seed in range(8)], tmp_path, right=6)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(100, 340, 24))
def test_many_drawn_programs_of_trainer_are_as_in_one_process_or_refused(tmp_path: Path, first: int) -> None:
    check_programs([programs.draw(seed) for seed in range(first, first + 24)], tmp_path, right=18)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(100, 340, 60))
def test_many_drawn_loops_are_as_in_one_process_or_refused(tmp_path: Path, first: int) -> None:
    check_loops([loops.draw(seed) for seed in range(first, first + 60)], tmp_path, right=45)

"""Random layouts of all axes with random knobs, trained with random events, equal one
process to 1e-12 in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.fuzz.layouts import alone, draw, problems, together
from tests.harness import run_ranks

# Stages first and tensor ranks then. Both, evaluated with gradients kept in a window,
# is 1074 of the slow run.
NORMAL = (1001,)
MANY = 200


def outcome(seed: int, folder: Path) -> str:
    """Return what was wrong; "refused: ..." where every rank refused in words."""
    run = draw(seed)
    seen = run_ranks(
        together, run.world, run, folder / str(seed), ranks_per_node=run.ranks_per_node
    )
    refusals = [each for each in seen if isinstance(each, str)]
    if refusals:
        some = (
            ""
            if len(refusals) == len(seen)
            else f"{run}: only {len(refusals)} of {len(seen)} ranks refused: "
        )
        return f"{some}refused: {refusals[0]}"
    expected = alone(run)
    return "\n".join(
        f"{run}: {each}"
        for rank in seen
        if not isinstance(rank, str)
        for each in problems(rank, expected)
    )


@pytest.mark.parametrize("seed", NORMAL)
def test_random_layouts_train_like_one_process(seed: int, tmp_path: Path) -> None:
    wrong = outcome(seed, tmp_path)
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1000 + MANY, 20))
def test_many_random_layouts_train_like_one_process(first: int, tmp_path: Path) -> None:
    found = [outcome(seed, tmp_path) for seed in range(first, first + 20)]
    wrong = [each for each in found if each and not each.startswith("refused: ")]
    assert not wrong, "\n\n".join(wrong)
    assert sum(map(bool, found)) <= 10, "\n\n".join(found)

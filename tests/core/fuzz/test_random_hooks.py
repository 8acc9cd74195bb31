"""Random hooks of parameters see, and change, one process's gradients: losses, weights
and what hooks note are equal to 1e-11 in float64."""

from __future__ import annotations

import pytest

from tests.core.fuzz.hooks import alone, draw, problems, together
from tests.harness import run_ranks

NORMAL = range(6)
MANY = 200


def outcomes(seeds: range) -> list[str]:
    """Return what was wrong in runs of these seeds, which share ranks by their
    number."""
    runs, found = [draw(seed) for seed in seeds], []
    for world in (2, 4):
        own = [run for run in runs if run.world == world]
        by_rank = run_ranks(together, world, own, ranks_per_node=2)
        for run, seen in zip(own, zip(*by_rank, strict=True), strict=True):
            refused = [each for each in seen if isinstance(each, str)]
            wrong = refused or problems(run, list(seen), alone(run))
            found += [f"{run}: {each}" for each in wrong]
    return found


def test_hooks_see_and_change_what_they_do_in_one_process() -> None:
    wrong = outcomes(NORMAL)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1000 + MANY, 50))
def test_many_hooks_see_and_change_what_they_do_in_one_process(first: int) -> None:
    wrong = outcomes(range(first, first + 50))
    assert not wrong, "\n".join(wrong)

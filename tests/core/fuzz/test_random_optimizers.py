"""Random programs around optimizers have one process's numbers: losses, norms, rates,
gradients, states, averages and weights."""

from __future__ import annotations

import pytest

from tests.core.fuzz.optimizer_programs import alone, draw, problems, together
from tests.harness import run_ranks

NORMAL = range(400, 403)
MANY = 200
AT_ONCE = 20


def outcomes(seeds: range) -> list[str]:
    """Return what was wrong in programs of these seeds, which share ranks by their
    number."""
    programs, found = [draw(seed) for seed in seeds], []
    for world in (2, 4):
        own = [program for program in programs if program.world == world]
        if not own:
            continue
        by_rank = run_ranks(together, world, own, ranks_per_node=2)
        for program, seen in zip(own, zip(*by_rank, strict=True), strict=True):
            wrong = problems(program, list(seen), alone(program))
            found += [f"{program}: {each}" for each in wrong]
    return found


def test_programs_around_optimizers_are_those_of_one_process() -> None:
    wrong = outcomes(NORMAL)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, MANY, AT_ONCE))
def test_many_programs_around_optimizers_are_those_of_one_process(first: int) -> None:
    wrong = outcomes(range(first, first + AT_ONCE))
    assert not wrong, "\n".join(wrong)

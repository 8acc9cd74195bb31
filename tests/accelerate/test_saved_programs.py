"""Programs that are saved in their middle at one layout go on at another as one process
does that never stops: losses and weights (float64, 1e-11), extra states, objects of the
user's own; or they are refused on all ranks alike."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.accelerate.saved_programs import alone, differences, draw, halves
from tests.harness import run_ranks

QUICK = (27, 136, 171, 331)
"""Together they have all parts of `saved_programs`."""


def _on_ranks(world: int, programs: list[Any], second: bool) -> list[Any]:
    """One process is this one, which nothing has launched."""
    if world == 1:
        return [halves(programs, second)]
    return run_ranks(halves, world, programs, second)


def check(seeds: Iterable[int], saved: int, loaded: int, folder: Path) -> int:
    """Run drawn programs; return how many were refused."""
    drawn = {seed: draw(seed, saved, loaded) for seed in seeds}
    programs = [(program, str(folder / str(seed))) for seed, program in drawn.items()]
    first = _on_ranks(saved, programs, False)
    second = _on_ranks(loaded, programs, True)
    refused = 0
    for number, (seed, program) in enumerate(drawn.items()):
        for ranks in (first, second):
            found = [rank[number] for rank in ranks]
            words = {each for each in found if isinstance(each, str)}
            if words:
                # The first half's refusal leaves nothing to load.
                assert len(words) == 1 and len(found) == len(ranks), (seed, program)
                assert words.pop().startswith(("refused: ", "nothing saved")), found
                refused += 1
                break
            for seen in found:
                assert not isinstance(seen, str)
                wrong = differences(seen, alone(program))
                assert wrong == [], (seed, program)
    return refused


@pytest.mark.parametrize(
    "seeds", [QUICK[:2], pytest.param(QUICK[2:], marks=pytest.mark.slow)]
)
def test_drawn_programs_go_on_at_another_layout(
    tmp_path: Path, seeds: tuple[int, ...]
) -> None:
    assert check(seeds, 2, 2, tmp_path) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded"), [(2, 4), (4, 2), (4, 1), (1, 2)])
def test_many_drawn_programs(tmp_path: Path, saved: int, loaded: int) -> None:
    assert check(range(100, 130), saved, loaded, tmp_path) <= 10

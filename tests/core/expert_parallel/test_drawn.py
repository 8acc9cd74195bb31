"""Random mixtures of experts, with random layouts, knobs and events, train like one
process to 1e-12 in float64, or are refused on all ranks before training, by the name of
a knob."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.expert_parallel.drawn import draw, outcome
from tests.harness import RanksFailed, run_ranks

NORMAL = (1009,)
MANY, AT_ONCE = 300, 20


def told(seed: int, folder: Path) -> str:
    """Return what a training came to: "exact", "refused: ...", or what is wrong, of all
    ranks."""
    run = draw(seed)
    try:
        found = run_ranks(
            outcome,
            run.world,
            run,
            folder / str(seed),
            ranks_per_node=run.ranks_per_node,
            timeout=240,
        )
    except RanksFailed as failed:
        return f"{seed}: {run}: {failed}"
    kinds = {each.partition(":")[0] for each in found}
    return (
        found[0]
        if kinds in ({"exact"}, {"refused"})
        else f"{seed}: {run}: {sorted(set(found))}"
    )


@pytest.mark.parametrize("seed", NORMAL)
def test_drawn_mixtures_train_like_one_process(seed: int, tmp_path: Path) -> None:
    """1e-12: sums in another order, in float64."""
    assert told(seed, tmp_path) == "exact"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1000 + MANY, AT_ONCE))
def test_many_drawn_mixtures_train_like_one_process_or_are_refused(
    first: int, tmp_path: Path
) -> None:
    """1e-12, as above; most are not refused."""
    found = [told(seed, tmp_path) for seed in range(first, first + AT_ONCE)]
    wrong = [each for each in found if not each.startswith(("exact", "refused: "))]
    assert not wrong, "\n\n".join(wrong)
    assert found.count("exact") > AT_ONCE // 2, "\n\n".join(found)

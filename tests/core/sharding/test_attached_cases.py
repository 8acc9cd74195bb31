"""Adapters attached in any way that a seed draws train as in one process, or are
refused on all ranks alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.core.sharding.attached_cases import (
    WORLD,
    Case,
    draw,
    in_one_process,
    on_ranks,
)
from tests.harness import run_ranks

# What is said where a case is beyond what is built; of a rank that attaches an adapter
# alone.
REFUSED = (
    "build the model in the same way on all ranks",
    "looks across a tensor",
    "cannot exchange sums",
)
ALONE = (
    "attached different parameters",
    "was attached to the model after",
    "build the model in the same way",
)


def all_on_ranks(cases: list[Case], folder: Path) -> list[Any]:
    return [on_ranks(case, folder / str(number)) for number, case in enumerate(cases)]


def check(seeds: range, folder: Path) -> dict[str, int]:
    """Count cases by what became of them."""
    cases, counts = [draw(seed) for seed in seeds], {"exact": 0, "refused": 0}
    of_cases = zip(*run_ranks(all_on_ranks, WORLD, cases, folder), strict=True)
    for seed, case, by_rank in zip(seeds, cases, of_cases, strict=True):
        what = f"seed {seed}: {case}"
        if isinstance(by_rank[0], str):
            assert by_rank == (by_rank[0],) * WORLD, (what, by_rank)
            allowed = REFUSED if case.alone is None else (*REFUSED, *ALONE)
            assert any(words in by_rank[0] for words in allowed), (what, by_rank[0])
            counts["refused"] += 1
            continue
        assert case.alone is None, what
        expected = in_one_process(case)
        for seen in by_rank:
            assert seen.keys() == expected.keys(), what
            for name, value in expected.items():
                assert torch.equal(seen[name], by_rank[0][name]), (
                    what,
                    name,
                    "ranks differ",
                )
                assert (seen[name] - value).abs().max() <= case.tolerance, (what, name)
        counts["exact"] += 1
    return counts


def test_a_few_cases_are_exact_or_refused(tmp_path: Path) -> None:
    counts = check(range(1, 5), tmp_path)
    assert counts["exact"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 700, 60))
def test_many_cases_are_exact_or_refused(first: int, tmp_path: Path) -> None:
    counts = check(range(first, first + 60), tmp_path)
    assert counts["exact"] >= 20

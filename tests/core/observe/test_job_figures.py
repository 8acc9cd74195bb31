"""JobFigures of one rank, by hand: what is counted between two reports."""

from __future__ import annotations

import torch

from smp_core.observe import JobFigures


def figures_alone() -> JobFigures:
    return JobFigures(
        None,
        device=torch.device("cpu"),
        world_size=1,
        data_size=1,
        over_ranks=lambda values, operation: values,
    )


def test_the_mean_of_many_losses_of_few_digits_is_theirs() -> None:
    # bfloat16 has steps of 4 above 512: a sum in it would stand still there.
    figures = figures_alone()
    for _ in range(1000):
        figures.count(1, None, torch.tensor(1.5, dtype=torch.bfloat16))
    figures.report(1, {})
    assert figures.loss == 1.5

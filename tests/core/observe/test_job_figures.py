"""JobFigures of one rank, by hand: what is counted between two reports."""

from __future__ import annotations

import pytest
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


def test_a_forward_that_never_ended_is_not_measured_on() -> None:
    figures, product = figures_alone(), torch.ones(4, 4)
    figures.measure_forward()
    product @ product  # it fails, or its batch is skipped
    figures.measure_forward()
    product @ product
    figures.count(1, None)
    product @ product
    figures.end_step()
    figures.start_clock()
    figures.count(2, None)
    rates = figures.report(1, {})
    measured = rates["tflops_per_device"] * 1e12 / rates["samples_per_second"]
    assert measured == pytest.approx(3 * 2 * 4**3)
    assert torch._C._len_torch_dispatch_stack() == 0

"""TraceMeter: the bytes that operators of a step move."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from smp_core.planner.trace_meter import TraceMeter

WIDTH = 1000


def moved(
    step: Callable[[torch.Tensor, torch.Tensor], object], what: str = "moved"
) -> float:
    """Return the bytes that ``step`` moves, of two float32 vectors of 1,000 elements;
    "fused": if it is compiled."""
    with FakeTensorMode():
        x, y = torch.ones(WIDTH), torch.ones(WIDTH)
        with TraceMeter(set()) as meter:
            step(x, y)
    return meter.counts[f"forward_{what}"]


def test_operators_move_what_they_read_and_write() -> None:
    assert moved(lambda x, y: x + y) == 3 * 4 * WIDTH
    assert moved(lambda x, y: torch.relu(x)) == 2 * 4 * WIDTH


def test_views_and_questions_move_nothing() -> None:
    """Each `device` goes through the dispatcher as an operator that takes a tensor and
    returns none."""
    assert moved(lambda x, y: (x.device, y.device, x.is_same_size(y))) == 0
    assert moved(lambda x, y: x[:10].view(2, 5)) == 0


def test_operators_that_only_change_tensors_move_what_they_change() -> None:
    """They return nothing, as questions do."""
    assert moved(lambda x, y: torch._foreach_mul_([x, y], 2.0)) == 2 * 4 * WIDTH  # type: ignore[func-returns-value]


def product(x: torch.Tensor) -> torch.Tensor:
    return x.view(10, -1) @ x.view(-1, 10)


@pytest.mark.parametrize(
    ("step", "vectors"),
    [
        # Two are read, nothing that is made is used.
        (lambda x, y: torch.relu(x + y).mean(), 2),
        # The product reads what was written.
        (lambda x, y: product(torch.relu(x + y)), 3),
        (lambda x, y: product(torch.relu(x) * x.mean()), 2),  # x is read once
        # By one kernel before the product, one behind it.
        (lambda x, y: (torch.relu(x), product(y), torch.tanh(x)), 2),
        (lambda x, y: x.mul_(2.0).add_(y), 4),  # x and y are read, and x changed twice
    ],
)
def test_a_compiler_moves_what_lies_between_products_once(
    step: Callable[[torch.Tensor, torch.Tensor], object], vectors: int
) -> None:
    assert moved(step, "fused") == vectors * 4 * WIDTH


def test_products_read_and_write_their_operands() -> None:
    """Bytes of a parameter and its gradient are apart from those of activations; no
    shape is taken for a parameter's that has met one."""
    with FakeTensorMode():
        matrix = torch.ones(8, 8, requires_grad=True)
        x = torch.ones(8, 8, requires_grad=True)
        meter = TraceMeter(set())
        meter.ignore(matrix)
        with meter:
            y = x.relu() @ matrix
            meter.end_forward()
            y.backward(torch.ones(8, 8))
    size = 4 * 8 * 8
    counted = meter.counts
    assert counted["forward_operands"] == 2 * size
    assert counted["forward_matrices"] == size
    # The input's gradient is of the output's and the matrix, the matrix' of the
    # output's and the input.
    assert counted["backward_operands"] == (2 + 2) * size
    assert counted["backward_matrices"] == 2 * size

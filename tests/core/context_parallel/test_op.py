"""Attention over 2, 4 and 8 ranks is attention in one process."""

from __future__ import annotations

import pytest
import torch

from smp_core.context_parallel.attention import attention
from smp_core.context_parallel.sequence_plan import SequencePlan
from tests.core.context_parallel.attention_cases import (
    Case,
    group_of,
    largest_errors,
    matrix,
    sample,
    squared_errors,
)
from tests.harness import run_ranks


def check_float64(cases: list[Case], ranks: int, timeout: float = 240.0) -> None:
    """1e-12: some hundred rounding errors of sums over up to 64 keys in another
    order."""
    for seen in run_ranks(largest_errors, ranks, cases, timeout=timeout):
        wrong = [result for result in seen if not result["worst"] <= 1e-12]
        assert not wrong, f"{len(wrong)} of {len(seen)}, first {wrong[0]}"


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_output_and_gradients_equal_one_process(ranks: int) -> None:
    check_float64(sample(ranks), ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_output_and_gradients_equal_one_process_everywhere(ranks: int) -> None:
    check_float64(matrix() if ranks < 8 else matrix()[::3], ranks, timeout=600)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16],
    ids=str,
)
def test_lower_precision_adds_no_error_of_its_own(dtype: torch.dtype) -> None:
    """RMS error against float64, over all ranks' tokens, at most twice that of torch's
    own attention in one process."""
    cases = [
        Case(mask, length=128)
        for mask in ("causal", "window", "packed", "packed window", "bidirectional")
    ]
    cases += [
        Case("packed chunked", length=128),
        Case("causal", length=128, sinks=True),
    ]
    results = run_ranks(squared_errors, 4, cases, dtype)
    for number, case in enumerate(cases):
        for part, name in enumerate(
            ("out", "dq", "dk", "dv", "dsinks")[: 4 + case.sinks]
        ):
            ours, theirs = (
                sum(seen[number][part][whose] for seen in results) ** 0.5
                for whose in (0, 1)
            )
            assert theirs > 0
            assert ours <= 2 * theirs, (
                f"{case} {name}: {ours / theirs:.2f} times the error"
            )


def test_sinks_are_one_per_query_head() -> None:
    q, plan = torch.randn(1, 8, 4, 8), SequencePlan(1, 8).encode()
    k = torch.randn(1, 8, 2, 8)
    with pytest.raises(ValueError, match=r"sinks \(2,\) do not fit 4 query heads"):
        attention(q, k, k, plan, sinks=torch.zeros(2))


def second_derivatives() -> str:
    group = group_of(1)
    plan = SequencePlan(group.degree, 8, group=group.number)
    q, k, v = (
        torch.randn(1, 4, 2, 8, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    )
    out = attention(q, k, v, plan.encode())
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError) as refused:
        gradient.square().sum().backward()
    return str(refused.value)


def test_a_second_derivative_is_refused() -> None:
    for said in run_ranks(second_derivatives, 2):
        assert "has no second derivative" in said
        assert "write context_parallel_degree=1" in said

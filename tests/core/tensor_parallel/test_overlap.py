"""Sums of input gradients travel while the gradients of weights are computed, and
nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from smp_core.tensor_parallel.operators import TensorAxis
from smp_core.tensor_parallel.overlap import ColumnInputs, _Operands
from tests.core.tensor_parallel.model_cases import (
    Case,
    Training,
    batches,
    differences,
    loss_of,
    together,
)
from tests.harness import run_ranks

RECOMPUTED = (("activations", "full"),)
CASES = [
    Case("llama"),
    Case("llama", sequence=False, knobs=RECOMPUTED),
    Case("gpt2", micro_batches=2),
]


def with_and_without() -> list[tuple[Training, Training]]:
    found = [together(case) for case in CASES]
    add, ColumnInputs.add = ColumnInputs.add, lambda *_: None  # type: ignore[method-assign]
    try:
        return [(seen, together(case)) for seen, case in zip(found, CASES, strict=True)]
    finally:
        ColumnInputs.add = add  # type: ignore[method-assign]


@pytest.mark.slow
def test_numbers_are_equal_to_the_bit() -> None:
    for case, (seen, plain) in zip(
        CASES, run_ranks(with_and_without, 2)[0], strict=True
    ):
        assert differences(seen, plain, 0.0) == [], case


class Log:
    """What happens in a backward pass, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        axis = TensorAxis
        self._kept: Any = (
            axis.start_reduce_scatter,
            axis.start_all_reduce,
            axis.gather,
            _Operands.product,
        )

    def __enter__(self) -> list[str]:
        changed: Any = TensorAxis
        changed.start_reduce_scatter, changed.start_all_reduce = map(
            self._noting, self._kept[:2]
        )
        gather, product = self._kept[2:]
        changed.gather = lambda *args: self.events.append("gather") or gather(*args)
        _Operands.product = lambda operands: (
            self.events.append("weight") or product(operands)
        )  # type: ignore
        return self.events

    def __exit__(self, *_: object) -> None:
        changed: Any = TensorAxis
        (
            changed.start_reduce_scatter,
            changed.start_all_reduce,
            changed.gather,
            _Operands.product,
        ) = self._kept

    def _noting(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*args: Any) -> Callable[[], torch.Tensor]:
            self.events.append("sum")
            finish = start(*args)
            return lambda: self.events.append("end") or finish()  # type: ignore[func-returns-value]

        return begin


def backward_of(case: Case) -> list[str]:
    parallel = case.parallel()
    # Behind the first step it is known where tokens stay split.
    loss_of(parallel.module, batches(1)[0, 0]).backward()
    parallel.window.close()
    loss = loss_of(parallel.module, batches(1)[0, 0])
    with Log() as events:
        loss.backward()
    return events


def backwards() -> list[list[str]]:
    return [
        backward_of(Case("llama")),
        backward_of(Case("llama", sequence=False, knobs=RECOMPUTED)),
        backward_of(Case("llama", knobs=RECOMPUTED)),
    ]


def test_weights_gradients_are_computed_between_the_start_of_a_sum_and_its_end() -> (
    None
):
    """Gate and up share one input and its sum, and so do queries, keys and values; two
    blocks after the head. Of what else is added up (norms among split tokens; outputs
    of row layers that are computed again) each is waited for. Blocks that are
    recomputed gather again, the first and the last one too."""
    head, mlp, attention = (
        ["sum", *["weight"] * layers, "end"] for layers in (1, 2, 3)
    )
    once, again, gathered_again = run_ranks(backwards, 2)[0]
    for events in (once, again, gathered_again):
        told = (
            " ".join(event for event in events if event != "gather")
            .replace("sum end", "")
            .split()
        )
        assert told == [*head, *mlp, *attention, *mlp, *attention]
    # Two row layers in each block and the tokens before the first; two inputs of column
    # layers in each.
    assert once.count("gather") == 5 and gathered_again.count("gather") == 5 + 4

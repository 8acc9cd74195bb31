"""Transformers models over context ranks have the loss and gradients that one process
has."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.core.context_parallel.model_cases import MODELS, Run, errors
from tests.harness import run_ranks

DEGREES = ((4, 4), (4, 2), (4, 1), (2, 2))
MATRIX = [
    Run(model, *degrees, rows, checkpointing)
    for model, degrees, rows, checkpointing in itertools.product(
        MODELS, DEGREES, ("plain", "packed", "left", "right"), (False, True)
    )
    # Alone, these two attend across documents that positions tell apart.
    if rows != "packed" or model not in ("opt", "roberta")
]


def check(runs: list[Run], timeout: float = 240.0, tolerance: float = 1e-10) -> None:
    """1e-10, for losses of about 4 and gradients of up to 1."""
    for seen in run_ranks(errors, 4, runs, ranks_per_node=2, timeout=timeout):
        for run, of_loss, of_gradients, largest in seen:
            assert largest > 1e-3, f"{run} has no gradients to speak of"
            close = of_loss <= tolerance and of_gradients <= tolerance
            assert close, f"{run}: loss {of_loss}, gradients {of_gradients} off"


chooser = random.Random(4)
ONCE = [
    chooser.choice([run for run in MATRIX if run.model == model and run.context > 1])
    for model in MODELS
]


MORE = [run for place, run in enumerate(ONCE) if place % 4]


@pytest.mark.parametrize(
    "runs", [ONCE[::4], pytest.param(MORE, marks=pytest.mark.slow)], ids=len
)
def test_loss_and_gradients_equal_one_process(runs: list[Run]) -> None:
    """Every model once, with other degrees and rows, checkpointed or not; in the normal
    run every fourth."""
    check(runs)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_loss_and_gradients_equal_one_process_everywhere(model: str) -> None:
    check([run for run in MATRIX if run.model == model], timeout=600)


@pytest.mark.slow
def test_layers_compile_as_one_graph_each() -> None:
    check([Run("llama", 4, 2, "packed", compiled="aot_eager")])


@pytest.mark.slow
def test_layers_compile_with_inductor() -> None:
    """1e-7: Llama's norms add up in float32 whatever the dtype, and Inductor in another
    order. Checkpointed or not."""
    runs = [
        Run("llama", 4, 2, "packed", checkpointing, compiled="inductor")
        for checkpointing in (False, True)
    ]
    check(runs, timeout=600, tolerance=1e-7)

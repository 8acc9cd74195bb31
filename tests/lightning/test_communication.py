"""The Trainer with every way of saving bytes: exact ones train like one process,
encoded ones resume as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.resuming import EXACT, after, assert_goes_on, fit_from
from tests.lightning.running import Run, assert_same, together, worst

EXACT_SCHEMES: list[dict[str, Any]] = [
    {"shard_degree": 1},
    {
        "shard_degree": 4,
        "reshard_after_forward": "node",
        "collectives": {"forward_prefetch": 1, "backward_prefetch": 2},
    },
    {"shard_degree": 4, "compression": {"gather": "int8", "gather_after_steps": 100}},
    {"shard_degree": 2, "optimizer_shard": "world"},
    {"shard_degree": 1, "optimizer_shard": "world"},
]


def fit_several(cases: list[dict[str, Any]]) -> list[Run]:
    return [fit_from(knobs, 1) for knobs in cases]


@pytest.mark.parametrize(
    "schemes",
    [EXACT_SCHEMES[1:3], pytest.param(EXACT_SCHEMES, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_exact_schemes_train_like_one_process(schemes: list[dict[str, Any]]) -> None:
    expected = fit_from(None, 1)
    for runs in together(fit_several, schemes):
        assert_same(runs, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "degree",
    [
        2,
        pytest.param(4, marks=pytest.mark.slow),
        pytest.param(1, marks=pytest.mark.slow),
    ],
)
def test_what_was_rounded_off_is_saved_and_goes_on(degree: int, tmp_path: Path) -> None:
    """A resumed run equals the one that was not interrupted to float64's rounding, only
    if the remainders of its 4-bit sums were saved too; another layout of ranks starts
    without them and stays near."""
    knobs = {"shard_degree": degree, "compression": "int4"}
    saved = str(tmp_path / "saved")
    uninterrupted = together(fit_from, knobs, 3)
    together(fit_from, knobs, 1, save=saved)
    assert_goes_on(together(fit_from, knobs, 3, load=saved), uninterrupted[0])
    exact = together(
        fit_from,
        {**knobs, "compression": {"reduce": None, "error_feedback": False}},
        3,
        load=saved,
    )
    assert worst(exact[0].weights, uninterrupted[0].weights)[0] > 1e-9, (
        "encoding changes what is learned"
    )
    elsewhere = together(
        fit_from, {**knobs, "shard_degree": min(degree, 2)}, 3, load=saved, ranks=2
    )
    assert len(elsewhere[0].losses) == len(after(uninterrupted[0], 1).losses)
    assert EXACT["precision"] == "64-true"


@pytest.mark.parametrize(
    "whole_file", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_half_precision_parameters_resume_from_float32_weights(
    whole_file: bool, tmp_path: Path
) -> None:
    """To the last bit, which only weights that were not rounded when they were saved
    give."""
    knobs = {"shard_degree": 1, "optimizer_shard": "world", "param_dtype": "bfloat16"}
    knobs["checkpoint"] = {"full_state_dict": whole_file}
    saved, flags = str(tmp_path / "saved.ckpt"), {"precision": "32-true", "ranks": 2}
    (uninterrupted, *_) = together(fit_from, knobs, 2, **flags)
    together(fit_from, knobs, 1, save=saved, **flags)
    for run in together(fit_from, knobs, 2, load=saved, **flags):
        assert run.losses == after(uninterrupted, 1).losses
        assert worst(run.weights, uninterrupted.weights)[0] == 0.0
    assert torch.bfloat16 in {value.dtype for value in uninterrupted.weights.values()}

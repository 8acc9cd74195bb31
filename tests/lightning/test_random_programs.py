"""Random programs of Lightning give what they give in one process, to 1e-9 in float64, or are refused in words."""

from __future__ import annotations

import logging
import math
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.lightning.programs import Program, draw, run

TOLERANCE = 1e-9


def on_ranks(programs: list[tuple[Program, str]]) -> list[dict[str, Any] | str]:
    warnings.filterwarnings("ignore")
    found: list[dict[str, Any] | str] = []
    for program, folder in programs:
        try:
            found.append(run(program, folder))
        except Exception as error:  # the same on all ranks
            found.append("".join(traceback.format_exception(error)))
    return found


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Where two results differ, numbers by more than the tolerance."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        lines = [f"{path}: only one has {key}" for key in ours.keys() ^ theirs.keys()]
        for key in theirs:
            lines += differences(ours[key], theirs[key], f"{path} / {key}") if key in ours else []
        return lines
    if isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            return [f"{path}: {len(ours)} items, in one process {len(theirs)}: {ours} {theirs}"]
        lines = []
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            lines += differences(one, other, f"{path} / {number}")
        return lines
    if torch.is_tensor(theirs):
        same = ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=0, atol=TOLERANCE)
        return [] if same else [f"{path}: tensors are {(ours - theirs).abs().max()} apart"]
    try:
        same = math.isclose(float(ours), float(theirs), rel_tol=0, abs_tol=TOLERANCE) or str(ours) == str(theirs)
    except (TypeError, ValueError):
        same = ours == theirs
    return [] if same else [f"{path}: {ours}, in one process {theirs}"]


def problems(programs: list[Program], folder: Path, ranks: int = 2) -> list[tuple[Program, str]]:
    expected = on_ranks([(program, str(folder / f"alone-{program['seed']}")) for program in programs])
    of_ranks = run_ranks(
        on_ranks, ranks, [(program, str(folder / f"ranks-{program['seed']}")) for program in programs], ranks_per_node=2
    )
    found = []
    for program, ours, theirs in zip(programs, of_ranks[0], expected, strict=True):
        if isinstance(theirs, str):
            found.append((program, f"fails in one process: {theirs[-600:]}"))
        elif isinstance(ours, str):
            found.append((program, ours[-1500:]))
        elif lines := differences(ours, theirs):
            found.append((program, "\n".join(lines[:6])))
    return found


BASE: Program = {
    "optimization": "automatic", "optimizer": "AdamW", "schedule": "none", "train": 12, "val": 6, "loaders": "one",
    "val_loaders": 1, "overrides": [], "callbacks": [], "output": "tensor", "after": [],
    "flags": {"max_epochs": 2, "log_every_n_steps": 1}, "knobs": {"shard_degree": 1},
}  # fmt: skip
# What was wrong once.
WRONG_ONCE = {
    "an average outlives its fit": {"callbacks": ["ema"], "after": ["validate best", "test", "predict"]},
}


def test_what_was_wrong_once_is_as_in_one_process(tmp_path: Path) -> None:
    programs = [{**BASE, **each, "seed": number} for number, each in enumerate(WRONG_ONCE.values())]
    assert problems(programs, tmp_path) == []


def test_a_drawn_program_is_as_in_one_process(tmp_path: Path) -> None:
    assert problems([draw(seed) for seed in range(4)], tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("first", range(100, 400, 50))
def test_many_drawn_programs_are_as_in_one_process(first: int, ranks: int, tmp_path: Path) -> None:
    assert problems([draw(seed) for seed in range(first, first + 50)], tmp_path, ranks) == []


def said_of_gradients(folder: str) -> list[str]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("smp").addHandler(handler)
    knobs = {"shard_degree": 1, "optimizer_shard": "world"}
    drawn = {"overrides": ["on_before_optimizer_step", "on_after_backward"], "callbacks": ["edits gradients", "stop"]}
    run({**BASE, **drawn, "knobs": knobs, "seed": 0}, folder)
    logging.getLogger("smp").removeHandler(handler)
    return [line for line in said if "no gradients on parameters" in line]


def test_hooks_that_look_for_gradients_where_there_are_none_are_named(tmp_path: Path) -> None:
    first, other = run_ranks(said_of_gradients, 2, str(tmp_path), ranks_per_node=2)
    assert len(first) == 1 and other == []
    assert "what on_before_optimizer_step and Edits.on_before_optimizer_step does" in first[0]

"""Ordinary `.ckpt` files, by checkpoint="full" and by `smp checkpoint consolidate`:
read without us, and by us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from smp_core.cli import app
from tests.lightning.modules import LateModule, ScheduledModule
from tests.lightning.resuming import assert_goes_on, fit_from
from tests.lightning.running import (
    Run,
    assert_same,
    make_trainer,
    report,
    together,
    worst,
)

WHOLE = {"checkpoint": "full"}


def assert_loads_without_us(path: Path, expected: Run) -> None:
    """LightningModule.load_from_checkpoint in one process, hyper-parameters from the
    file."""
    loaded = ScheduledModule.load_from_checkpoint(path)
    assert loaded.batches == 5
    difference, name = worst(dict(loaded.state_dict()), expected.weights)
    # load_from_checkpoint builds the module in float32.
    assert difference <= 1e-6, f"{name} is {difference} off"


def assert_one_process_goes_on(path: Path, reference: Path) -> None:
    """As it does from its own file. (Lightning loads into a float32 module first, so
    both are rounded once.)"""
    expected = fit_from(None, 2, load=str(reference))
    assert len(expected.losses) == 5 and expected.extra["steps"] == 6
    resumed = fit_from(None, 2, load=str(path))
    assert_same(resumed, expected)
    assert resumed.extra == expected.extra


@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_full_checkpoint_is_an_ordinary_file_of_one_process(
    degree: int, tmp_path: Path
) -> None:
    """It has what one process writes, and one process and other ranks go on from it."""
    path, reference = tmp_path / "full.ckpt", tmp_path / "reference.ckpt"
    together(fit_from, {"shard_degree": degree, **WHOLE}, 1, save=str(path))
    expected = fit_from(None, 1, save=str(reference))
    assert path.is_file()
    ours, theirs = (torch.load(at, weights_only=True) for at in (path, reference))
    assert ours.keys() >= theirs.keys()
    assert worst(ours["state_dict"], theirs["state_dict"])[0] <= 1e-12
    for mine, other in zip(
        ours["optimizer_states"], theirs["optimizer_states"], strict=True
    ):
        assert [group["params"] for group in mine["param_groups"]] == [
            group["params"] for group in other["param_groups"]
        ]
        assert mine["state"].keys() == other["state"].keys()
        for number, entry in other["state"].items():
            assert worst(mine["state"][number], entry)[0] <= 1e-12
    assert_loads_without_us(path, expected)
    assert_one_process_goes_on(path, reference)
    assert_goes_on(
        together(fit_from, {"shard_degree": 2}, 2, load=str(path), ranks=2),
        fit_from(None, 2),
    )


def test_an_ordinary_checkpoint_of_one_process_goes_on_under_the_strategy(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "one.ckpt")
    fit_from(None, 1, save=path)
    longer = fit_from(None, 2)
    assert_goes_on(
        together(fit_from, {"shard_degree": 2}, 2, load=path, ranks=2), longer
    )
    assert_goes_on(
        together(fit_from, {"shard_degree": 1}, 2, load=path, ranks=2), longer
    )


# In the normal run: one file as it is saved, above, and consolidated ones of the core.
@pytest.mark.slow
def test_a_consolidated_folder_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    folder, out, reference = (
        tmp_path / name for name in ("sharded", "out.ckpt", "reference.ckpt")
    )
    together(fit_from, {"shard_degree": 4}, 1, save=str(folder))
    result = CliRunner().invoke(
        app, ["checkpoint", "consolidate", str(folder), str(out), "--optimizer"]
    )
    assert result.exit_code == 0, result.output
    expected = fit_from(None, 1, save=str(reference))
    for path in (out, folder):  # lightning_smp reads a folder there, too
        assert_loads_without_us(path, expected)
    assert_one_process_goes_on(out, reference)


def fit_late(options: dict[str, Any], knobs: dict[str, Any] | None, path: str) -> Run:
    module = LateModule(**options)
    trainer = make_trainer(knobs, precision="64-true")
    trainer.fit(module)
    trainer.save_checkpoint(path)
    return report(trainer, module)


def test_a_module_with_configure_model_loads_from_a_full_checkpoint(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "late.ckpt")
    run = together(
        fit_late, {}, {"shard_degree": 4, "delayed_init": True, **WHOLE}, path
    )[0]
    loaded = LateModule.load_from_checkpoint(path)
    assert worst(dict(loaded.state_dict()), run.weights)[0] <= 1e-6, (
        "load_from_checkpoint builds it in float32"
    )

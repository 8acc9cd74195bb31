"""Trackers of Lightning's loggers hold what one process would have written, once, and
SmpMonitor's figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)

from lightning_smp import SmpMonitor
from smp_core.run_log.read import Run as Log
from tests import trackers
from tests.harness import run_ranks
from tests.lightning.modules import GLOBAL_BATCH, LanguageModule
from tests.lightning.running import make_trainer
from tests.logged import warnings_said

BATCHES, EPOCHS, EVERY = 4, 2, 3
# TensorBoard keeps float32, the others float64 of float64 values: sums over ranks in
# another order.
TOLERANCE = {"tensorboard": 1e-6, "mlflow": 1e-12, "wandb": 1e-12}


class Logged(LanguageModule):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, sync_dist=True)
        self.log(
            "tokens",
            float(batch.numel()),
            reduce_fx="sum",
            on_step=False,
            on_epoch=True,
            sync_dist=True,
        )
        return loss


def logger_of(tracker: str, folder: str) -> Logger:
    if tracker == "tensorboard":
        return TensorBoardLogger(folder, name="", version="")
    if tracker == "mlflow":
        return MLFlowLogger("run", tracking_uri=trackers.store_of(folder))
    return WandbLogger(project="run", save_dir=folder, offline=True)


def fit(
    tracker: str, folder: str, knobs: dict[str, Any] | None = None
) -> dict[str, float]:
    callbacks = [] if knobs is None else [SmpMonitor(every_n_steps=EVERY)]
    flags: dict[str, Any] = {
        "precision": "64-true",
        "max_epochs": EPOCHS,
        "log_every_n_steps": 1,
    }
    trainer = make_trainer(
        knobs,
        logger=logger_of(tracker, folder),
        callbacks=callbacks,
        default_root_dir=folder,
        **flags,
    )
    trainer.fit(Logged(BATCHES))
    if tracker == "wandb":
        import wandb

        wandb.finish()
        wandb.teardown()
    return callbacks[0].latest if callbacks else {}


@dataclass
class Runs:
    """Folders of a run in one process and of one on two ranks with SmpMonitor, whose
    last report is ``latest``."""

    tracker: str
    alone: Path
    ours: Path
    latest: dict[str, float]


@pytest.fixture(scope="module", params=trackers.TRACKERS)
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    tracker: str = request.param
    trackers.needs(tracker)
    alone, ours = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("ours")
    for folder in (alone, ours):
        trackers.make_store(tracker, folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in trackers.ENVIRONMENT.items():
            patch.setenv(name, value)
        fit(tracker, str(alone))
    latest, _ = run_ranks(
        fit,
        2,
        tracker,
        str(ours),
        {"shard_degree": 2},
        env=trackers.ENVIRONMENT,
        ranks_per_node=1,
    )
    yield Runs(tracker, alone, ours, latest)


def split_figures(values: trackers.Values) -> tuple[trackers.Values, trackers.Values]:
    """What the module logged, and SmpMonitor's figures."""
    figures = {
        name: points for name, points in values.items() if name.startswith("smp/")
    }
    return {
        name: points for name, points in values.items() if name not in figures
    }, figures


def test_trackers_hold_what_one_process_would_have_written(runs: Runs) -> None:
    """Names, steps, values, and how often: a value per rank would be one too many, a
    sum too large."""
    expected = trackers.read(runs.tracker, runs.alone, "trainer/global_step")
    logged, _ = split_figures(
        trackers.read(runs.tracker, runs.ours, "trainer/global_step")
    )
    assert {"train_loss", "val_loss", "tokens"} <= expected.keys()
    trackers.assert_same_values(logged, expected, TOLERANCE[runs.tracker])


def test_trackers_hold_figures_of_the_job_once_a_report(runs: Runs) -> None:
    """Lightning counts the steps of what it logs from 0; the last report is of the two
    steps left."""
    _, figures = split_figures(
        trackers.read(runs.tracker, runs.ours, "trainer/global_step")
    )
    steps = [2, 5, 7]
    assert figures["smp/samples"] == [
        (step, (step + 1) * GLOBAL_BATCH) for step in steps
    ]
    last = {}
    for name, points in figures.items():
        trackers.assert_once(name, points)
        assert {step for step, _ in points} <= set(steps)
        if points[-1][0] == steps[-1]:
            last[name] = points[-1][1]
    expected = {f"smp/{name}": value for name, value in runs.latest.items()}
    assert last == pytest.approx(expected, rel=TOLERANCE[runs.tracker])


def test_a_run_with_any_tracker_has_a_log_for_smp_report(runs: Runs) -> None:
    """Where the logger writes; in the Trainer's folder where it has none, as MLflow's
    database."""
    (log,) = runs.ours.rglob("run.jsonl")
    assert list(Log.read(log.parent).steps) == [3, 6, 8]


class Uploading(CSVLogger):
    """A logger that was asked to upload checkpoints, as Lightning's loggers of W&B and
    MLflow keep it."""

    _log_model = True


def fit_uploading(folder: str, checkpoint: str) -> list[str]:
    with warnings_said() as said:
        flags: dict[str, Any] = {
            "logger": Uploading(folder),
            "enable_checkpointing": True,
            "limit_train_batches": 1,
        }
        make_trainer({"checkpoint": checkpoint}, default_root_dir=folder, **flags).fit(
            Logged(1)
        )
    return [text for text in said if "log_model" in text]


@pytest.mark.parametrize(
    ("checkpoint", "warnings"),
    [("sharded", [1, 0]), pytest.param("full", [0, 0], marks=pytest.mark.slow)],
)
def test_a_logger_that_would_upload_no_sharded_checkpoint_is_named_on_rank_0(
    checkpoint: str, warnings: list[int], tmp_path: Path
) -> None:
    assert [
        len(said) for said in run_ranks(fit_uploading, 2, str(tmp_path), checkpoint)
    ] == warnings


def quick(folder: str) -> list[str]:
    with warnings_said() as said:
        make_trainer(logger=CSVLogger(folder), fast_dev_run=1).fit(Logged(1))
    return [text for text in said if "log_model" in text]


def test_the_loggers_of_a_quick_run_upload_nothing(tmp_path: Path) -> None:
    assert run_ranks(quick, 2, str(tmp_path)) == [[], []]


class Traced(Logged):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)


def fit_with_graph(folder: str) -> str:
    module = Traced(1)
    module.example_input_array = torch.zeros(1, 4, dtype=torch.long)
    logger = TensorBoardLogger(folder, log_graph=True)
    try:
        make_trainer(logger=logger).fit(module)
    except ValueError as error:
        return str(error)
    return ""


def test_a_graph_of_a_sharded_model_is_refused_on_all_ranks(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    first, other = run_ranks(fit_with_graph, 2, str(tmp_path))
    assert "add_graph" in first and first == other
    # One rank has all of it.
    assert run_ranks(fit_with_graph, 1, str(tmp_path)) == [""]


def test_lightnings_loggers_keep_what_they_were_asked_to_upload_where_it_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers.needs("mlflow")
    trackers.needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for logger in (
        MLFlowLogger("run", tracking_uri=trackers.store_of(tmp_path), log_model=True),
        WandbLogger(log_model=True),
    ):
        assert logger._log_model is True

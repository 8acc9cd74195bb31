"""What is logged is the global batch's: sync_dist, torchmetrics, all_gather, and what
loggers write."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from tests.core.models import VOCABULARY, WIDTH
from tests.lightning.modules import LanguageModule
from tests.lightning.running import Run, assert_same, make_trainer, report, together

EXACT: dict[str, Any] = {"precision": "64-true"}


class Measured(LanguageModule):
    """Logs by every way that Lightning has; each is over all samples, whoever held
    them."""

    def build(self) -> None:
        super().build()
        self.save_hyperparameters({"width": WIDTH})
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=VOCABULARY)
        self.seen = torchmetrics.SumMetric()
        self.spread = torchmetrics.MeanSquaredError().set_dtype(torch.float64)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen(batch.numel())
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log(
            "token_sum",
            batch.sum(),
            reduce_fx="sum",
            on_step=False,
            on_epoch=True,
            sync_dist=True,
        )
        self.log(
            "token_max",
            batch[:, 0].max().double(),
            reduce_fx="max",
            on_epoch=True,
            sync_dist=True,
        )
        self.log(
            "token_min",
            batch[:, 1].min().double(),
            reduce_fx="min",
            on_epoch=True,
            sync_dist=True,
        )
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self.model(batch[:, :-1]).flatten(0, 1)
        self.accuracy(logits, batch[:, 1:].flatten())
        self.spread.update(
            logits.mean(1), torch.zeros(len(logits), dtype=torch.float64)
        )
        self.log_dict({"accuracy": self.accuracy, "spread": self.spread}, on_epoch=True)
        return super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        gathered = self.all_gather(self.model.gain.detach() * 2)
        self.log("gathered", gathered.mean(), sync_dist=True)


def fit_measured(knobs: dict[str, Any] | None = None) -> Run:
    module = Measured()
    trainer = make_trainer(knobs, max_epochs=2, **EXACT)
    trainer.fit(module)
    return report(trainer, module)


@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_metrics_are_those_of_the_global_batch(degree: int) -> None:
    """Callback metrics of both kinds on every rank; counts are exact, the rest to
    1e-12."""
    expected = fit_measured()
    names = {
        "seen",
        "train_loss_epoch",
        "token_sum",
        "token_max_epoch",
        "accuracy",
        "spread",
        "val_loss",
        "gathered",
    }
    assert names <= expected.metrics.keys()
    assert expected.metrics["seen"] == 4 * 8 * 7
    assert_same(together(fit_measured, {"shard_degree": degree}), expected)


def fit_logged(folder: str, knobs: dict[str, Any] | None = None) -> Run:
    loggers = [
        CSVLogger(folder, name="csv", version=0),
        TensorBoardLogger(folder, name="tb", version=0),
    ]
    module = Measured()
    trainer = make_trainer(
        knobs, logger=loggers, log_every_n_steps=1, max_epochs=2, **EXACT
    )
    trainer.fit(module)
    return report(trainer, module)


def csv_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "csv" / "version_0" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tb" / "version_0"))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_loggers_write_what_they_write_for_one_process(tmp_path: Path) -> None:
    """CSV rows to 1e-12; TensorBoard keeps float32, 1e-6 of each value; files of one
    process only."""
    alone, ours = tmp_path / "alone", tmp_path / "ours"
    fit_logged(str(alone))
    together(fit_logged, str(ours), {"shard_degree": 2}, ranks=2)
    rows, expected_rows = csv_rows(ours), csv_rows(alone)
    assert len(rows) == len(expected_rows) > 8
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row.keys() == expected_row.keys()
        for name, text in expected_row.items():
            assert (row[name] == "") == (text == ""), name
            assert text == "" or abs(float(row[name]) - float(text)) <= 1e-12, name
    written, expected = scalars(ours), scalars(alone)
    assert written.keys() == expected.keys() and "train_loss_step" in written
    for tag, points in expected.items():
        assert [step for step, _ in written[tag]] == [step for step, _ in points]
        values = [value for _, value in written[tag]]
        assert values == pytest.approx([value for _, value in points], rel=1e-6), tag
    files = [
        sorted(
            path.name.partition(".")[0] for path in (at / "tb" / "version_0").iterdir()
        )
        for at in (ours, alone)
    ]
    assert files[0] == files[1]
    hyper_parameters = [
        (at / "csv" / "version_0" / "hparams.yaml").read_text() for at in (ours, alone)
    ]
    assert (
        hyper_parameters[0] == hyper_parameters[1] and "width: 8" in hyper_parameters[0]
    )

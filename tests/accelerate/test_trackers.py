"""Trackers hold what one process would have written, once: SmpTrainer's ``report_to``,
and Accelerate's trackers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from accelerate_smp import SmpMonitor, SmpMonitorCallback
from smp_core.observe import JobFigures
from smp_core.run_log.read import Run as Log
from tests import trackers
from tests.accelerate.running import (
    SAMPLES,
    STEPS,
    fresh_accelerator,
    make_loader,
    make_optimizer,
)
from tests.accelerate.trainers import make_trainer
from tests.core.models import TroubledModel, loss_of
from tests.harness import run_ranks

# Of the clock, or of how many processes there are; all else is of the training.
OF_THE_CLOCK = ("runtime", "samples_per_second", "steps_per_second")
# float32 sums in another order over six steps.
TOLERANCE = 1e-4


def environment(tracker: str, folder: Path | str) -> dict[str, str]:
    """Where trackers of Trainer and Accelerate write, which ask the environment."""
    folders = {
        "WANDB_DIR": str(folder),
        "MLFLOW_TRACKING_URI": trackers.store_of(folder),
        "TENSORBOARD_LOGGING_DIR": str(folder),
    }
    return {**trackers.ENVIRONMENT, **folders}


def close(tracker: str) -> None:
    if tracker == "wandb":
        import wandb

        wandb.finish()
        wandb.teardown()
    if tracker == "mlflow":
        import mlflow

        mlflow.flush_async_logging()


def fit_trainer(
    tracker: str, folder: str, knobs: dict[str, Any] | None = None
) -> dict[str, float]:
    flags: dict[str, Any] = {
        "report_to": tracker,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
    }
    trainer, _ = make_trainer(folder, 8, 1, knobs, **flags)
    monitor = SmpMonitorCallback()
    if knobs is not None:
        trainer.add_callback(monitor)
    trainer.train()
    close(tracker)
    return monitor.latest


def run_both(
    tracker: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fit: Any,
    **knobs: Any,
) -> Any:
    trackers.needs(tracker)
    alone, ours = tmp_path / "alone", tmp_path / "ours"
    for folder in (alone, ours):
        folder.mkdir()
        trackers.make_store(tracker, folder)
    for name, value in environment(tracker, alone).items():
        monkeypatch.setenv(name, value)
    fit(tracker, str(alone))
    return (
        alone,
        ours,
        run_ranks(
            fit,
            2,
            tracker,
            str(ours),
            knobs,
            env=environment(tracker, ours),
            ranks_per_node=1,
        ),
    )


class Evaluates(TrainerCallback):
    """Notes batches of evaluations among the events."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self.events.append("evaluates")


def monitored_by_epochs(folder: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the log's entries of training, and what the clock and evaluations did."""
    by_epoch = dict.fromkeys(("logging_strategy", "eval_strategy"), "epoch")
    knobs = {"shard_degree": 2}
    trainer, _ = make_trainer(folder, 8, 1, knobs, num_train_epochs=2, **by_epoch)
    events: list[str] = []
    trainer.add_callback(SmpMonitorCallback())
    trainer.add_callback(Evaluates(events))
    pauses = mock.patch.object(JobFigures, "pause", lambda _: events.append("pause"))
    resumes = mock.patch.object(JobFigures, "resume", lambda _: events.append("resume"))
    with pauses, resumes:
        trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return entries, [event for event, _ in itertools.groupby(events)]


@pytest.mark.slow
def test_figures_of_epochs_are_logged_without_their_evaluations(tmp_path: Path) -> None:
    for entries, events in run_ranks(monitored_by_epochs, 2, str(tmp_path)):
        assert len(entries) == 2
        assert all("samples_per_second" in entry for entry in entries)
        assert events == ["pause", "evaluates", "resume"] * 2


class AsksAtStep3(TrainerCallback):
    """Asks for a log entry and an evaluation, as users' callbacks do."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            control.should_log = control.should_evaluate = True


def monitored_before_another_asks(
    folder: str,
) -> tuple[list[dict[str, Any]], list[str]]:
    """As above; what asks for the entry comes behind the monitor."""
    knobs = {"shard_degree": 2}
    trainer, _ = make_trainer(folder, 8, 1, knobs, logging_steps=2)
    events: list[str] = []
    for each in (SmpMonitorCallback(), AsksAtStep3(), Evaluates(events)):
        trainer.add_callback(each)
    pauses = mock.patch.object(JobFigures, "pause", lambda _: events.append("pause"))
    with pauses:
        trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return entries, [event for event, _ in itertools.groupby(events)]


def test_an_entry_that_a_later_callback_asks_for_has_figures_of_its_own(
    tmp_path: Path,
) -> None:
    for entries, events in run_ranks(monitored_before_another_asks, 2, str(tmp_path)):
        assert [entry["step"] for entry in entries] == [2, 3, 4, 6]
        rates = [entry["seconds_step"] for entry in entries]
        assert len(set(rates)) == len(rates), "each is measured"
        assert events == ["pause", "evaluates"]


class Fails(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        raise OSError(f"step {state.global_step} <fails>")


def ended_by_an_error(folder: str) -> tuple[Any, int]:
    """Return how the log says that a training ended, and the bytes of tensors behind it
    that are still counted as the step's."""
    trainer, _ = make_trainer(folder, 8, 1, {"shard_degree": 2})
    monitor = SmpMonitorCallback(memory_every_n_steps=1)
    for each in (Fails(), monitor):
        trainer.add_callback(each)
    with pytest.raises(OSError):
        trainer.train()
    assert monitor._watch is not None
    before = monitor._watch._report.activations()
    saved = torch.ones(1000, requires_grad=True).square()
    counted = monitor._watch._report.activations() - before
    del saved
    dist.barrier()
    return (Log.read(Path(folder)).end or {}).get("how"), counted


def test_an_error_that_ends_training_ends_the_monitor_too(tmp_path: Path) -> None:
    for how, counted in run_ranks(ended_by_an_error, 2, str(tmp_path)):
        assert how == "OSError: step 1 <fails>"
        assert counted == 0


def without_clock(values: trackers.Values) -> trackers.Values:
    return {
        name: points
        for name, points in values.items()
        if not name.endswith(OF_THE_CLOCK)
    }


@pytest.mark.parametrize("tracker", trackers.TRACKERS)
def test_report_to_holds_values_of_one_process_and_figures_once(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, steps and values of stock Trainer in one process; figures in the rows of
    the losses."""
    alone, ours, (latest, _) = run_both(
        tracker, tmp_path, monkeypatch, fit_trainer, shard_degree=2
    )
    expected, written = (
        trackers.read(tracker, folder, "train/global_step") for folder in (alone, ours)
    )
    prefix = "" if tracker == "mlflow" else "train/"
    validation = "eval_loss" if tracker == "mlflow" else "eval/loss"
    assert [step for step, _ in expected[validation]] == [3, 6]
    assert [step for step, _ in expected[f"{prefix}loss"]] == [2, 4, 6]

    figures = {f"{prefix}{name}": value for name, value in latest.items()}
    logged = {name: points for name, points in written.items() if name not in figures}
    trackers.assert_same_values(
        without_clock(logged), without_clock(expected), TOLERANCE
    )
    for name, value in figures.items():
        trackers.assert_once(name, written[name])
        assert written[name][-1] == (6, pytest.approx(value, rel=1e-6)), name

    log = Log.read(ours)
    assert list(log.steps) == [2, 4, 6]
    assert log.steps[6]["samples_per_second"] == pytest.approx(
        latest["samples_per_second"], rel=1e-12
    )


def refuse(folder: str) -> str:
    with pytest.raises(ValueError, match="on rank 0 alone") as caught:
        make_trainer(folder, 8, 1, {"shard_degree": 2}, report_to="wandb")
    return str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value"), [("WANDB_LOG_MODEL", "end"), ("WANDB_WATCH", "gradients")]
)
def test_what_wandb_does_with_weights_on_rank_0_is_refused_before_training(
    variable: str, value: str, tmp_path: Path
) -> None:
    """Rank 0 would wait at the end of training, or at the hundredth step, for ranks
    that do not come."""
    trackers.needs("wandb")
    for message in run_ranks(refuse, 2, str(tmp_path), env={variable: value}):
        assert f"{variable}={value}" in message and f"unset {variable}" in message


def fit_loop(
    tracker: str, folder: str, knobs: dict[str, Any] | None = None
) -> dict[str, float]:
    """Accelerate's loop as its documentation writes it, with figures of the monitor in
    the same call of log."""
    accelerator = fresh_accelerator(
        log_with=tracker,
        project_dir=folder,
        **({} if knobs is None else {"smp_config": knobs}),
    )
    accelerator.init_trackers(
        "run", init_kwargs={"wandb": {"dir": folder}} if tracker == "wandb" else {}
    )
    torch.manual_seed(0)
    model: Any = TroubledModel().double()
    optimizer: Any = make_optimizer(model)[0]
    loader = make_loader(STEPS, 1, SAMPLES // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    monitor = (
        None
        if knobs is None
        else SmpMonitor(accelerator, model, optimizer, every_n_steps=2)
    )
    for step, batch in enumerate(loader, start=1):
        loss = loss_of(model, batch["tokens"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        figures = (
            monitor.latest
            if monitor is not None and step % monitor.every_n_steps == 0
            else {}
        )
        accelerator.log({"loss": mean.item(), **figures}, step=step)
    accelerator.end_training()
    close(tracker)
    if dist.is_initialized():
        dist.barrier()
    return {} if monitor is None else monitor.latest


@pytest.mark.parametrize("tracker", trackers.TRACKERS)
def test_trackers_of_accelerate_hold_values_of_one_process_and_figures_once(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float64 losses: 1e-12; TensorBoard keeps float32."""
    alone, ours, (latest, _) = run_both(
        tracker, tmp_path, monkeypatch, fit_loop, shard_degree=2
    )
    expected, written = (trackers.read(tracker, folder, "") for folder in (alone, ours))
    tolerance = 1e-6 if tracker == "tensorboard" else 1e-12
    assert [step for step, _ in expected["loss"]] == [1, 2, 3, 4]
    trackers.assert_same_values({"loss": written["loss"]}, expected, tolerance)
    for name, value in latest.items():
        trackers.assert_once(name, written[name])
        assert written[name][-1] == (4, pytest.approx(value, rel=tolerance)), name
    assert [value for _, value in written["samples"]] == [2 * SAMPLES, 4 * SAMPLES]

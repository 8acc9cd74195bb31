"""What trackers wrote, read back by their own packages: TensorBoard's event files,
MLflow's database, W&B's messages.

Each reader returns the values by name, in the order in which they were written, as
pairs of step and value; a run of several ranks that wrote a value twice has two pairs.
MLflow and W&B are not among the project's dependencies; tests that need them skip
without: `pip install mlflow wandb`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

Values = dict[str, list[tuple[int, float]]]

MISSING = "needs {}, which is not among the project's dependencies: pip install {}"
ENVIRONMENT = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
TRACKERS = ["tensorboard", "mlflow", "wandb"]

# Frames of a W&B file: blocks of 32 KiB behind a header, records in one or more pieces
# within blocks (LevelDB's log).
BLOCK, HEADER, PIECE = 32 * 1024, 7, struct.Struct("<IHB")
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def needs(tracker: str) -> None:
    """Skip the test where the tracker's package is not installed."""
    pytest.importorskip(tracker, reason=MISSING.format(tracker, tracker))


def store_of(folder: Path | str) -> str:
    """MLflow's store in the folder: a database, since MLflow 3 refuses its own folders
    of files."""
    return f"sqlite:///{folder}/mlflow.db"


def make_store(tracker: str, folder: Path) -> None:
    """Make MLflow's database: ranks that open a new one at the same time collide, with
    any strategy."""
    if tracker == "mlflow":
        from mlflow import MlflowClient

        MlflowClient(store_of(folder)).search_experiments()


def read(tracker: str, folder: Path, step: str) -> Values:
    """Values of the only run in ``folder``; ``step``: W&B's name of the step among the
    values."""
    if tracker == "tensorboard":
        return tensorboard_values(folder)
    return mlflow_values(folder) if tracker == "mlflow" else wandb_values(folder, step)


def tensorboard_values(folder: Path) -> Values:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values: Values = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            values.setdefault(tag, []).extend(
                (event.step, event.value) for event in events.Scalars(tag)
            )
    return values


def mlflow_values(folder: Path) -> Values:
    from mlflow import MlflowClient

    client = MlflowClient(store_of(folder))
    experiments = [each.experiment_id for each in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    values: Values = {}
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        values[name] = sorted((metric.step, metric.value) for metric in history)
    return values


def wandb_values(folder: Path, step: str) -> Values:
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    values: Values = {}
    for row in _wandb_rows(file):
        place = int(row.pop(step, row["_step"]))
        for name, value in row.items():
            if isinstance(value, (int, float)) and not name.startswith("_"):
                values.setdefault(name, []).append((place, value))
    return values


def _wandb_rows(file: Path) -> Iterator[dict[str, Any]]:
    """What was logged at one time, each: W&B's messages of the kind `history`, parsed
    by W&B."""
    from wandb.proto import wandb_internal_pb2

    for message in _messages(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(message)
        if record.WhichOneof("record_type") == "history":
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            yield {"_step": record.history.step.num, **row}


def _messages(data: bytes) -> Iterator[bytes]:
    assert data[:4] == b":W&B"
    place, pieces = HEADER, b""
    while place + PIECE.size <= len(data):
        left = BLOCK - place % BLOCK
        _, size, kind = (
            PIECE.unpack_from(data, place) if left >= PIECE.size else (0, 0, 0)
        )
        if kind == 0:
            place += left  # no piece begins in a block's last bytes
            continue
        place += PIECE.size
        pieces = (
            data[place : place + size]
            if kind in (WHOLE, FIRST)
            else pieces + data[place : place + size]
        )
        place += size
        if kind in (WHOLE, LAST):
            yield pieces


def assert_once(name: str, points: list[tuple[int, float]]) -> None:
    """A value was written once a step, not once a rank."""
    steps = [step for step, _ in points]
    assert len(steps) == len(set(steps)), f"{name} is there several times: {points}"


def assert_same_values(ours: Values, theirs: Values, tolerance: float) -> None:
    """The same steps, and values within ``tolerance`` of each other, relative to
    them."""
    assert ours.keys() == theirs.keys()
    for name, points in theirs.items():
        assert [step for step, _ in ours[name]] == [step for step, _ in points], name
        assert [value for _, value in ours[name]] == pytest.approx(
            [value for _, value in points], rel=tolerance
        ), name

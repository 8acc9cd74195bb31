"""Saving behind training, rotation, broken checkpoints and another number of ranks,
under Accelerate and Trainer."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

import smp_core.checkpoint.folders.storage as storage
from accelerate_smp import SmpCheckpointCallback
from smp_core.checkpoint import CheckpointError, is_checkpoint
from tests.accelerate.running import fresh_accelerator, full_weights, prepared
from tests.accelerate.trainers import (
    Run,
    assert_close,
    fit,
    make_dataset,
    make_trainer,
    noise_between,
)
from tests.core.models import loss_of
from tests.harness import run_ranks

BATCH = 8


def numbered_folders(folder: str) -> dict[str, Any]:
    """Three saves behind training, of which two stay; the newest comes back as it was
    when it was taken."""
    project = ProjectConfiguration(
        project_dir=folder, automatic_checkpoint_naming=True, total_limit=2
    )
    accelerator, _, model, *_ = prepared(
        torch.float64, 1, shard_degree=2, project_config=project, checkpoint="async"
    )
    for _ in range(3):
        accelerator.save_state()
    drawn, weights = torch.rand(3), full_weights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state()
    again = torch.rand(3)
    off = [
        name
        for name, value in full_weights(model).items()
        if not torch.equal(value, weights[name])
    ]
    accelerator.wait_for_save()
    dist.barrier()
    return {
        "drawn": torch.equal(again, drawn),
        "off": off,
        "folders": sorted(os.listdir(f"{folder}/checkpoints")),
    }


def full_disk(folder: str) -> tuple[str, int]:
    """The second save fails on rank 1 while training goes on; the error and the step
    that raised it."""
    accelerator, optimizer, model, loader, _ = prepared(
        torch.float64, 1, shard_degree=2, checkpoint="async"
    )
    batch = next(iter(loader))["tokens"]
    accelerator.save_state(f"{folder}/first")
    accelerator.wait_for_save()
    original = storage.Sink.close

    def close(sink: storage.Sink) -> Any:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return original(sink)

    storage.Sink.close = close  # type: ignore[method-assign]
    try:
        accelerator.save_state(f"{folder}/second")
        # For as long as it takes that thread to get there.
        for step in itertools.count():
            accelerator.backward(loss_of(model, batch))
            try:
                optimizer.step()
            except CheckpointError as error:
                return str(error), step
            optimizer.zero_grad()
            time.sleep(0.01)
    finally:
        storage.Sink.close = original  # type: ignore[method-assign]


def test_saving_behind_a_bare_loop(tmp_path: Path) -> None:
    for report in run_ranks(numbered_folders, 2, str(tmp_path), ranks_per_node=2):
        assert report == {
            "drawn": True,
            "off": [],
            "folders": ["checkpoint_1", "checkpoint_2"],
        }
    results = run_ranks(full_disk, 2, str(tmp_path), ranks_per_node=2)
    assert all("rank 1: OSError: [Errno 28]" in message for message, _ in results)
    assert len({step for _, step in results}) == 1, "all ranks stop at the same step"
    assert is_checkpoint(tmp_path / "first") and not (tmp_path / "second").exists()


def test_a_knob_without_effect_here_is_reported() -> None:
    config = fresh_accelerator(cpu=True, checkpoint="full").smp_config
    assert (
        config.checkpoint.full_state_dict is False
        and config.asked("checkpoint.full_state_dict") is True
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, float]:
    """The stock Trainer in one process, uninterrupted, and how far it is from itself in
    another order."""
    folder = tmp_path_factory.mktemp("alone")
    run = fit(folder, BATCH, 1)
    return run, noise_between(run, fit(folder, BATCH // 2, 2))


def rotate_and_break(folder: str) -> tuple[list[str], Run]:
    """Saved behind training after each of 6 steps, three kept; the newest two are
    broken, and the next run is told to go on with the newest."""
    flags = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 3}
    knobs = {"shard_degree": 2, "checkpoint": "async"}
    fit(folder, BATCH, 1, knobs, **flags)
    dist.barrier()
    kept = sorted(os.listdir(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        next(Path(folder, "checkpoint-6", "smp_state").glob("tensors-*")).unlink()
        Path(folder, "checkpoint-5", "trainer_state.json").write_text("{")
    dist.barrier()
    return kept, fit(folder, BATCH, 1, knobs, resume=True)


def test_rotation_and_a_broken_newest_under_trainer(
    alone: tuple[Run, float], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected, noise = alone
    for kept, seen in run_ranks(rotate_and_break, 2, str(tmp_path), ranks_per_node=2):
        assert kept == ["checkpoint-4", "checkpoint-5", "checkpoint-6"]
        assert_close(seen, expected, noise, first_step=4)
    said = "".join(capfd.readouterr())
    assert "BROKEN CHECKPOINT SKIPPED" in said and "checkpoint-6/smp_state" in said
    assert f"{tmp_path}/checkpoint-5 has no (readable) trainer_state.json" in said


class Watch(TrainerCallback):
    """At the end of each step: which checkpoints are whole."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
        folders = sorted(Path(args.output_dir).glob("checkpoint-*"))
        self.seen.append(
            [path.name for path in folders if is_checkpoint(path / "smp_state")]
        )


def keep_one(folder: str) -> list[list[str]]:
    """Saved behind training after each of 6 steps, one kept; none commits before the
    folder of the next is there."""
    flags = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    trainer, _ = make_trainer(
        folder, BATCH, 1, {"shard_degree": 2, "checkpoint": "async"}, **flags
    )
    watch = Watch()
    trainer.add_callback(watch)
    original = storage.Sink.close

    def held(sink: storage.Sink) -> Any:
        own = next(
            path
            for path in Path(sink.raw.name).parents
            if path.name.startswith("checkpoint-")
        )
        step = int(own.name.removeprefix("checkpoint-"))
        while step < 6 and not own.with_name(f"checkpoint-{step + 1}").exists():
            time.sleep(0.01)
        return original(sink)

    storage.Sink.close = held  # type: ignore[method-assign]
    try:
        trainer.train()
    finally:
        storage.Sink.close = original  # type: ignore[method-assign]
    dist.barrier()
    return [*watch.seen, sorted(os.listdir(folder))]


def test_the_only_checkpoint_stays_until_the_next_one_is_whole(tmp_path: Path) -> None:
    first, second, *later, end = run_ranks(keep_one, 2, str(tmp_path))[0]
    assert first == second == []
    assert later == [[f"checkpoint-{step}"] for step in range(1, 5)]
    assert end == ["checkpoint-6"]


def save_on_four(folder: str) -> None:
    fit(folder, BATCH, 1, {"shard_degree": 4}, save_strategy="steps", save_steps=2)


def go_on_with_two(folder: str, checkpoint: str) -> tuple[Run, int, str]:
    """2 samples a rank as before; and 3, which no accumulation makes 8."""
    trainer, recorder = make_trainer(folder, BATCH // 2, 1, {"shard_degree": 2})
    trainer.train(resume_from_checkpoint=checkpoint)
    other, _ = make_trainer(folder, 6, 1, {"shard_degree": 2})
    with pytest.raises(ValueError) as refused:
        other.train(resume_from_checkpoint=checkpoint)
    return recorder.run, trainer.args.gradient_accumulation_steps, str(refused.value)


@pytest.mark.slow
def test_on_fewer_ranks_accumulation_keeps_the_global_batch(
    alone: tuple[Run, float], tmp_path: Path
) -> None:
    expected, noise = alone
    run_ranks(save_on_four, 4, str(tmp_path), ranks_per_node=2)
    results = run_ranks(
        go_on_with_two, 2, str(tmp_path / "two"), str(tmp_path / "checkpoint-2")
    )
    for seen, accumulation, refused in results:
        assert accumulation == 2
        tolerance = noise + 1e-6
        assert seen.losses == pytest.approx(expected.losses[2:], abs=tolerance)
        assert (
            "had 8 samples" in refused
            and "has 6 here" in refused
            and "{'allow_batch_change': True}" in refused
        )


def at_its_own_interval(folder: str) -> list[list[str]]:
    kept = []
    for name, failures in (("often", 1e-6), ("seldom", 1e12)):
        where = f"{folder}/{name}"
        trainer, _ = make_trainer(
            where, BATCH, 1, {"shard_degree": 2}, num_train_epochs=2
        )
        trainer.add_callback(SmpCheckpointCallback("auto", failures))
        trainer.train()
        dist.barrier()
        kept.append(sorted(os.listdir(where)))
    return kept


@pytest.mark.slow
def test_the_interval_follows_the_time_between_failures(tmp_path: Path) -> None:
    """12 steps: the first save, after 10, is the measurement; then after every step, or
    only at the end."""
    often, seldom = (
        [f"checkpoint-{step}" for step in (10, 11, 12)],
        ["checkpoint-10", "checkpoint-12"],
    )
    results = run_ranks(at_its_own_interval, 2, str(tmp_path), ranks_per_node=2)
    assert results == [[often, seldom]] * 2


class StopsEarly(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 3


def stopped_early(folder: str) -> list[str]:
    trainer, _ = make_trainer(folder, BATCH, 1, {"shard_degree": 2})
    trainer.add_callback(SmpCheckpointCallback(2))
    trainer.add_callback(StopsEarly())
    trainer.train()
    dist.barrier()
    return sorted(os.listdir(folder))


def test_a_training_that_a_callback_ends_is_saved_at_its_end(tmp_path: Path) -> None:
    for folders in run_ranks(stopped_early, 2, str(tmp_path)):
        assert folders == ["checkpoint-2", "checkpoint-3"]


class Stream(IterableDataset):
    """Samples without end."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return itertools.cycle(make_dataset())


def streamed(folder: str) -> list[list[float]]:
    """Losses of 4 steps on a stream, and of the last two again from the checkpoint
    between them."""
    losses = []
    for resume in (None, f"{folder}/checkpoint-2"):
        steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
        trainer, recorder = make_trainer(folder, BATCH, 2, {"shard_degree": 2}, **steps)
        trainer.train_dataset = Stream()
        trainer.train(resume_from_checkpoint=resume)
        losses.append(recorder.run.losses)
        dist.barrier()
    return losses


def test_a_stream_without_length_is_saved_and_resumed(tmp_path: Path) -> None:
    for whole, resumed in run_ranks(streamed, 2, str(tmp_path)):
        assert len(whole) == 4 and resumed == whole[2:]

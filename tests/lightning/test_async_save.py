"""checkpoint="async" under the Trainer: the same checkpoints, none removed too early,
errors on all ranks."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import smp_core.checkpoint.folders.storage as storage
from smp_core.checkpoint import CheckpointError, is_checkpoint
from tests.harness import run_ranks
from tests.lightning.modules import ScheduledModule
from tests.lightning.running import (
    Run,
    assert_same,
    make_trainer,
    read_checkpoint,
    report,
    together,
    worst,
)

BATCHES = 5
EXACT: dict[str, Any] = {
    "precision": "64-true",
    "gradient_clip_val": 0.1,
    "enable_checkpointing": True,
}


class Watch(Callback):
    """After each batch: which folders are whole checkpoints, and whether a save is
    being written."""

    def __init__(self, folder: str) -> None:
        self.folder, self.seen, self.in_flight = Path(folder), [], 0
        # A batch has ended while a save was being written.
        self.ahead = threading.Event()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        # From old to new: an old one that is gone by now went after the new one had
        # come.
        paths = sorted(
            (path for path in self.folder.glob("*.ckpt") if not path.is_symlink()),
            key=age,
        )
        self.seen.append([path.name for path in paths if is_checkpoint(path)])
        saves = trainer.strategy.background_saves
        if saves is not None and saves.checkpointer.in_flight:
            self.in_flight += 1
            self.ahead.set()


def age(path: Path) -> float:
    """Its optimizer step; the one that is always the newest comes last."""
    return (
        float("inf")
        if path.name == "last.ckpt"
        else int(path.stem.removeprefix("step="))
    )


def fit_saving(
    folder: str,
    async_save: bool,
    load: str | None = None,
    held: str | None = None,
    **policy: Any,
) -> Run:
    """``held``: the checkpoint whose writing waits until training is ahead of it."""
    module = ScheduledModule(batches=BATCHES)
    saver, watch = (
        ModelCheckpoint(dirpath=folder, filename="{step}", **policy),
        Watch(folder),
    )
    knobs = {"shard_degree": 2, "checkpoint": {"async_save": async_save}}
    trainer = make_trainer(knobs, callbacks=[watch, saver], max_epochs=2, **EXACT)
    original = storage.Sink.close

    def slowly(sink: storage.Sink) -> Any:
        if async_save and belongs_to(sink, held):
            watch.ahead.wait()
        time.sleep(0.05)  # other saves, too, are seen at work
        return original(sink)

    storage.Sink.close = slowly  # type: ignore[method-assign]
    try:
        trainer.fit(module, ckpt_path=load)
    finally:
        storage.Sink.close = original  # type: ignore[method-assign]
    extra = {
        "seen": watch.seen,
        "in flight": watch.in_flight,
        "steps": trainer.global_step,
    }
    return report(trainer, module, **extra)


def belongs_to(sink: storage.Sink, checkpoint: str | None) -> bool:
    """Whether a file of the save of this checkpoint is being written."""
    return checkpoint is not None and f"-{checkpoint}-" in Path(sink.raw.name).parts[-2]


def content(folder: Path) -> dict[str, str]:
    return {
        entry: os.readlink(folder / entry) if (folder / entry).is_symlink() else ""
        for entry in os.listdir(folder)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy, held",
    [
        (
            {"every_n_train_steps": 1, "save_top_k": 1, "save_last": "link"},
            "step=1.ckpt",
        ),
        # The second save of a validation: it waits for the first, and nothing waits for
        # it until the next validation.
        (
            {
                "monitor": "val_loss",
                "save_top_k": 2,
                "save_last": True,
                "save_on_train_epoch_end": False,
            },
            "last.ckpt",
        ),
    ],
    ids=["rotation, linked", "top-k, last copied"],
)
def test_the_same_checkpoints_as_without_and_never_none(
    policy: dict[str, Any], held: str, tmp_path: Path
) -> None:
    expected = together(fit_saving, str(tmp_path / "sync"), False, **policy, ranks=2)[0]
    runs = together(
        fit_saving, str(tmp_path / "async"), True, held=held, **policy, ranks=2
    )
    assert_same(runs, Run(expected.losses, expected.weights, expected.metrics))
    assert content(tmp_path / "async") == content(tmp_path / "sync")
    for name in content(tmp_path / "sync"):
        ours, theirs = (
            read_checkpoint(tmp_path / kind / name) for kind in ("async", "sync")
        )
        assert worst(ours["state_dict"], theirs["state_dict"])[0] == 0.0
        assert ours["global_step"] == theirs["global_step"]
    assert runs[0].extra["in flight"] > 0, "training was never ahead of a save"
    # Once there is a whole checkpoint, there is one at every later instant.
    seen = runs[0].extra["seen"]
    first = next(number for number, whole in enumerate(seen) if whole)
    assert all(seen[first:])


def test_a_run_goes_on_from_what_was_saved_behind_it(tmp_path: Path) -> None:
    folder = str(tmp_path)
    whole = together(
        fit_saving, folder, True, every_n_train_steps=BATCHES, save_top_k=-1, ranks=2
    )[0]
    resumed = together(
        fit_saving,
        str(tmp_path / "on"),
        True,
        load=f"{folder}/step={BATCHES}.ckpt",
        ranks=2,
    )
    assert_same(resumed, Run(whole.losses[BATCHES:], whole.weights, whole.metrics))


def fit_on_a_full_disk(folder: str) -> dict[str, Any]:
    """Rank 3's disk is full for every save but the first."""
    module = ScheduledModule(batches=BATCHES)
    saver = ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=2, save_top_k=1
    )
    knobs = {"shard_degree": 2, "checkpoint": "async"}
    trainer = make_trainer(knobs, callbacks=[saver], max_epochs=4, **EXACT)
    original = storage.Sink.close

    def close(sink: storage.Sink) -> Any:
        if dist.get_rank() == 3 and not belongs_to(sink, "step=2.ckpt"):
            raise OSError(28, "No space left on device")
        return original(sink)

    storage.Sink.close = close  # type: ignore[method-assign]
    try:
        with pytest.raises(CheckpointError) as caught:
            trainer.fit(module)
    finally:
        storage.Sink.close = original  # type: ignore[method-assign]
    return {"message": str(caught.value), "steps": trainer.global_step}


def test_a_failed_save_ends_training_on_all_ranks_at_the_same_step(
    tmp_path: Path,
) -> None:
    results = run_ranks(fit_on_a_full_disk, 4, str(tmp_path), ranks_per_node=2)
    assert all("rank 3: OSError: [Errno 28]" in result["message"] for result in results)
    assert len({result["steps"] for result in results}) == 1
    # The one before is kept, although ModelCheckpoint had asked for its removal, and
    # nothing half stays.
    assert os.listdir(tmp_path) == ["step=2.ckpt"]
    assert read_checkpoint(tmp_path / "step=2.ckpt")["global_step"] == 2


def save_after_the_end(folder: str) -> bool:
    module = ScheduledModule(batches=1)
    trainer = make_trainer(
        {"shard_degree": 2, "checkpoint": "async"}, precision="64-true"
    )
    trainer.fit(module)
    trainer.save_checkpoint(f"{folder}/after")
    return is_checkpoint(f"{folder}/after")


def test_a_save_after_training_is_there_when_it_returns(tmp_path: Path) -> None:
    assert (
        run_ranks(save_after_the_end, 4, str(tmp_path), ranks_per_node=2) == [True] * 4
    )


def whole_tensors_alive(path: str) -> int:
    """The most whole tensors that exist at once on this rank while a full checkpoint is
    written."""
    import weakref

    from torch.distributed.tensor import DTensor

    module = ScheduledModule(batches=1)
    trainer = make_trainer(
        {"shard_degree": 2, "checkpoint": "full"}, precision="64-true"
    )
    trainer.fit(module)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    original = DTensor.full_tensor

    def full_tensor(self: DTensor, **options: Any) -> torch.Tensor:
        nonlocal most
        value = original(self, **options)
        alive.append(weakref.ref(value))
        most = max(most, sum(reference() is not None for reference in alive))
        return value

    DTensor.full_tensor = full_tensor  # type: ignore[method-assign]
    try:
        trainer.save_checkpoint(path)
    finally:
        DTensor.full_tensor = original  # type: ignore[method-assign]
    assert len(alive) > 10
    return most


def test_a_full_checkpoint_is_gathered_one_tensor_at_a_time(tmp_path: Path) -> None:
    assert (
        max(
            run_ranks(
                whole_tensors_alive, 2, str(tmp_path / "full.ckpt"), ranks_per_node=2
            )
        )
        <= 2
    )
    assert (tmp_path / "full.ckpt").is_file()

"""A checkpoint taken inside an accumulation window resumes by replaying it; nothing is
lost or counted twice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler

from tests.lightning.modules import (
    GLOBAL_BATCH,
    LanguageModule,
    ScheduledModule,
    token_rows,
)
from tests.lightning.running import (
    Run,
    SaveAt,
    assert_same,
    make_trainer,
    read_checkpoint,
    report,
    together,
)
from tests.logged import warnings_said

# Windows of 3: batches 0-2, 3-5 and, because the epoch ends there, 6-7.
BATCHES, WINDOW = 8, 3
EXACT: dict[str, Any] = {
    "precision": "64-true",
    "gradient_clip_val": 0.1,
    "max_epochs": 2,
}


class ResumableLoader(DataLoader[Any]):
    """Knows how many batches of the epoch it has given, and starts there; from the end
    it starts the next epoch."""

    done, skip = 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["done"] % len(self)

    def __iter__(self) -> Any:
        self.done, self.skip = self.skip, 0
        return self._rest(super().__iter__())

    def _rest(self, batches: Any) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if number >= self.done:
                self.done += 1
                yield batch


class Resumable(ScheduledModule):
    def train_dataloader(self) -> Any:
        rows = token_rows(BATCHES)
        ranks, rank = (
            (dist.get_world_size(), dist.get_rank())
            if dist.is_initialized()
            else (1, 0)
        )
        sampler: Any = DistributedSampler(rows, num_replicas=ranks, rank=rank)  # type: ignore[arg-type]
        return ResumableLoader(rows, batch_size=GLOBAL_BATCH // ranks, sampler=sampler)  # type: ignore[arg-type]


class ByHand(Resumable):
    """Manual optimization; steps after batches 2, 5 and 7."""

    ends_with_epoch = blocks = True

    def build(self) -> None:
        super().build()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return LanguageModule.configure_optimizers(self)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        last = batch_idx % WINDOW == WINDOW - 1 or (
            self.ends_with_epoch and batch_idx == BATCHES - 1
        )
        block = getattr(
            self.trainer.strategy, "block_backward_sync", contextlib.nullcontext
        )
        block = block if self.blocks else contextlib.nullcontext
        with contextlib.nullcontext() if last else block():
            loss = self.loss(batch)
            self.losses.append(loss.detach())
            self.manual_backward(loss / WINDOW)
        if last:
            optimizer.step()
            optimizer.zero_grad()


def flags_of(kind: type[LanguageModule]) -> dict[str, Any]:
    if issubclass(kind, ByHand):
        return {**EXACT, "gradient_clip_val": None}
    return {**EXACT, "accumulate_grad_batches": WINDOW}


def run(
    kind: type[LanguageModule],
    knobs: dict[str, Any] | None = None,
    load: str | None = None,
    save_at: tuple[str, int, int] | None = None,
) -> Run:
    """To the end of the second epoch."""
    module = kind(batches=BATCHES)
    callbacks = [] if save_at is None else [SaveAt(*save_at)]
    trainer = make_trainer(knobs, callbacks=callbacks, **flags_of(kind))
    trainer.fit(module, ckpt_path=load)
    return report(trainer, module, steps=trainer.global_step)


def from_batch(expected: Run, first: int) -> Run:
    return Run(
        expected.losses[first:], expected.weights, expected.metrics, expected.extra
    )


# Epoch and batch after which it is saved, and the first batch of the whole run that is
# seen again; the last two are between windows.
PLACES = [
    ((0, 4), 3),
    ((0, 0), 0),
    ((0, 6), 6),
    ((1, 1), 8),
    ((1, 4), 11),
    ((1, 6), 14),
    ((0, 5), 6),
    ((0, 7), 8),
]


def check_place(
    kind: type[LanguageModule],
    place: tuple[int, int],
    first: int,
    folder: Path,
    ranks: int,
) -> None:
    expected, path = run(kind), str(folder / "saved")
    together_runs = together(
        run, kind, {"shard_degree": 2}, save_at=(path, *place), ranks=2
    )
    assert_same(together_runs, expected)
    replayed = BATCHES * place[0] + place[1] - first + 1
    window = (
        {"first_batch": first % BATCHES, "batches_to_replay": replayed}
        if replayed
        else None
    )
    assert read_checkpoint(path).get("smp_window") == window
    resumed = together(run, kind, {"shard_degree": ranks}, load=path, ranks=ranks)
    assert_same(resumed, from_batch(expected, first))
    for one in resumed:
        assert one.extra["steps"] == expected.extra["steps"]


@pytest.mark.parametrize("place, first", [PLACES[3]], ids=str)
def test_saving_inside_a_window_replays_it(
    place: tuple[int, int], first: int, tmp_path: Path
) -> None:
    check_place(Resumable, place, first, tmp_path, ranks=2)


@pytest.mark.slow
def test_saving_inside_a_window_by_hand_replays_it(tmp_path: Path) -> None:
    check_place(ByHand, *PLACES[0], tmp_path, ranks=4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Resumable, ByHand])
@pytest.mark.parametrize("place, first", PLACES, ids=str)
def test_saving_inside_any_window_replays_it(
    kind: type[LanguageModule], place: tuple[int, int], first: int, tmp_path: Path
) -> None:
    check_place(kind, place, first, tmp_path, ranks=4)


def run_validating(
    knobs: dict[str, Any] | None, folder: str, load: str | None = None
) -> Run:
    """Validation, and with it ModelCheckpoint, after batch 4 of each epoch: in the
    window's middle."""
    module = Resumable(batches=BATCHES)
    saver = ModelCheckpoint(
        dirpath=folder, filename="{epoch}", monitor="val_loss", save_top_k=-1
    )
    trainer = make_trainer(
        knobs,
        callbacks=[saver],
        enable_checkpointing=True,
        val_check_interval=5,
        **flags_of(Resumable),
    )
    trainer.fit(module, ckpt_path=load)
    return report(
        trainer,
        module,
        steps=trainer.global_step,
        saved=sorted(Path(p).name for p in saver.best_k_models),
    )


@pytest.mark.slow
def test_model_checkpoint_inside_a_window_replays_it(tmp_path: Path) -> None:
    expected = run_validating(None, str(tmp_path / "alone"))
    assert expected.extra["saved"] == ["epoch=0.ckpt", "epoch=1.ckpt"]
    assert_same(
        together(run_validating, {"shard_degree": 2}, str(tmp_path / "ours"), ranks=2),
        expected,
    )
    for epoch, first in ((0, 3), (1, 11)):
        path = str(tmp_path / "ours" / f"epoch={epoch}.ckpt")
        resumed = together(
            run_validating,
            {"shard_degree": 4},
            str(tmp_path / f"again{epoch}"),
            load=path,
        )
        assert_same(resumed, from_batch(expected, first))
        assert resumed[0].extra["steps"] == expected.extra["steps"]


class Unblocked(ByHand):
    """As Lightning's pages show it: each backward pass reduces, and gradients wait in
    ``.grad``."""

    blocks = False


def test_saving_inside_a_window_of_gradients_that_are_reduced_replays_it(
    tmp_path: Path,
) -> None:
    check_place(Unblocked, *PLACES[3], tmp_path, ranks=2)


class AcrossEpochs(ByHand):
    """A step is also of the last two batches of an epoch and the first three of the
    next."""

    ends_with_epoch = False


def said_of_saving(path: str) -> list[str]:
    # Lightning zeroes gradients before a validation.
    flags = {**flags_of(ByHand), "limit_val_batches": 0}
    trainer = make_trainer({"shard_degree": 2}, callbacks=[SaveAt(path, 1, 1)], **flags)
    with warnings_said() as said:
        trainer.fit(AcrossEpochs(batches=BATCHES))
    return said


def test_a_window_of_two_epochs_is_replayed_from_the_second_and_the_rest_told(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "saved")
    said = together(said_of_saving, path, ranks=2)  # type: ignore[arg-type]
    assert any(
        "began in an earlier epoch, whose gradients are not in it" in line
        for line in said[0]
    )
    assert read_checkpoint(path)["smp_window"] == {
        "first_batch": 0,
        "batches_to_replay": 2,
    }


class StopAt(Callback):
    """Ends the run after this batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        trainer.should_stop = batch_idx == self.batch


def stop_and_fit_again(knobs: dict[str, Any] | None = None) -> Run:
    module = Resumable(batches=BATCHES)
    make_trainer(knobs, callbacks=[StopAt(4)], **flags_of(Resumable)).fit(module)
    trainer = make_trainer(knobs, **flags_of(Resumable))
    trainer.fit(module)
    return report(trainer, module, steps=trainer.global_step)


def test_a_window_left_open_does_not_leak_into_the_next_fit() -> None:
    expected = stop_and_fit_again()
    assert len(expected.losses) == 5 + 2 * BATCHES
    assert_same(together(stop_and_fit_again, {"shard_degree": 2}, ranks=2), expected)

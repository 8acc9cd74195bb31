"""A run goes on in the middle of an epoch where its data loader keeps its own place, as
torchdata's StatefulDataLoader does: no sample is seen twice or lost, although Lightning
reads a stream one batch ahead of training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.harness import run_ranks
from tests.lightning.running import make_trainer

ROWS, BATCH, STEPS = 48, 2, 5
KINDS = ("dealt", "split", "sized")


class Stream(IterableDataset):
    """Numbers from ``place`` on, of which ``taken`` are this rank's; it counts what it
    has read."""

    def __init__(self, taken: list[int]) -> None:
        self.taken, self.place = taken, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < ROWS:
            self.place += 1
            if self.place - 1 in self.taken:
                yield torch.tensor([float(self.place - 1)])
        self.place = 0


class KeepsPlace(DataLoader):
    def state_dict(self) -> dict[str, Any]:
        return {"place": self.dataset.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.dataset.place = state_dict["place"]


class Sized(KeepsPlace):
    """Tells its length, so that Lightning reads nothing ahead."""

    def __len__(self) -> int:
        return len(self.dataset.taken) // BATCH


class Seeing(LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.net, self.seen = kind, nn.Linear(1, 4), []

    def train_dataloader(self) -> DataLoader:
        rank, size = self.trainer.strategy.data_rank, self.trainer.strategy.data_size
        if self.kind == "dealt":
            return KeepsPlace(Stream(list(range(ROWS))), batch_size=BATCH)
        # Ranks take of the stream at places that differ: rank 0 has fewer rows at its
        # beginning.
        first = [row for row in range(ROWS // 2) if (row % 4 == 3) == (rank == 0)]
        second = [
            row for row in range(ROWS // 2, ROWS) if (row % 4 == 3) == (rank == 1)
        ]
        return (Sized if self.kind == "sized" else KeepsPlace)(
            Stream([*first, *second][: ROWS // size]), batch_size=BATCH
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch.flatten().int().tolist())
        return self.net(batch / ROWS).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class SavesAfter(Callback):
    def __init__(self, batches: int, path: Path) -> None:
        self.batches, self.path = batches, path

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == self.batches:
            trainer.save_checkpoint(self.path)


def seen(kind: str, accumulate: int, folder: Path) -> dict[str, Any]:
    """What this rank trains on without an end, and what it does from each of three
    checkpoints on."""

    def fit(steps: int, **more: Any) -> tuple[Trainer, list[list[int]]]:
        module = Seeing(kind)
        callbacks = more.pop("callbacks", [])
        flags = {
            "max_epochs": -1,
            "max_steps": steps,
            "accumulate_grad_batches": accumulate,
            "callbacks": callbacks,
        }
        trainer = make_trainer({"shard_degree": 2}, **flags)
        trainer.fit(module, **more)
        return trainer, module.seen

    saves = [SavesAfter(batches, folder / f"after-{batches}") for batches in (3, 4)]
    _, whole = fit(STEPS, callbacks=saves)
    trainer, _ = fit(2)
    trainer.save_checkpoint(folder / "ended")
    places = {
        "after-3": 3 // accumulate * accumulate,
        "after-4": 4,
        "ended": 2 * accumulate,
    }
    return {
        name: (whole[place:], fit(STEPS, ckpt_path=folder / name)[1])
        for name, place in places.items()
    }


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_loader_that_keeps_its_place_goes_on_behind_the_last_batch_of_training(
    accumulate: int, tmp_path: Path
) -> None:
    for kind in KINDS:
        folder = tmp_path / kind
        for of_rank in run_ranks(seen, 2, kind, accumulate, folder):
            for name, (expected, found) in of_rank.items():
                assert found == expected, f"{kind}, {name}"

"""A run that goes on by itself: a training script as docs/restarts.md shows, whose
ranks are killed meanwhile.

    torchrun --max-restarts N ... -m tests.lightning.restarting FOLDER PLAN

PLAN is JSON: epochs, batches of an epoch, ``every`` so many steps a checkpoint, how
(``checkpoint``), and ``kills``: at which step which rank is killed, in its training
step ("step"), in its optimizer step ("optimizer"), in its hook while a checkpoint is
saved ("save"), or its launcher with it ("node"). Each kill happens once, however often
the run comes there. Ranks write the loss of each batch to files.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from lightning_smp import SmpCheckpoint
from tests.lightning.modules import GLOBAL_BATCH, LanguageModule, rank, token_rows
from tests.lightning.running import QUIET, Run, Trainer, report, strategy, whole_weights


class KilledModule(LanguageModule):
    """A model in whose steps ranks are killed; it draws numbers, in validations too.

    Args:
        folder: where it notes losses, and which kills have happened.
        plan: as above.
    """

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        super().__init__(plan["batches"], 2)
        self.folder, self.plan = folder, plan

    def come_to(self, place: str) -> None:
        for number, (step, killed, where) in enumerate(self.plan["kills"]):
            if where != place or killed != rank() or self.trainer.global_step < step:
                continue
            try:
                (self.folder / f"killed-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            if place == "node":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.come_to("step")
        self.come_to("node")
        loss = super().training_step(batch, batch_idx)
        if self.plan.get("draws", True):
            loss = loss * (1 + 0.1 * torch.rand(()))
        with open(
            self.folder / f"losses-{self.trainer.world_size}-{rank()}", "a"
        ) as file:
            place = (
                f"{self.trainer.global_step} {self.trainer.fit_loop.total_batch_idx}"
            )
            file.write(f"{place} {float(loss.detach()).hex()}\n")
        return loss

    def train_dataloader(self) -> Any:
        """Batches of this rank that have the same size in every world."""
        return DataLoader(token_rows(self.batches), batch_size=GLOBAL_BATCH // 2)

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().validation_step(batch, batch_idx) * torch.rand(())

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.come_to("optimizer")
        super().optimizer_step(*args, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.come_to("save")


def train(folder: str, plan: dict[str, Any]) -> Run:
    """Train to the end, or go on with it, on the ranks of this launch."""
    place = Path(folder)
    place.mkdir(exist_ok=True)
    seed_everything(3, verbose=False)
    world = int(os.environ["WORLD_SIZE"])
    module = KilledModule(place, plan)
    saver = SmpCheckpoint(
        place / "checkpoints", checkpoint_interval=plan["every"], keep_last=2
    )
    flags = {
        **QUIET,
        "enable_checkpointing": True,
        "max_epochs": plan["epochs"],
        "callbacks": [saver],
    }
    trainer = Trainer(
        precision=plan.get("precision", "32-true"),
        strategy=strategy(shard_degree=world, checkpoint=plan["checkpoint"]),
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=world // int(os.environ["LOCAL_WORLD_SIZE"]),
        **flags,
    )
    trainer.fit(module, ckpt_path="last")
    return report(
        trainer, module, steps=trainer.global_step, weights=whole_weights(module)
    )


def noted(folder: Path, world: int) -> dict[int, dict[str, set[str]]]:
    """The losses that ranks of a world of this size have noted: rank -> "step batch" ->
    all values it had."""
    found: dict[int, dict[str, set[str]]] = {}
    for number in range(world):
        values = found[number] = {}
        path = folder / f"losses-{world}-{number}"
        for line in path.read_text().splitlines() if path.exists() else []:
            step, batch, value = line.split()
            values.setdefault(f"{step} {batch}", set()).add(value)
    return found


if __name__ == "__main__":
    done = train(sys.argv[1], json.loads(sys.argv[2]))
    if rank() == 0:
        torch.save(done.extra, Path(sys.argv[1], "end.pt"))

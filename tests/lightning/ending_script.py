"""A training script, as a user would write one, in which something happens in the
middle of a step.

    python -m tests.lightning.ending_script RANKS EVENT RANK FOLDER [TIMEOUT] [STAGES]

In the third step RANK raises an exception ("raise"), is killed ("kill"), stopped
("stop") or cut off ("cut"), leaves by sys.exit ("exit") or because it has no more
batches ("short"), or presses Ctrl-C for the main process ("interrupt") or for all at
once, as a terminal does ("interrupt-all"). "kill-in-save", "stop-in-behind",
"cut-in-load" and their like strike it in a save, in one behind training, or in a load;
"stop-in-report" stops rank 0 where it looks who was lost when RANK has been killed.
"raise-saving" raises, and callbacks save at exceptions; "launcher" tells its parent
process to end. Every rank writes its process id into FOLDER. TIMEOUT: of collectives,
in seconds.

The ranks ignore SIGTERM: torchrun sends it within 0.1 s of a loss, and on a busy
machine it would end the survivors before they have met the loss themselves, or in the
middle of answering it (Lightning's handler starts a collective). What they say by
themselves is what is looked at here; torchrun's own report names the rank either way.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_smp import SmpShardedStrategy
from tests.striking import strike, strike_in

# Of collectives: a rank may start this much later than the others on a busy machine. A
# lost one is noticed at once.
TIMEOUT = 200.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Layers(nn.Module):
    """Two blocks, for as many stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Model(LightningModule):
    def __init__(self, event: str, rank: int, folder: Path) -> None:
        super().__init__()
        self.event, self.rank, self.folder = event, rank, folder
        self.example_input_array = torch.zeros(2, 4)
        self.layer = Layers()

    def on_train_start(self) -> None:
        if self.event != "launcher":
            # Here, because Lightning sets its own when fit begins.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (self.folder / str(self.global_rank)).write_text(str(os.getpid()))
        self.trainer.strategy.barrier()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2 and self.global_rank == self.rank:
            self.strike()
        time.sleep(0.02)
        return self.layer(batch).square().mean()

    def strike(self) -> None:
        if self.event.startswith("raise"):
            raise ArithmeticError("the user's own mistake")
        if self.event == "launcher":
            os.kill(os.getppid(), signal.SIGTERM)
        if self.event == "exit":
            sys.exit("enough")
        if self.event in ("kill", "stop", "cut"):
            strike(self.event)
        if self.event == "stop-in-report":
            strike("kill")
        if self.event == "interrupt":
            os.kill(int((self.folder / "0").read_text()), signal.SIGINT)
        if self.event == "interrupt-all":
            os.killpg(0, signal.SIGINT)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        what, _, place = self.event.partition("-in-")
        if place and batch_idx == 1:
            if place in ("save", "behind") and self.global_rank == self.rank:
                strike_in("save", what)
            if place == "report" and self.global_rank == 0:
                strike_in(place, what)
            if place != "report":
                self.trainer.save_checkpoint(self.folder.parent / "saved")
            self.trainer.should_stop = place == "load"

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Stream(IterableDataset[torch.Tensor]):
    """Samples without an end, or without more than two batches."""

    def __init__(self, event: str, rank: int) -> None:
        self.ends = event == "short" and rank == int(os.environ.get("LOCAL_RANK", 0))

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (
            torch.randn(4) for _ in (range(4) if self.ends else itertools.count())
        )


def main() -> None:
    ranks, event, rank, folder = (
        int(sys.argv[1]),
        sys.argv[2],
        int(sys.argv[3]),
        Path(sys.argv[4]),
    )
    timeout = timedelta(seconds=float(sys.argv[5]) if len(sys.argv) > 5 else TIMEOUT)
    stages = int(sys.argv[6]) if len(sys.argv) > 6 else 1
    torch.manual_seed(0)  # stages read the same samples
    checkpoint = "async" if event.endswith("-in-behind") else "sharded"
    callbacks = (
        [OnExceptionCheckpoint(folder.parent)] if event == "raise-saving" else []
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=SmpShardedStrategy(
            shard_degree=ranks // stages,
            pipeline_parallel_degree=stages,
            units=["Block"],
            timeout=timeout,
            checkpoint=checkpoint,
        ),
        max_epochs=1,
        callbacks=callbacks,
        default_root_dir=folder.parent,
        logger=False,
        enable_checkpointing=event == "raise-saving",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, loader = (
        Model(event, rank, folder),
        DataLoader(Stream(event, rank), batch_size=2),
    )  # type: ignore[arg-type]
    trainer.fit(model, loader)
    if event.endswith("-in-load"):
        if trainer.global_rank == rank:
            strike_in("load", event.partition("-in-")[0])
        trainer.should_stop = False
        trainer.fit(model, loader, ckpt_path=folder.parent / "saved")
    print("the run came to its end")


if __name__ == "__main__":
    main()

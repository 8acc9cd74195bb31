"""A training script, as a user would write one, in which something happens in the middle of a step.

    python -m tests.lightning.ending_script RANKS EVENT RANK FOLDER

In the third step RANK raises an exception ("raise"), is killed ("kill"), or presses Ctrl-C for the main process
("interrupt") or for all at once, as a terminal does ("interrupt-all"). Every rank writes its process id into FOLDER.

The ranks ignore SIGTERM: torchrun sends it within 0.1 s of a loss, and on a busy machine it would end the survivors
before they have met the loss themselves, or in the middle of answering it (Lightning's handler starts a collective).
What they say by themselves is what is looked at here; torchrun's own report names the rank either way.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_smp import SmpShardedStrategy

# Of collectives: a rank may start this much later than the others on a busy machine. A lost one is noticed at once.
TIMEOUT = timedelta(seconds=200)


class Model(LightningModule):
    def __init__(self, event: str, rank: int, folder: Path) -> None:
        super().__init__()
        self.event, self.rank, self.folder = event, rank, folder
        self.layer = nn.Linear(4, 4)

    def on_train_start(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # here, because Lightning sets its own when fit begins
        (self.folder / str(self.global_rank)).write_text(str(os.getpid()))
        self.trainer.strategy.barrier()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2 and self.global_rank == self.rank:
            self.strike()
        time.sleep(0.02)
        return self.layer(batch).square().mean()

    def strike(self) -> None:
        if self.event == "raise":
            raise ArithmeticError("the user's own mistake")
        if self.event == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.event == "interrupt":
            os.kill(int((self.folder / "0").read_text()), signal.SIGINT)
        if self.event == "interrupt-all":
            os.killpg(0, signal.SIGINT)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def main() -> None:
    ranks, event, rank, folder = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=SmpShardedStrategy(shard_degree=ranks, timeout=TIMEOUT),
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(event, rank, folder), DataLoader(torch.randn(64, 4), batch_size=2))  # type: ignore[arg-type]
    print("the run came to its end")


if __name__ == "__main__":
    main()

"""A run that lost processes or a node goes on from shared memory, to the last bit, and leaves none of it behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.harness import run_ranks
from tests.lightning.modules import LanguageModule, rank
from tests.lightning.running import Run, make_trainer, report

BATCHES, LOST_AT = 10, 8


class Lost(Exception):
    pass


class LosingModule(LanguageModule):
    """Computes with numbers of each rank's own generator; ends with an error in a batch."""

    ends_in: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.ends_in:
            self.trainer.strategy._memory.tier._saver.wait()  # what would have been committed at some time
            raise Lost
        return super().training_step(batch, batch_idx) * (1 + 0.1 * torch.rand(()))


def train(folder: Path, resume: bool = False, ends_in: int | None = None, **knobs: Any) -> Run:
    os.environ["SMP_MEMORY_FOLDER"] = str(folder.parent / "memory")
    seed_everything(3 + rank(), verbose=False)
    module = LosingModule(BATCHES)
    module.ends_in = ends_in
    saver = ModelCheckpoint(folder, save_last=True, every_n_train_steps=3)
    checkpoint = {"memory_every_n_steps": 2}
    trainer = make_trainer(
        {"shard_degree": "world", "checkpoint": checkpoint, **knobs}, callbacks=[saver], enable_checkpointing=True
    )
    ended = ""
    try:
        trainer.fit(module, ckpt_path="last" if resume else None)
    except Lost:
        ended = "lost"
    return report(trainer, module, ended=ended, step=trainer.global_step)


def lose_and_resume(folder: str, lost_node: int | None, knobs: dict[str, Any]) -> tuple[Run, Run, Run]:
    top = Path(folder)
    if rank() == 0:
        (top / "memory").mkdir()
    dist.barrier()
    plain = train(top / "plain", **knobs)
    lost = train(top / "run", ends_in=LOST_AT, **knobs)
    dist.barrier()
    if rank() == 0 and lost_node is not None:
        (gone,) = (top / "memory").glob(f"torch-smp-*/run-*-node{lost_node}")
        shutil.rmtree(gone)
    dist.barrier()
    resumed = train(top / "run", resume=True, **knobs)
    left = [str(path) for path in (top / "memory").glob("torch-smp-*/*")]
    resumed.extra["left"] = left
    return plain, lost, resumed


@pytest.mark.parametrize("lost_node", [None, 0])
def test_a_run_goes_on_from_memory(tmp_path: Path, lost_node: int | None) -> None:
    """Two nodes of one rank, whose partition group spans both: each part lies on both nodes. To the last bit."""
    for plain, lost, resumed in run_ranks(lose_and_resume, 2, str(tmp_path), lost_node, {}, ranks_per_node=1):
        assert lost.extra["ended"] == "lost"
        assert lost.losses + resumed.losses == plain.losses
        for name, value in plain.weights.items():
            assert torch.equal(value, resumed.weights[name]), name
        assert resumed.extra["left"] == []

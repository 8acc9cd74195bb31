"""A training that any launcher may end and start anew: it goes on from its last
checkpoint.

    sbatch examples/clusters/srun.sbatch                                  # Slurm starts the ranks
    torchrun --nproc-per-node 8 --max-restarts 20 examples/clusters/train.py --folder runs/one   # torchrun does

The model and its data (random tokens) stand for yours. What matters on a cluster is in
``train``: devices and nodes are the launcher's, the checkpoints lie in a folder that
all nodes see, and ``ckpt_path="last"`` is always asked for.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_smp import SmpShardedStrategy
from smp_core.cluster import launch_environment

WORDS, WIDTH, LENGTH = 256, 64, 32


class Block(nn.Module):
    """A block of a small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            x.shape[1], device=x.device, dtype=x.dtype
        )
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class LanguageModel(L.LightningModule):
    """A small language model; nothing in here knows about sharding or clusters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x = self.words(batch[0][:, :-1])
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch[0][:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(folder: Path, steps: int, save_every: int, **launcher: Any) -> L.Trainer:
    """Train to a number of steps, from the last checkpoint in a folder if there is one.

    Args:
        folder: of checkpoints, which all nodes see.
        steps: of the optimizer, in all attempts together.
        save_every: steps between two checkpoints.
        launcher: further arguments of the Trainer that the launcher asks for.
    """
    L.seed_everything(1, verbose=False)
    tokens = torch.randint(
        WORDS, (1024, LENGTH + 1), generator=torch.Generator().manual_seed(0)
    )
    launched = launch_environment()
    ranks_per_node = launched.local_world_size or 1
    trainer = L.Trainer(
        strategy=SmpShardedStrategy(shard_degree="node"),
        devices=ranks_per_node,
        num_nodes=max(1, launched.world_size // ranks_per_node),
        default_root_dir=folder,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[
            ModelCheckpoint(folder, save_last=True, every_n_train_steps=save_every)
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **launcher,
    )
    trainer.fit(
        LanguageModel(),
        DataLoader(TensorDataset(tokens), batch_size=8, shuffle=True),
        ckpt_path="last",
    )
    if trainer.is_global_zero:
        print(
            f"step {trainer.global_step}, loss {trainer.callback_metrics['loss']:.6f}",
            flush=True,
        )
    return trainer


def parser() -> argparse.ArgumentParser:
    """Return the flags of a training."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "--folder", type=Path, required=True, help="of checkpoints, which all nodes see"
    )
    flags.add_argument("--steps", type=int, default=200)
    flags.add_argument("--save-every", type=int, default=50)
    return flags


def main() -> None:
    flags = parser().parse_args()
    train(flags.folder, flags.steps, flags.save_every)


if __name__ == "__main__":
    main()

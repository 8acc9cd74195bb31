"""Train a GPT-2 with its blocks dealt out to pipeline stages, each over shard and
tensor ranks.

    python examples/train_pipeline.py                       # 3D: stages 2 x shard 2 x tensor 2, eight CPU ranks
    python examples/train_pipeline.py --stages 2 --shard-degree 1 --tensor 1 --ranks 2 --schedule gpipe
    python examples/train_pipeline.py --stages 1 --ranks 1  # the same training on one rank

The module knows nothing of stages. Whatever the layout, a step takes the same samples,
and the losses are the same but for rounding.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import calm  # noqa: F401
import lightning as L
import torch
from corpus import build_corpus
from memory_flags import add_memory_flags, memory_knobs
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_smp import SmpShardedStrategy

LENGTH, BATCH = 64, 16


class LanguageModel(L.LightningModule):
    def __init__(self, vocab_size: int, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=vocab_size,
            n_positions=LENGTH,
            n_embd=64,
            n_layer=blocks,
            n_head=4,
        )
        for dropout in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            setattr(config, dropout, 0.0)
        self.model: Any = GPT2LMHeadModel(config)
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument(
        "--shard-degree",
        type=int,
        default=None,
        help="ranks of a partition group; default: a stage's",
    )
    parser.add_argument(
        "--tensor",
        type=int,
        default=None,
        help="tensor ranks; default 2 with eight ranks, else 1",
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument(
        "--schedule", default="1f1b", help="1f1b, gpipe or interleaved:2"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--cache-dir", type=Path, default=None)
    parser.add_argument(
        "--out", type=Path, default=None, help="write the losses as JSON"
    )
    add_memory_flags(parser)
    return parser.parse_args()


def main() -> None:
    flags = read_flags()
    warnings.filterwarnings("ignore")
    tensor = flags.tensor or (2 if flags.ranks == 8 else 1)
    shard = flags.shard_degree or flags.ranks // flags.stages // tensor
    readers = flags.ranks // flags.stages // tensor
    corpus = build_corpus(None, cache_dir=flags.cache_dir)
    tokens = torch.as_tensor(
        corpus.tokens("train")[: flags.steps * BATCH * LENGTH].astype("int64")
    ).view(-1, LENGTH)
    stages: dict[str, Any] = {}
    if flags.stages > 1:
        recipe = {"microbatches": flags.microbatches, "schedule": flags.schedule}
        stages = {"pipeline_parallel_degree": flags.stages, "pipeline": recipe}
    trainer = L.Trainer(
        strategy=SmpShardedStrategy(
            shard_degree=shard,
            tensor_parallel_degree=tensor,
            **stages,
            **memory_knobs(flags),
        ),
        devices=flags.ranks,
        accelerator="auto",
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=flags.out is None,
        log_every_n_steps=1,
    )
    module = LanguageModel(corpus.vocab_size, 4)
    trainer.fit(module, DataLoader(tokens, batch_size=BATCH // readers))
    if trainer.is_global_zero:
        print("losses", " ".join(f"{loss:.4f}" for loss in module.losses))
        if flags.out is not None:
            flags.out.write_text(json.dumps(module.losses))


if __name__ == "__main__":
    main()

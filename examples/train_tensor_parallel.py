"""Train a Llama whose layers lie over 1, 2 and 4 ranks.

    python examples/train_tensor_parallel.py                  # four ranks on a CPU: loss, memory and bytes by degree
    python examples/train_tensor_parallel.py --steps 2 --length 64              # the same, quicker
    python examples/train_tensor_parallel.py --tensor-parallel-degree 2         # one degree
    python examples/train_tensor_parallel.py --data my_texts/

The model and the training step are as without tensor parallelism. Every degree sees the
same records in a step: the fewer ranks read different batches, the more records each of
them reads.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import calm  # noqa: F401
import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from corpus import build_corpus
from memory_flags import add_memory_flags, memory_knobs
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_smp import SmpShardedStrategy
from smp_core.observe import MemoryReport

RANKS = 4


class Llama(L.LightningModule):
    def __init__(self, vocab_size: int, lr: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            # So that embedding and head can be split.
            vocab_size=vocab_size + -vocab_size % RANKS,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
        self.model: Any = LlamaForCausalLM(config)
        self.lr = lr
        self.losses: list[torch.Tensor] = []

    def on_train_start(self) -> None:
        self.parallel = self.trainer.strategy.parallel
        self.report = MemoryReport(self.parallel)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.watching = self.report.step()
        self.watching.__enter__()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (tokens,) = batch
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.watching.__exit__(None, None, None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    flags = read_flags()
    if flags.tensor_parallel_degree is None and "LOCAL_RANK" not in os.environ:
        compare(flags)
    else:
        train(flags)


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--length",
        type=int,
        default=256,
        help="tokens of a record, a multiple of the degree",
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--tensor-parallel-degree",
        type=int,
        default=None,
        help="default: 1, 2 and 4 in turn",
    )
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--data",
        type=Path,
        default=None,
        help="text file or folder; default: Python's own sources",
    )
    parser.add_argument("--cache-dir", type=Path, default=None)
    parser.add_argument(
        "--out", type=Path, default=None, help="write what was seen as JSON"
    )
    add_memory_flags(parser)
    return parser.parse_args()


def train(flags: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    degree = flags.tensor_parallel_degree or 1
    corpus = build_corpus(flags.data, cache_dir=flags.cache_dir)
    used = np.asarray(
        corpus.tokens("train")[: flags.steps * RANKS * flags.length], dtype=np.int64
    )
    records = TensorDataset(torch.from_numpy(used).view(-1, flags.length))
    module = Llama(corpus.vocab_size, flags.lr)
    trainer = L.Trainer(
        # Partition groups do not count tensor ranks.
        strategy=SmpShardedStrategy(
            shard_degree=RANKS // degree,
            tensor_parallel_degree=degree,
            **memory_knobs(flags),
        ),
        devices=RANKS,
        accelerator="auto",
        max_steps=flags.steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(records, batch_size=degree))
    losses = torch.stack(module.losses).double()
    dist.all_reduce(losses)
    sent = module.parallel.meter.per_step()
    seen = {
        "degree": degree,
        "losses": (losses / dist.get_world_size()).tolist(),
        "activation_bytes": max(
            step.device["activations"] for step in module.report.steps
        ),
        "tensor_bytes": sum(
            n
            for kind, n in sent.items()
            if kind.startswith("tensor_") and kind.endswith("bytes")
        ),
    }
    if trainer.is_global_zero:
        print(json.dumps(seen)) if flags.out is None else flags.out.write_text(
            json.dumps(seen)
        )


def compare(flags: argparse.Namespace) -> None:
    """Run every degree by itself."""
    table = Table(
        title=f"{RANKS} ranks, {RANKS} records of {flags.length} tokens a step"
    )
    for heading in (
        "tensor degree",
        "activations per rank",
        "sent inside layers",
        "first loss",
        "last loss",
    ):
        table.add_column(heading, justify="right")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for degree in (1, 2, 4):
            out = Path(folder) / f"{degree}.json"
            # Of two --out the last one counts.
            own = ["--tensor-parallel-degree", str(degree), "--out", str(out)]
            command = [sys.executable, __file__, *sys.argv[1:], *own]
            subprocess.run(
                command, check=True, stderr=subprocess.DEVNULL if flags.out else None
            )
            seen = json.loads(out.read_text())
            results.append(seen)
            sizes = [
                f"{seen[key] / 2**20:,.1f} MiB"
                for key in ("activation_bytes", "tensor_bytes")
            ]
            table.add_row(
                str(degree), *sizes, *(f"{seen['losses'][at]:.6f}" for at in (0, -1))
            )
    Console().print(table)
    if flags.out is not None:
        flags.out.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()

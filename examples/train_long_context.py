"""Train a Llama on long documents, each sequence over 1, 2 and 4 ranks.

    python examples/train_long_context.py                # four ranks on a CPU: memory and loss by degree, a few minutes
    python examples/train_long_context.py --length 2048 --steps 10      # the same, quicker
    python examples/train_long_context.py --context-parallel-degree 4 --ranks 4 --steps 100   # one degree
    python examples/train_long_context.py --data my_texts/ --tokenizer path/to/tokenizer
    python examples/train_long_context.py --activation-checkpointing full --activation-offloading \\
        --activation-loading-horizon 1                                  # less memory at every degree
    python examples/train_long_context.py --plan                        # Llama 3.1 8B at 16,384 tokens on eight GPUs

Texts are joined to records of --length tokens; the documents in a record do not see one
another (`position_ids` start again). The model and the training step are as without
context parallelism: the strategy splits batches.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import calm  # noqa: F401
import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from corpus import build_corpus, own_text, standard_library
from memory_flags import add_memory_flags, memory_knobs
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lightning_smp import SmpShardedStrategy
from smp_core.config import SmpConfig
from smp_core.engine import plans_of_all_degrees
from smp_core.observe import MemoryReport
from smp_core.plan import GIB, Cluster, Shapes, plan_table
from smp_core.topology import Topology

LLAMA_3_1_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16384,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Records(Dataset[dict[str, torch.Tensor]]):
    """Records of ``length`` tokens from texts laid end to end."""

    def __init__(self, tokens: np.ndarray, end_of_text: int, length: int) -> None:
        self.tokens, self.end_of_text, self.length = tokens, end_of_text, length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.tokens[index * self.length : (index + 1) * self.length]
        tokens = torch.from_numpy(np.asarray(piece, dtype=np.int64))
        starts = torch.cat([torch.tensor([True]), tokens[:-1] == self.end_of_text])
        place = torch.arange(self.length)
        position_ids = place - torch.where(starts, place, 0).cummax(0).values
        return {
            "input_ids": tokens,
            "labels": tokens.masked_fill(starts, -100),
            "position_ids": position_ids,
        }


class LongContext(L.LightningModule):
    def __init__(self, vocab_size: int, length: int, lr: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocab_size,
            max_position_embeddings=length,
            use_cache=False,
            **SMALL,
        )
        self.model: Any = LlamaForCausalLM(config)
        self.lr = lr
        self.losses: list[torch.Tensor] = []
        self.watching = ExitStack()

    def on_train_start(self) -> None:
        self.report = MemoryReport(self.trainer.strategy.parallel)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.watching.enter_context(self.report.step())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.watching.close()

    def activation_bytes(self) -> int:
        """The most that this rank held for backward in any step."""
        return max(step.device["activations"] for step in self.report.steps)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    flags = read_flags()
    if flags.plan:
        plan(flags)
    elif flags.context_parallel_degree is None and "LOCAL_RANK" not in os.environ:
        compare(flags)
    else:
        train(flags)


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=16384, help="tokens of a record")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--context-parallel-degree",
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
    parser.add_argument(
        "--tokenizer",
        default=None,
        help="folder or name for AutoTokenizer; default: a BPE",
    )
    parser.add_argument("--cache-dir", type=Path, default=None)
    parser.add_argument(
        "--out", type=Path, default=None, help="write what was seen as JSON"
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="Llama 3.1 8B on eight GPUs: degrees and memory, on meta",
    )
    add_memory_flags(parser)
    return parser.parse_args()


def records(flags: argparse.Namespace) -> tuple[Records, int]:
    """The records and the vocabulary's size."""
    if flags.tokenizer is None:
        corpus = build_corpus(flags.data, cache_dir=flags.cache_dir)
        tokens, end_of_text, vocab_size = (
            corpus.tokens("train"),
            corpus.end_of_text,
            corpus.vocab_size,
        )
    else:
        tokens, end_of_text, vocab_size = own_tokens(flags)
    steps = len(tokens) // (flags.length * flags.ranks)
    if steps == 0:
        sys.exit(
            f"{len(tokens):,} tokens of text are less than the {flags.ranks} records of {flags.length:,} tokens that a "
            "step takes; give more text with --data, or a smaller --length"
        )
    return Records(
        tokens[: steps * flags.ranks * flags.length], end_of_text, flags.length
    ), vocab_size


def own_tokens(flags: argparse.Namespace) -> tuple[np.ndarray, int, int]:
    """Return as many tokens as the steps take, the token between documents, and the
    vocabulary's size."""
    tokenizer = AutoTokenizer.from_pretrained(flags.tokenizer)
    if tokenizer.eos_token_id is None:
        sys.exit(
            f"--tokenizer {flags.tokenizer} has no eos_token, which documents are told apart by"
        )
    tokens: list[int] = []
    for document in standard_library() if flags.data is None else own_text(flags.data):
        tokens += tokenizer(document.text, add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        tokens.append(tokenizer.eos_token_id)
        if len(tokens) > flags.length * flags.ranks * flags.steps:
            break
    return np.asarray(tokens), tokenizer.eos_token_id, len(tokenizer)


def train(flags: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    degree = flags.context_parallel_degree or 1
    data, vocab_size = records(flags)
    module = LongContext(vocab_size, flags.length, flags.lr)
    # The same records in a step whatever the degree: half as many data ranks take two
    # micro-batches each.
    micro_batches = degree
    trainer = L.Trainer(
        strategy=SmpShardedStrategy(
            shard_degree=flags.ranks,
            context_parallel_degree=degree,
            chunked_cross_entropy=1024,
            **memory_knobs(flags),
        ),
        devices=flags.ranks,
        accelerator="auto",
        max_steps=flags.steps,
        accumulate_grad_batches=micro_batches,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=flags.out is None,
    )
    trainer.fit(module, DataLoader(data, batch_size=1))
    losses = torch.stack(module.losses).double()
    dist.all_reduce(losses)
    by_step = (losses / dist.get_world_size()).view(-1, micro_batches).mean(1)
    seen = {
        "degree": degree,
        "losses": by_step.tolist(),
        "activation_bytes": module.activation_bytes(),
    }
    if torch.cuda.is_available():
        seen["peak_bytes"] = torch.cuda.max_memory_allocated()
    if trainer.is_global_zero and flags.out is not None:
        flags.out.write_text(json.dumps(seen))


def compare(flags: argparse.Namespace) -> None:
    """Every degree in a run of its own."""
    table = Table(
        title=f"{flags.length:,} tokens on {flags.ranks} ranks, the same {flags.ranks} records a step"
    )
    for heading in (
        "context degree",
        "activations per rank",
        "first loss",
        "last loss",
    ):
        table.add_column(heading, justify="right")
    arguments = sys.argv[1:]  # of two --out the last one counts
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for degree in (1, 2, 4):
            if flags.ranks % degree:
                continue
            out = Path(folder) / f"{degree}.json"
            command = [
                sys.executable,
                __file__,
                *arguments,
                "--context-parallel-degree",
                str(degree),
                "--out",
                str(out),
            ]
            subprocess.run(
                command, check=True, stderr=subprocess.DEVNULL if flags.out else None
            )
            seen = json.loads(out.read_text())
            results.append(seen)
            memory = f"{seen['activation_bytes'] / 2**20:,.1f} MiB"
            table.add_row(
                str(degree), memory, *(f"{seen['losses'][at]:.6f}" for at in (0, -1))
            )
    table.caption = "degree 1: Transformers' own attention, with a mask for the documents of a record"
    Console().print(table)
    if flags.out is not None:
        flags.out.write_text(json.dumps(results, indent=2))


def plan(flags: argparse.Namespace) -> None:
    """The setting of SageMaker SMP's walk-through: context_parallel_degree 8,
    hybrid_shard_degree 8, 16,384 tokens."""
    config = SmpConfig.from_smp_parameters(
        {"hybrid_shard_degree": 8, "context_parallel_degree": 8}
    )
    config = (
        dataclasses.replace(config, **memory_knobs(flags))
        if memory_knobs(flags)
        else config
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA_3_1_8B)).to(torch.bfloat16)
    console = Console()
    console.print(config.effective_table())
    cluster = Cluster(Topology.uniform(8, 8), "cuda", 80 * GIB)
    console.print(
        plan_table(plans_of_all_degrees(Shapes.of(model, config), config, cluster))
    )
    tokens = LLAMA_3_1_8B["max_position_embeddings"] // config.context_parallel_degree
    layers, width, kv = 32, 4096, 2 * 8 * 128
    console.print(
        f"each rank: {tokens:,} of 16,384 tokens; layer inputs {layers * tokens * width * 2 / 2**30:.2f} GiB in "
        f"bfloat16, gathered keys and values of a layer {16384 * kv * 2 / 2**20:.0f} MiB"
    )


if __name__ == "__main__":
    main()

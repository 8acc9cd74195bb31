"""A script that knows Accelerate and nothing of torch-smp; a YAML file says what is
sharded.

    accelerate-smp launch --config_file examples/accelerate/one_node.yaml examples/recipes/plain_accelerate.py
    accelerate-smp launch --config_file examples/accelerate/low_memory.yaml --machine_rank 0 ...   # two nodes
    accelerate-smp launch --config_file examples/accelerate/four_ranks_cpu.yaml \\
        examples/recipes/plain_accelerate.py --tiny                                                # four CPU ranks
    accelerate launch examples/recipes/plain_accelerate.py --tiny                                  # without torch-smp

The model is a Llama 3.2 of 1 billion parameters with random weights.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import calm  # noqa: F401
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from corpus import TokenBlocks, build_corpus
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

FULL = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BATCH, BATCH_TINY = (2048, 64, 2), (64, 16, 2)
"""Tokens of a sample, samples of an optimizer step, samples that a rank computes at a
time."""


def read_flags(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a small model for CPU ranks"
    )
    parser.add_argument(
        "--steps", type=int, default=None, help="optimizer steps (1000, tiny 8)"
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="a text file or a folder; default: Python's own library",
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        help="of tokenizer and tokens; default: the user's cache folder",
    )
    parser.add_argument("--out", type=Path, help="folder for the model at the end")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> list[float]:
    flags = read_flags(arguments)
    steps = flags.steps or (8 if flags.tiny else 1000)
    tokens, global_batch, micro_batch = BATCH_TINY if flags.tiny else BATCH
    accelerator = Accelerator(cpu=flags.tiny)
    ranks = accelerator.num_processes
    accelerator.gradient_accumulation_steps = global_batch // (micro_batch * ranks)
    set_seed(0)
    small: dict[str, Any] = (
        {"vocab_size": 300, "max_bytes": 300_000} if flags.tiny else {"max_bytes": None}
    )
    corpus = build_corpus(flags.data, cache_dir=flags.cache_dir, **small)
    blocks = TokenBlocks(corpus.tokens("train"), tokens)
    text = [
        blocks[index % len(blocks)]["input_ids"]
        for index in range(steps * global_batch)
    ]
    model: Any = LlamaForCausalLM(
        LlamaConfig(use_cache=False, **(TINY if flags.tiny else FULL))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if flags.tiny else 3e-4)
    # Accelerate steps a schedule once for each rank.
    schedule = get_cosine_schedule_with_warmup(
        optimizer, max(1, steps // 10) * ranks, steps * ranks
    )
    model, optimizer, schedule, loader = accelerator.prepare(
        model, optimizer, schedule, DataLoader(text, batch_size=micro_batch)
    )
    losses, micro = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        micro.append(accelerator.reduce(loss.detach(), "mean").item())
        if accelerator.sync_gradients:
            losses.append(sum(micro) / len(micro))
            micro.clear()
    accelerator.print(
        f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps of {global_batch} samples"
    )
    if flags.out is not None:
        weights = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            accelerator.unwrap_model(model).save_pretrained(
                flags.out / "model", state_dict=weights
            )
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()

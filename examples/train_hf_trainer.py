"""Transformers' Trainer on torch-smp: a small GPT-2 on real text.

    SMP_RANKS_PER_NODE=2 accelerate-smp launch --config_file
        examples/accelerate/four_ranks_cpu.yaml \\ examples/train_hf_trainer.py

All there is of torch-smp in this file is ``SmpTrainer`` in the place of ``Trainer``,
and a callback that adds what the job achieves to the log. ``--resume`` goes on with the
newest checkpoint, on any number of ranks.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import calm  # noqa: F401
import torch
from corpus import TextData, build_corpus
from memory_flags import add_memory_flags, into_environment, memory_knobs
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from accelerate_smp import SmpMonitorCallback, SmpTrainer


class AsLabels(torch.utils.data.Dataset):
    """Blocks as a causal language model of Transformers takes them: it shifts the
    labels itself."""

    def __init__(self, blocks: Any) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.blocks[index]["input_ids"]
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    flags = read_flags()
    set_seed(flags.seed)
    into_environment(memory_knobs(flags))
    arguments = TrainingArguments(
        output_dir=str(flags.out),
        max_steps=flags.steps,
        per_device_train_batch_size=flags.batch_size,
        per_device_eval_batch_size=flags.batch_size,
        gradient_accumulation_steps=flags.accumulate,
        learning_rate=flags.lr,
        lr_scheduler_type="cosine",
        warmup_steps=flags.steps // 10,
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=flags.steps // 2,
        save_strategy="steps",
        save_steps=flags.steps // 2,
        load_best_model_at_end=True,
        disable_tqdm=True,
        report_to="none",
        seed=flags.seed,
    )
    corpus = build_corpus(flags.data, vocab_size=1024, cache_dir=flags.cache_dir)
    text = TextData(
        corpus,
        flags.seq_len,
        flags.batch_size,
        arguments.world_size,
        validation_blocks=64,
    )
    config = GPT2Config(
        vocab_size=corpus.vocab_size,
        n_positions=flags.seq_len,
        n_embd=128,
        n_layer=2,
        n_head=4,
        bos_token_id=corpus.end_of_text,
        eos_token_id=corpus.end_of_text,
    )
    trainer = SmpTrainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=AsLabels(text.train_blocks),
        eval_dataset=AsLabels(text.validation_blocks),
        processing_class=corpus.tokenizer(),
        callbacks=[SmpMonitorCallback()],
    )
    say(trainer, corpus.describe())
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=flags.resume or None)
    after = trainer.evaluate()["eval_loss"]
    say(
        trainer,
        f"validation perplexity {math.exp(before):.1f} before and {math.exp(after):.1f} after; "
        f"the unigram model has {text.unigram_perplexity():.1f}",
    )
    trainer.save_model(str(flags.out / "final"))
    say(trainer, f"{flags.out / 'final'}: GPT2LMHeadModel.from_pretrained")


def say(trainer: SmpTrainer, words: str) -> None:
    if trainer.is_world_process_zero():
        print(words, flush=True)


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="a text file or a folder of them; default: Python's own library",
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        help="of tokenizer and tokens; default: the user's cache folder",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/hf-trainer"),
        help="folder for what is saved",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the newest checkpoint in --out",
    )
    parser.add_argument(
        "--steps", type=int, default=120, help="optimizer steps (%(default)s)"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=4,
        help="blocks per rank and micro-batch (%(default)s)",
    )
    parser.add_argument(
        "--accumulate", type=int, default=2, help="micro-batches per step (%(default)s)"
    )
    parser.add_argument(
        "--seq-len", type=int, default=128, help="tokens per block (%(default)s)"
    )
    parser.add_argument(
        "--lr", type=float, default=4e-3, help="peak learning rate (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    add_memory_flags(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()

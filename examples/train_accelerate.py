"""A bare Accelerate loop on torch-smp: a small GPT-2 on real text.

    SMP_RANKS_PER_NODE=2 accelerate-smp launch --config_file
        examples/accelerate/four_ranks_cpu.yaml \\ examples/train_accelerate.py

Four CPU processes pose as two machines; each machine holds one copy of the model
states. All there is of torch-smp in this file is ``SmpAccelerator`` in the place of
``Accelerator``.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import calm  # noqa: F401
import torch
from accelerate.utils import set_seed
from corpus import TextData, build_corpus
from memory_flags import add_memory_flags, memory_knobs
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

from accelerate_smp import SmpAccelerator


def loss_of(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], reduction: str = "mean"
) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["targets"].flatten(), reduction=reduction
    )


@torch.no_grad()
def validation_loss(
    accelerator: SmpAccelerator,
    model: torch.nn.Module,
    loader: torch.utils.data.DataLoader,
) -> float:
    """Mean over the tokens of all blocks; each block counts once, also where ranks
    share a ragged last batch."""
    model.eval()
    losses = []
    for batch in loader:
        of_tokens = loss_of(model, batch, reduction="none").view_as(batch["targets"])
        losses.append(accelerator.gather_for_metrics(of_tokens.mean(1)))
    model.train()
    return float(torch.cat(losses).mean())


def main() -> None:
    flags = read_flags()
    accelerator = SmpAccelerator(
        gradient_accumulation_steps=flags.accumulate,
        schedule_in_optimizer_steps=True,  # --steps are those of all ranks together
        **memory_knobs(flags),
    )
    set_seed(flags.seed)
    corpus = build_corpus(flags.data, vocab_size=1024, cache_dir=flags.cache_dir)
    text = TextData(
        corpus,
        flags.seq_len,
        flags.batch_size,
        accelerator.num_processes,
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
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr)
    scheduler = get_cosine_schedule_with_warmup(
        optimizer, flags.steps // 10, flags.steps
    )
    model, optimizer, scheduler, train_loader, val_loader = accelerator.prepare(
        model, optimizer, scheduler, text.train_dataloader(), text.val_dataloader()
    )
    accelerator.print(corpus.describe())

    step = 0
    while step < flags.steps:
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            if step % 20 == 0 or step == flags.steps:
                shown = accelerator.reduce(loss.detach(), "mean").item()
                accelerator.print(
                    f"step {step:4d}  loss {shown:.4f}  gradient norm {norm.item():.3f}"
                )
            if step == flags.steps:
                break

    perplexity = math.exp(validation_loss(accelerator, model, val_loader))
    accelerator.print(
        f"validation perplexity {perplexity:.1f}; the unigram model has {text.unigram_perplexity():.1f}"
    )
    # Loads on any number of ranks, and under Lightning.
    accelerator.save_state(str(flags.out / "state"))
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(
            flags.out / "model", state_dict=weights
        )
    accelerator.print(
        f"{flags.out / 'state'}: to go on with; {flags.out / 'model'}: GPT2LMHeadModel.from_pretrained"
    )
    accelerator.end_training()


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
        default=Path("runs/accelerate"),
        help="folder for what is saved",
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

"""Small trainings under Accelerate and Transformers' Trainer as users write them, for
`smp verify`.

--kind chooses a correct script; --plant puts a defect into it.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

VOCABULARY, LENGTH = 32, 16
RANKS = int(os.environ.get("WORLD_SIZE", 1))


def samples(padded: bool = False) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCABULARY, (96, LENGTH), generator=generator)
    lengths = (
        torch.randint(LENGTH // 2, LENGTH, (96,), generator=generator).tolist()
        if padded
        else [LENGTH] * 96
    )
    return [
        {"input_ids": row[:length], "labels": row[:length]}
        for row, length in zip(rows, lengths, strict=True)
    ]


def padded_together(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collator that pads to the longest row of the batch."""
    pad = nn.utils.rnn.pad_sequence
    tokens = [row["input_ids"] for row in rows]
    return {
        "input_ids": pad(tokens, batch_first=True),
        "labels": pad(tokens, batch_first=True, padding_value=-100),
        "attention_mask": pad(
            [torch.ones_like(each) for each in tokens], batch_first=True
        ),
    }


def gpt2() -> GPT2LMHeadModel:
    sizes = {
        "vocab_size": VOCABULARY,
        "n_positions": LENGTH,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
    }
    return GPT2LMHeadModel(
        GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )


class OwnPositions(nn.Module):
    """A language model that counts its positions from the tokens it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = (
            nn.Embedding(VOCABULARY, 16),
            nn.Embedding(LENGTH, 16),
        )
        self.project, self.head = nn.Linear(16, 48), nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        query, key, value = self.project(x).unsqueeze(1).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        ).squeeze(1)
        return self.head(x)


def loop(flags: argparse.Namespace) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(3)
    model = OwnPositions() if flags.plant == "local_positions" else gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(samples(), batch_size=4, shuffle=True)
    scheduler = get_linear_schedule_with_warmup(optimizer, 4, len(loader))
    if flags.plant == "unprepared_loader":
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    else:
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
    for batch in loader:
        with accelerator.accumulate(model):
            if flags.plant == "local_positions":
                logits = model(batch["input_ids"])
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1), batch["labels"].flatten()
                )
            else:
                loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen = accelerator.reduce(torch.tensor(float(batch["labels"].numel())), "sum")
        if flags.plant == "doubled_metric":
            seen = accelerator.reduce(seen, "sum")
        accelerator.log({"seen": seen.item()})


def counted_by_hand(flags: argparse.Namespace) -> None:
    """A loop that adds gradients of two batches up by itself, without ``accumulate``;
    batches are padded."""
    accelerator = Accelerator()
    set_seed(3)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(
        samples(padded=True), batch_size=4, shuffle=True, collate_fn=padded_together
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, batch in enumerate(loader):
        accelerator.backward(model(**batch).loss / 2)
        if number % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


def trainer(flags: argparse.Namespace) -> None:
    set_seed(3)
    args = TrainingArguments(
        "unused",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        warmup_steps=2,
    )
    padded = flags.kind == "padded"
    collator = padded_together if padded else None
    data = samples(padded)
    # The first token of a row is no target, and not counted as one.
    if flags.kind == "masked":
        data = [
            {**row, "labels": torch.cat([torch.tensor([-100]), row["labels"][1:]])}
            for row in data
        ]
    Trainer(model=gpt2(), args=args, train_dataset=data, data_collator=collator).train()


LOOPS = {"loop": loop, "counted_by_hand": counted_by_hand}
KINDS = (*LOOPS, "trainer", "masked", "padded")
PLANTS = ("local_positions", "unprepared_loader", "doubled_metric")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="loop", choices=KINDS)
    parser.add_argument("--plant", choices=PLANTS)
    flags = parser.parse_args()
    LOOPS.get(flags.kind, trainer)(flags)


if __name__ == "__main__":
    main()

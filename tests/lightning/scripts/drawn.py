"""A small training under Lightning whose parts are drawn, for `smp verify`: what it is
made of, and with --plant a defect at a drawn place, which one process does not have."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_smp import SmpShardedStrategy

LENGTH, WIDTH, CLASSES = 6, 12, 7
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
# What differs first, and the beginning of the likeliest cause.
PLANTS: dict[str, tuple[tuple[str, ...], str]] = {
    "hook": (("gradients",), "lost hook"),
    "frozen": (("gradients",), "frozen part"),
    "divisor": (("loss",), "wrong divisor"),
    "batch norm": (("activations",), "BatchNorm per rank"),
    "noise": (("activations",), "random numbers"),
    "centred": (("activations",), "samples are mixed"),
    "first sample": (("activations",), "samples are mixed"),
    "buffer": (("buffers",), "a buffer that is computed from one rank's samples"),
    "rate": (("weights",), "learning rate"),
    "seed": (("samples",), "data order"),
    "start": (("start",), "initial weights"),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1))
        q, k, v = parts.movedim(-3, 0).transpose(-3, -2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(-3, -2).flatten(-2))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 20), nn.Linear(WIDTH, 20)
        self.drop, self.down = nn.Dropout(0.2), nn.Linear(20, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(self.drop(F.silu(self.gate(h)) * self.up(h)))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(3, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(self.norm(x.transpose(1, 2))).relu().transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.cell(x)[0]


class Scaled(nn.Module):
    """A free parameter, and a buffer that the state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("offset", torch.linspace(0, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.offset


BLOCKS: tuple[Callable[[], nn.Module], ...] = (
    Attention,
    Gated,
    Convolution,
    Recurrent,
    Scaled,
)


class Planted(nn.Module):
    """What a defect adds behind a block."""

    def __init__(self, plant: str) -> None:
        super().__init__()
        self.plant = plant
        if plant == "batch norm":
            self.norm = nn.BatchNorm1d(LENGTH)
        if plant == "buffer":
            self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.plant == "batch norm":
            return self.norm(x)
        if self.plant == "noise":
            return x + torch.randn_like(x)
        if self.plant == "centred":
            return x - x.mean(0, keepdim=True)
        if self.plant == "first sample":
            return x * x[0].mean().sigmoid()
        if self.plant == "buffer":
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return x


class Model(L.LightningModule):
    def __init__(self, flags: argparse.Namespace) -> None:
        super().__init__()
        self.rng = random.Random(flags.seed)
        self.plant = flags.plant
        self.embed = nn.Embedding(CLASSES, WIDTH)
        blocks = [self.rng.choice(BLOCKS)() for _ in range(self.rng.randint(1, 3))]
        if self.rng.random() < 0.3:
            blocks.append(blocks[0])  # shared
        if self.plant in ("batch norm", "noise", "centred", "first sample", "buffer"):
            blocks.insert(self.rng.randint(0, len(blocks)), Planted(self.plant))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        if self.rng.random() < 0.3:
            self.head.weight = self.embed.weight
        self.smoothing = self.rng.choice((0.0, 0.1))
        self.decay = self.rng.choice((0.0, 0.1))
        self.optimizer = self.rng.choice(("adamw", "sgd", "nadam"))
        self.schedule = self.rng.choice((None, "step", "epoch"))
        self.form = self.rng.choice(("dict", "tuple", "nested"))
        self.auxiliary = self.rng.random() < 0.3
        self._hurt()

    def _hurt(self) -> None:
        parameters = [p for p in self.blocks.parameters() if p.requires_grad]
        victim = self.rng.choice(parameters or [self.head.weight])
        if self.plant == "hook" and RANKS == 1:
            victim.register_hook(lambda gradient: gradient * 0.5)
        if self.plant == "frozen" and RANKS > 1:
            victim.requires_grad_(False)
        if self.plant == "start":
            with torch.no_grad():
                victim.add_(0.1 * RANKS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.form == "dict":
            tokens, labels = batch["tokens"], batch["labels"]
        elif self.form == "tuple":
            tokens, labels = batch
        else:
            (tokens,), labels = batch["inputs"], batch["more"]["labels"]
        logits = self(tokens)
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), label_smoothing=self.smoothing
        )
        if self.auxiliary:
            loss = loss + 0.01 * logits.square().mean()
        if self.plant == "divisor":
            loss = loss * RANKS
        self.log_dict(
            {"loss": loss, "norm": logits.norm(dim=-1).mean()}, sync_dist=True
        )
        return {"loss": loss, "logits": logits.detach()}

    def configure_optimizers(self) -> Any:
        rate = 0.01 * (RANKS if self.plant == "rate" else 1)
        groups = [
            {"params": [p for p in self.parameters() if p.ndim > 1]},
            {
                "params": [p for p in self.parameters() if p.ndim <= 1],
                "weight_decay": 0.0,
            },
        ]
        groups = [group for group in groups if group["params"]]
        kinds: dict[str, Any] = {
            "adamw": torch.optim.AdamW,
            "sgd": lambda g, lr, weight_decay: torch.optim.SGD(
                g, lr, momentum=0.9, nesterov=True, weight_decay=weight_decay
            ),
            "nadam": torch.optim.NAdam,
        }
        optimizer = kinds[self.optimizer](groups, lr=rate, weight_decay=self.decay)
        if self.schedule is None:
            return optimizer
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=99)
        return [optimizer], [{"scheduler": schedule, "interval": self.schedule}]


class Rows(Dataset[Any]):
    def __init__(self, form: str, samples: int) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = (samples, LENGTH + 1)
        self.tokens = torch.randint(CLASSES, shape, generator=generator)
        self.form = form

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        tokens, labels = self.tokens[index, :-1], self.tokens[index, 1:]
        if self.form == "dict":
            return {"tokens": tokens, "labels": labels}
        if self.form == "tuple":
            return tokens, labels
        return {"inputs": [tokens], "more": {"labels": labels, "index": index}}


class Stream(IterableDataset[Any]):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return (self.rows[index] for index in range(len(self.rows)))


def loader_of(flags: argparse.Namespace, model: Model, rng: random.Random) -> Any:
    rows = Rows(model.form, 48)
    size = rng.choice((2, 4))
    kind = rng.choice(("rows", "shuffled", "stream"))
    if flags.plant == "seed":
        generator = torch.Generator().manual_seed(RANK)
        return DataLoader(rows, size, shuffle=True, generator=generator)
    if kind == "stream":
        return DataLoader(Stream(rows), size)
    return DataLoader(rows, size, shuffle=kind == "shuffled")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--plant", choices=PLANTS)
    flags = parser.parse_args()
    L.seed_everything(flags.seed)
    model = Model(flags)
    rng = random.Random(flags.seed + 1)
    options: dict[str, Any] = {"accumulate_grad_batches": rng.choice((1, 1, 2))}
    clip = rng.choice((None, "norm", "value"))
    if clip is not None:
        options |= {"gradient_clip_val": 0.3, "gradient_clip_algorithm": clip}
    if flags.plant == "seed":
        options["use_distributed_sampler"] = False
    trainer = L.Trainer(
        strategy=SmpShardedStrategy(shard_degree=2),
        devices=2,
        accelerator="cpu",
        max_epochs=2,
        **options,
    )
    trainer.fit(model, loader_of(flags, model, rng))


if __name__ == "__main__":
    main()

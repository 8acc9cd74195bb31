"""The transformer that the cluster benchmark trains, and its data."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, LAYERS, LENGTH, RATE = 4096, 512, 6, 16, 0.05


class Sleep(torch.autograd.Function):
    """Emulated compute: ``seconds`` in forward, twice that in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Block(nn.Module):
    def __init__(self, compute: float, width: int) -> None:
        super().__init__()
        self.compute = compute
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.compute:
            x = Sleep.apply(x, self.compute)
        b, length, width = x.shape
        # As many of the eight heads as this rank computes.
        q, k, v = (
            y.view(b, length, -1, width // 8).transpose(1, 2)
            for y in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, length, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A language model of 23 million parameters (7 at width 256); returns the
    next-token loss."""

    def __init__(self, compute: float = 0.0, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(compute, width) for _ in range(LAYERS))
        self.norm, self.head = (
            nn.LayerNorm(width),
            nn.Linear(width, VOCABULARY, bias=False),
        )
        # How blocks follow one another.
        self.dummy_inputs = {"tokens": torch.zeros(1, LENGTH + 1, dtype=torch.int64)}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(
            self.head(self.norm(x)).float().flatten(0, 1), tokens[:, 1:].flatten()
        )


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100_000 * step + 1000 * micro + rank)
    start = torch.randint(0, VOCABULARY, (1, 1), generator=generator)
    return (start + torch.arange(LENGTH + 1)) % VOCABULARY

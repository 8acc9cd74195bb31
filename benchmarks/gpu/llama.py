"""The Llama that the GPU check trains: shapes of Llama 3.2 1B and 3B, random
weights."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

SIZES = {
    "1b": {"width": 2048, "layers": 16, "heads": 32, "groups": 8, "inner": 8192},
    "3b": {"width": 3072, "layers": 28, "heads": 24, "groups": 8, "inner": 8192},
    "tiny": {"width": 64, "layers": 6, "heads": 4, "groups": 2, "inner": 128},
}
VOCABULARY = {"1b": 32000, "3b": 32000, "tiny": 256}


class Block(nn.Module):
    """Letters: B samples, L tokens, D width, H heads, G key-value heads."""

    def __init__(
        self, width: int, heads: int, groups: int, inner: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.size, self.dropout = (
            heads,
            groups,
            width // heads,
            dropout,
        )
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (
            nn.Linear(width, groups * self.size, bias=False) for _ in range(2)
        )
        self.project = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x_BLD: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x_BLD.shape
        h = self.norm_attention(x_BLD)
        q = rotated(
            self.query(h).view(batch, length, self.heads, -1), rotation
        ).transpose(1, 2)
        k = rotated(
            self.key(h).view(batch, length, self.groups, -1), rotation
        ).transpose(1, 2)
        v = self.value(h).view(batch, length, self.groups, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed = self.project(mixed.transpose(1, 2).reshape(batch, length, -1))
        x_BLD = x_BLD + F.dropout(mixed, self.dropout, self.training)
        h = self.norm_mlp(x_BLD)
        return x_BLD + self.down(F.silu(self.gate(h)) * self.up(h))


def rotated(x_BLHS: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    rotation = rotation.to(x_BLHS.dtype)
    cos, sin = (
        rotation[0, None, : x_BLHS.shape[1], None],
        rotation[1, None, : x_BLHS.shape[1], None],
    )
    first, second = x_BLHS.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Llama(nn.Module):
    """Returns the next-token loss; logits are made and dropped in pieces, or they alone
    would fill the device."""

    def __init__(self, size: str, length: int, dropout: float = 0.0) -> None:
        super().__init__()
        shape, vocabulary = SIZES[size], VOCABULARY[size]
        width, heads = shape["width"], shape["heads"]
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, shape["groups"], shape["inner"], dropout)
            for _ in range(shape["layers"])
        )
        self.norm, self.head = (
            nn.RMSNorm(width),
            nn.Linear(width, vocabulary, bias=False),
        )
        half = width // heads // 2
        angles = torch.outer(
            torch.arange(length), 500000.0 ** (-torch.arange(half) / half)
        )
        self.register_buffer(
            "rotation", torch.stack([angles.cos(), angles.sin()]), persistent=False
        )
        self.around = contextlib.nullcontext

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        x_BLD = self.tokens(tokens_BL[:, :-1])
        for block in self.blocks:
            with self.around():
                x_BLD = block(x_BLD, self.rotation)
        hidden, targets = self.norm(x_BLD).flatten(0, 1), tokens_BL[:, 1:].flatten()
        pieces = zip(hidden.split(2048), targets.split(2048), strict=True)
        return (
            sum(checkpoint(self.piece, h, t, use_reentrant=False) for h, t in pieces)
            / targets.numel()
        )

    def piece(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(wide), targets, reduction="sum")

"""A small GPT: embeddings, pre-norm blocks with causal attention, a tied head; sizes
that no rank count divides."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        b, length, width = x_BLD.shape
        q, k, v = (
            part.view(b, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x_BLD)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLD = x_BLD + self.project(mixed.transpose(1, 2).reshape(b, length, width))
        return x_BLD + self.down(F.gelu(self.up(self.mlp_norm(x_BLD))))


class SmallGpt(nn.Module):
    """Returns the next-token loss, in the logits' own dtype."""

    def __init__(
        self,
        vocabulary: int = 101,
        width: int = 30,
        layers: int = 3,
        heads: int = 5,
        length: int = 8,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(vocabulary, width),
            nn.Embedding(length, width),
        )
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        inputs, targets = tokens_BL[:, :-1], tokens_BL[:, 1:]
        x_BLD = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return F.cross_entropy(
            self.head(self.norm(x_BLD)).flatten(0, 1), targets.flatten()
        )

"""One tensor rank's part of Megatron's GPT, for the planner's trace.

Kernels are those of Megatron-LM: attention is two batched products with a softmax and a
dropout between them, biases are added in products, GELU and layer norms are one kernel
each, and dropout of a layer's outputs is part of the kernel that adds the residual. A
rank of T has 1 / T of the heads, of the MLP's width and of the vocabulary; layer norms
and sums with the residual are of the full width.

Shapes: S tokens, B samples, E width, H heads of this rank, D width of a head, V rows of
the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, layer_norm

DROPOUT = 0.1
"""The share of attention that is dropped: Megatron's default, since the published rows
do not say."""

FIELDS: dict[str, int] = {}
"""Width, layers, heads, vocabulary, tokens and tensor degree of the model that
:func:`build` makes."""


class Norm(nn.Module):
    """A layer norm with weight and bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.ones(width)),
            nn.Parameter(torch.zeros(width)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [S, B, E], normalized over E."""
        return layer_norm(x, self.weight.shape, self.weight, self.bias)


class Block(nn.Module):
    """A Transformer layer of one tensor rank."""

    def __init__(self, width: int, heads: int, tensor: int) -> None:
        super().__init__()
        self.heads, self.own = heads // tensor, width // tensor
        self.before_attention, self.before_mlp = Norm(width), Norm(width)
        self.queries_keys_values = nn.Linear(width, 3 * self.own)
        self.projection = nn.Linear(self.own, width)
        self.up = nn.Linear(width, 4 * self.own)
        self.down = nn.Linear(4 * self.own, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output of x [S, B, E]."""
        x = x + self.projection(
            self.attention(self.queries_keys_values(self.before_attention(x)))
        )
        return x + self.down(gelu(self.up(self.before_mlp(x))))

    def attention(self, joined: torch.Tensor) -> torch.Tensor:
        """Return the attended values [S, B, E / T] of joined queries, keys and values
        [S, B, 3 E / T]."""
        tokens, samples, _ = joined.shape
        # [B H, S, 3, D].
        by_head = joined.view(tokens, samples * self.heads, 3, -1).transpose(0, 1)
        queries, keys, values = by_head.unbind(2)
        # Scales and masks in the same kernel.
        shares = torch.bmm(queries, keys.transpose(1, 2)).softmax(-1)
        kept, _ = torch.native_dropout(shares, DROPOUT, True)
        return (
            torch.bmm(kept, values).transpose(0, 1).reshape(tokens, samples, self.own)
        )


class Model(nn.Module):
    """A GPT of one tensor rank that returns its loss."""

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        vocabulary: int,
        tokens: int,
        tensor: int,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary // tensor, width)
        self.positions = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads, tensor) for _ in range(layers))
        self.norm = Norm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of ids [S, B], taken of float32 logits [S B, V / T]."""
        x = self.embedding(ids) + self.positions.weight[: len(ids), None]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.embedding.weight.T
        return cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def batch(samples: int, tokens: int) -> Mapping[str, torch.Tensor]:
    """Return ids [S, B]."""
    return {"ids": torch.zeros(tokens, samples, dtype=torch.long)}


def build() -> tuple[nn.Module, Any]:
    """Return the model of :data:`FIELDS`, and its batch."""
    return Model(**FIELDS), batch

"""Models that take one of several ways of equal shapes, for tests of ranks that go
apart."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

WIDTH = 8
# Ways of two ranks, batch by batch: the left blocks are a tower that samples without an
# image leave out, the right ones are used by both ranks, by one, by none, or chosen in
# place of the left ones.
WAYS = ["lr r", "r r", " lr", "l r", "rl l", "lr lr", "r lr", "r r", "l "]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Branching(nn.Module):
    """Runs ``ways`` in the order that it is told; its parameters are float64.

    ``way`` is a string like "lr": the left branch, then the right one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(Block() for _ in range(2))
        self.right = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: torch.Tensor, way: Iterable[str]) -> torch.Tensor:
        for letter in way:
            for block in self.left if letter == "l" else self.right:
                x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, x: torch.Tensor, way: Iterable[str]) -> torch.Tensor:
    return model(x, way).square().mean()


def batch_of(rank: int, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)

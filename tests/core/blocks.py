"""A model of blocks that can be split over tensor ranks and cut into stages, and rows
of numbers for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH, TOKENS = 8, 4
PLAN: dict[str, Any] = {"plan": {"*.up": "column", "*.down": "row"}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    """[samples, TOKENS, WIDTH] -> the same, in float64. The same weights wherever it is
    made."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Block() for _ in range(2)).double()
        self.dummy_inputs = torch.zeros(2, TOKENS, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class OwnExperts(nn.Module):
    """Experts of one matrix each, in a module that ranks may divide."""

    smp_experts = True

    def __init__(self, experts: int, width: int, spread: float) -> None:
        super().__init__()
        self.num_experts = experts
        self.matrices = nn.Parameter(torch.randn(experts, width, width) * spread)

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            share = (weights * (chosen == expert)).sum(-1, keepdim=True)
            total = total + share * torch.tanh(hidden @ self.matrices[expert])
        return total


def rows(samples: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, TOKENS, WIDTH, generator=generator, dtype=torch.float64)

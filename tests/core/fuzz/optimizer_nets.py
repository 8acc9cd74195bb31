"""The net of random programs around optimizers, and its samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

STEPS = 6
WIDTH = 6


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Cells that are units, one of which some steps leave out; a table whose weight is
    the head's, a 0-d parameter, a row that one of two ranks has nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH)
        self.cells = nn.ModuleList([Cell(), Cell(), Cell()])
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.row = nn.Parameter(torch.ones(1, WIDTH))
        self.head = nn.Linear(WIDTH, 9)
        self.head.weight = self.table.weight
        self.never = nn.Linear(3, 3)

    def forward(self, tokens: torch.Tensor, all_cells: bool = True) -> torch.Tensor:
        x = self.table(tokens) * self.row
        for cell in self.cells if all_cells else self.cells[:2]:
            x = cell(x)
        return self.head(x) * self.gain


def samples(number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randint(9, (3, 4), generator=generator)


def whole(tensor: Any) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()

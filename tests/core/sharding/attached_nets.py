"""A small frozen net, and adapters that are attached to its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        for number, name in enumerate(
            sorted(name for name, _ in self.named_children())
        ):
            y = (
                y
                if name == "base"
                else y + (1 - 3 * number) * self.get_submodule(name)(x)
            )
        return y.tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net().double().requires_grad_(False)


def attach(
    model: Any,
    seed: int,
    width: int = 2,
    swapped: bool = False,
    names: Sequence[str] = ("adapter", "other"),
) -> None:
    """Attach two adapters to each block, of other values for each seed."""
    torch.manual_seed(seed)
    for block in model.blocks:
        for name in names[::-1] if swapped else names:
            setattr(
                block,
                name,
                nn.Sequential(
                    nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
                ).double(),
            )

"""A unit whose forward gives a view of its own parameters, or one of them: their memory
is freed behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from tests.harness import run_ranks

WIDTH, TOKENS = 32, 4


class Table(nn.Module):
    def __init__(self, gives: str) -> None:
        super().__init__()
        self.gives, self.table = gives, nn.Parameter(torch.randn(2 * TOKENS, WIDTH))

    def forward(self, length: int) -> Any:
        if self.gives == "view":
            return self.table[:length]
        return {"table": self.table, "scale": torch.ones(())}


class Model(nn.Module):
    def __init__(self, gives: str) -> None:
        super().__init__()
        self.places = Table(gives)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.places(x.shape[1])
        x = x + (
            places
            if isinstance(places, torch.Tensor)
            else places["table"][: x.shape[1]] * places["scale"]
        )
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def trained(gives: str, shards: bool) -> tuple[list[float], torch.Tensor]:
    """Losses of two steps, and the table behind them."""
    torch.manual_seed(0)
    model, x = Model(gives).double(), torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    parallel = (
        parallelize(model, SmpConfig(shard_degree=2, units=["Table", "Linear"]))
        if shards
        else None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if parallel is not None:
        parallel.prepare_optimizer(optimizer)
    losses = []
    for _ in range(2):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    table: Any = model.places.table
    return losses, table.full_tensor().detach() if shards else table.detach()


@pytest.mark.parametrize("gives", ["view", "parameter"])
def test_what_a_unit_gives_of_its_parameters_outlasts_them(gives: str) -> None:
    losses, table = trained(gives, shards=False)
    for ours, of_rank in run_ranks(trained, 2, gives, shards=True):
        assert ours == pytest.approx(losses, abs=1e-12)
        torch.testing.assert_close(of_rank, table, rtol=0, atol=1e-12)

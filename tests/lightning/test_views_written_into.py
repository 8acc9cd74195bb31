"""Outputs of units that are views and written into behind them: FSDP2 then does not see
the backward pass come."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from tests.harness import run_ranks
from tests.lightning.running import make_trainer, whole

WIDTH = 8


class Module(LightningModule):
    """Batches have three dims, of which a linear layer gives a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = self.first(batch)
        x += 1.0
        return self.second(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted() -> dict[str, torch.Tensor]:
    """Weights behind four batches, which all ranks read alike."""
    torch.manual_seed(0)
    module, data = Module(), torch.randn(8, 3, WIDTH, dtype=torch.float64)
    knobs = {"shard_degree": 2, "units": ["Linear"]}
    make_trainer(knobs, precision="64-true", use_distributed_sampler=False).fit(
        module, DataLoader(data, batch_size=2)
    )
    return {name: whole(value) for name, value in module.named_parameters()}


def test_gradients_of_a_unit_whose_view_is_written_into_are_reduced() -> None:
    """Its inputs want no gradient, so that nothing in backward needs its weights and
    fails without: it stayed as it began, in silence. Sums in another order: 1e-12."""
    expected = fitted()
    for found in run_ranks(fitted, 2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)

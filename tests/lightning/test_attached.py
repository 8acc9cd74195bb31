"""Adapters that a callback attaches in the middle of a fit: one process's training, or
an error on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from smp_core.sharding.gradients import RanksDiverged
from tests.core.models import WIDTH
from tests.harness import run_ranks
from tests.lightning.modules import LanguageModule, PlainModel, rank
from tests.lightning.running import Run, assert_same, make_trainer, report, together

FLAGS: dict[str, Any] = {
    "precision": "64-true",
    "max_epochs": 2,
    "gradient_clip_val": 0.5,
}


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y + self.adapter(x) if hasattr(self, "adapter") else y


class Adapted(LanguageModule):
    def build(self) -> None:
        torch.manual_seed(0)
        self.model = PlainModel()
        self.model.blocks = nn.ModuleList(Block(block) for block in self.model.blocks)


class Attach(Callback):
    """Attaches adapters before the second epoch, of other values on each rank, and adds
    them to the optimizer.

    Args:
        on_ranks: that attach them.
    """

    def __init__(self, on_ranks: tuple[int, ...]) -> None:
        self.on_ranks = on_ranks

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch != 1 or rank() not in self.on_ranks:
            return
        torch.manual_seed(5 + rank())
        for block in pl_module.model.blocks:
            block.adapter = nn.Sequential(
                nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
            ).double()
        if len(self.on_ranks) > 1 or trainer.world_size == 1:
            late = [
                parameter
                for block in pl_module.model.blocks
                for parameter in block.adapter.parameters()
            ]
            trainer.optimizers[0].add_param_group({"params": late, "lr": 0.05})


def attached(knobs: dict[str, Any] | None, on_ranks: tuple[int, ...]) -> Run:
    module, trainer = (
        Adapted(batches=2),
        make_trainer(knobs, callbacks=[Attach(on_ranks)], **FLAGS),
    )
    trainer.fit(module)
    return report(trainer, module)


@pytest.mark.parametrize(
    "knobs",
    [
        {"shard_degree": 2, "units": ["Block"]},
        pytest.param({"shard_degree": 1}, marks=pytest.mark.slow),
        pytest.param(
            {"shard_degree": 2, "optimizer_shard": "world", "units": ["Block"]},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"shard_degree": 4, "state_offload": "optimizer"}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_a_callbacks_adapters_train_as_in_one_process(knobs: dict[str, Any]) -> None:
    assert_same(together(attached, knobs, (0, 1, 2, 3)), attached(None, (0,)))


def refused(knobs: dict[str, Any]) -> str:
    with pytest.raises(RanksDiverged) as caught:
        attached(knobs, (1,))
    return str(caught.value)


def test_an_adapter_of_one_rank_is_refused_on_all() -> None:
    for said in run_ranks(refused, 2, {"shard_degree": 2, "units": ["Block"]}):
        assert (
            "only on rank 1 'model.blocks.0.adapter.0.bias' was attached to the model"
            in said
        )

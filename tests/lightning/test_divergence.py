"""Ranks that take different ways through a model under Lightning's Trainer: an error
before the step, or one process's numbers (1e-12 in float64) where the branches are
optional units."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn

from smp_core.sharding.gradients.divergence import RanksDiverged
from tests.core.branching import WAYS, Branching, batch_of, loss_of
from tests.core.pictured import pictured_loss, small_llava
from tests.harness import run_ranks
from tests.lightning.running import Run, assert_same, fit, make_trainer


class BranchingModule(LightningModule):
    """Goes one way with all ranks, and in the second step every rank goes its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Branching()
        self.seen: list[list[torch.Tensor]] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        way = "lr"[dist.get_rank()] if index == 3 else "lr"
        self.seen.append(
            [p.to_local().detach().clone() for p in self.model.head.parameters()]
        )
        return loss_of(self.model, batch_of(dist.get_rank(), 0, index), way)

    def validation_step(self, batch: Any, index: int) -> None:
        self.model(batch_of(0, 0, index), "lr" if index or dist.get_rank() else "rl")

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.arange(16), batch_size=1)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.arange(4), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def stopped() -> dict[str, Any]:
    module = BranchingModule()
    trainer = make_trainer(
        {"shard_degree": 2, "units": ["Block"]},
        max_epochs=1,
        accumulate_grad_batches=2,
        limit_val_batches=0,
    )
    with pytest.raises(RanksDiverged) as error:
        trainer.fit(module)
    during, after = (
        module.seen[-1],
        [p.to_local() for p in module.model.head.parameters()],
    )
    unchanged = all(map(torch.equal, during, after))
    moved = not torch.equal(module.seen[0][0], after[0])
    evaluated = make_trainer({"shard_degree": 2, "units": ["Block"]})
    with pytest.raises(RanksDiverged) as in_evaluation:
        evaluated.validate(BranchingModule(), verbose=False)
    return {
        "said": str(error.value),
        "weights": unchanged and moved,
        "step": trainer.global_step,
        "evaluation": str(in_evaluation.value),
    }


def test_ranks_that_go_apart_stop_before_the_step() -> None:
    for seen in run_ranks(stopped, 2):
        where = "in micro-batch 2, rank 0: all_gather of 'model.left.0' in forward; rank 1: all_gather of 'model.right"
        assert where in seen["said"], seen["said"]
        assert seen["weights"] and seen["step"] == 1
        assert "rank 0: all_gather of 'model.right.0'" in seen["evaluation"], seen[
            "evaluation"
        ]


class OptionalModule(LightningModule):
    """The blocks are the module's own children; which of them a rank calls follows from
    rank and batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        model = Branching()
        self.left, self.right, self.head = (
            nn.Sequential(*model.left),
            nn.Sequential(*model.right),
            model.head,
        )
        self.losses: list[torch.Tensor] = []

    def loss(self, rank: int, index: int) -> torch.Tensor:
        x = batch_of(rank, 0, index)
        for letter in WAYS[index % len(WAYS)].split(" ")[rank]:
            x = (self.left if letter == "l" else self.right)(x)
        return self.head(x).square().mean()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if dist.is_initialized():
            return self.loss(dist.get_rank(), index)
        return (self.loss(0, index) + self.loss(1, index)) / 2

    def train_dataloader(self) -> Any:
        n_ranks = 2 if dist.is_initialized() else 1
        return torch.utils.data.DataLoader(torch.arange(9 * n_ranks), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class PicturedModule(OptionalModule):
    """A vision tower, which ranks without a picture do not call."""

    def __init__(self) -> None:
        super().__init__()
        del self.left, self.right, self.head
        self.model = small_llava()

    def loss(self, rank: int, index: int) -> torch.Tensor:
        return pictured_loss(self.model, rank, index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def optional() -> list[Run]:
    knobs: dict[str, Any] = {
        "shard_degree": 2,
        "units": {"modules": ["Block"], "optional": ["left", "right"]},
    }
    found: dict[str, Any] = {"shard_degree": 2, "units": {"optional": "auto"}}
    return [
        fit(
            OptionalModule,
            knobs={**knobs, "activations": "full"},
            accumulate_grad_batches=3,
        ),
        fit(OptionalModule, knobs=knobs, accumulate_grad_batches=1),
        fit(PicturedModule, knobs=found, accumulate_grad_batches=3),
    ]


def test_optional_units_may_be_left_out_by_any_rank() -> None:
    expected = [
        fit(OptionalModule, accumulate_grad_batches=3),
        fit(OptionalModule, accumulate_grad_batches=1),
    ]
    expected += [fit(PicturedModule, accumulate_grad_batches=3)]
    for runs in run_ranks(optional, 2):
        for ours, theirs in zip(runs, expected, strict=True):
            assert_same(ours, theirs)

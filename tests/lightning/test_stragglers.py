"""A rank that is slow is named with the part of the step in which it is, of the
monitor's report."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_smp import SmpMonitor
from smp_core.observe.step_times import PARTS, Part
from tests.harness import run_ranks
from tests.lightning.running import make_trainer
from tests.logged import warnings_said

STEPS, BATCH, WIDTH = 6, 2, 16
# Seconds of each step. The step itself takes a few milliseconds.
SLOW = 0.15


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, None


class SlowRows(Dataset[torch.Tensor]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return STEPS * BATCH * dist.get_world_size()

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds / BATCH)
        return torch.full((WIDTH,), index / 100)


class SlowSgd(torch.optim.SGD):
    seconds = 0.0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        time.sleep(self.seconds)
        return loss


class Slow(LightningModule):
    """Two layers; on one rank one part of each step takes SLOW seconds longer."""

    def __init__(self, part: Part, rank: int) -> None:
        super().__init__()
        self.seconds = {
            each: SLOW * (each == part and dist.get_rank() == rank) for each in PARTS
        }
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(self.seconds["forward"])
        hidden = SlowBackward.apply(self.first(batch), self.seconds["backward"])
        return self.second(hidden).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = SlowSgd(self.parameters(), 0.01)
        optimizer.seconds = self.seconds["optimizer"]
        return optimizer

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(SlowRows(self.seconds["data"]), BATCH)


def lines(
    cases: list[tuple[Part, int]], knobs: dict[str, Any]
) -> list[tuple[list[str], dict[str, float]]]:
    """Of each run, what rank 0 logged about stragglers, and the last report."""
    found = []
    for part, rank in cases:
        monitor = SmpMonitor(every_n_steps=STEPS)
        trainer = make_trainer(knobs, callbacks=[monitor], gradient_clip_val=1.0)
        with warnings_said() as said:
            trainer.fit(Slow(part, rank))
        found.append(([line for line in said if "straggler" in line], monitor.latest))
    return found


def check(cases: list[tuple[Part, int]], ranks: int, **knobs: Any) -> None:
    results = run_ranks(lines, ranks, cases, knobs, ranks_per_node=2)
    for (part, rank), (said, report) in zip(cases, results[0], strict=True):
        node = f" (node {rank // 2})" if ranks > 2 else ""
        assert said and all(
            f"straggler: rank {rank}{node}, {part}, +" in line for line in said
        ), (part, rank, said)
        assert (
            report["straggler_rank"] == rank
            and report[f"seconds_{part}"] > SLOW / ranks / 2
        )
    assert all(said == [] for of_rank in results[1:] for said, _ in of_rank), (
        "one rank says it"
    )


@pytest.mark.parametrize(
    "cases",
    [
        [("backward", 3), ("data", 2)],
        pytest.param([("forward", 1), ("optimizer", 0)], marks=pytest.mark.slow),
    ],
    ids=["some", "more"],
)
def test_the_slow_rank_and_its_part_are_named(cases: list[tuple[Part, int]]) -> None:
    check(cases, 4, shard_degree=2)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "knobs", [{"shard_degree": 4}, {"shard_degree": 1}], ids=["one group", "replicas"]
)
def test_ten_of_ten(part: Part, knobs: dict[str, Any]) -> None:
    check([(part, rank) for rank in (0, 1, 2, 3, 1)], 4, **knobs)

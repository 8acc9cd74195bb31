"""Models of one's own over context ranks under the Trainer: exact, or refused before a
step is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from smp_core.context_parallel import positions
from tests.core.context_parallel.own_models import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    Case,
    OwnModel,
    draw,
    loss_of,
)
from tests.harness import run_ranks
from tests.lightning.running import Run, assert_same, make_trainer, report

BATCH, STEPS = 4, 2
KNOBS = {"shard_degree": 4, "context_parallel_degree": 2}


class OwnModule(LightningModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.model = case, OwnModel(case)
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        tokens, targets = batch
        loss = loss_of(self.model(tokens, targets), targets, self.case.step)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(3)
        tokens, targets = torch.randint(
            VOCABULARY, (2, BATCH * STEPS, LENGTH), generator=generator
        )
        data: Any = TensorDataset(tokens, targets)
        if dist.is_initialized():
            return DataLoader(data, batch_size=BATCH * 2 // dist.get_world_size())
        # In the order of Lightning's own sampler.
        return DataLoader(
            data,
            batch_size=BATCH,
            sampler=DistributedSampler(data, num_replicas=1, rank=0),
        )


class Scattered(OwnModule):
    """The step calls layers itself, with positions that it counts or asks for."""

    def __init__(self, counts: bool) -> None:
        super().__init__(draw(0))
        del self.model
        torch.manual_seed(1)
        self.counts, self.words = counts, nn.Embedding(VOCABULARY, WIDTH)
        self.places, self.head = (
            nn.Embedding(LENGTH, WIDTH),
            nn.Linear(WIDTH, VOCABULARY),
        )

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        tokens, targets = batch
        places = torch.arange(tokens.shape[1]) if self.counts else positions(tokens)
        x = self.words(tokens) + self.places(places)
        q = x.unflatten(-1, (4, -1)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(
            1, 2
        ).flatten(2)
        loss = loss_of(self.head(x), targets)
        self.losses.append(loss.detach())
        return loss


SCATTERED = {"scattered": False, "scattered, counting": True}
NORMAL = [*map(str, (0, 8)), *SCATTERED]
MORE = [*map(str, (6, 11, 16, 23, 38, 73, 75))]


def module_of(name: str) -> OwnModule:
    return (
        Scattered(SCATTERED[name]) if name in SCATTERED else OwnModule(draw(int(name)))
    )


def is_right(name: str) -> bool:
    return not SCATTERED[name] if name in SCATTERED else draw(int(name)).is_right


def lives(names: list[str]) -> list[Run | str]:
    found: list[Run | str] = []
    for name in names:
        module = module_of(name)
        knobs = KNOBS if dist.is_initialized() else None
        trainer = make_trainer(knobs, precision="64-true", use_distributed_sampler=True)
        try:
            trainer.fit(module)
        except ValueError as error:
            assert trainer.global_step == 0
            found.append(str(error))
            continue
        found.append(report(trainer, module))
    return found


def check(names: list[str]) -> None:
    """float64, weights after two steps. Two rows' targets are as many on each rank, so
    that means are, too."""
    right = [name for name in names if is_right(name)]
    expected = dict(zip(right, lives(right), strict=True))
    for seen in run_ranks(lives, 4, names, ranks_per_node=2, timeout=1200):
        for name, ours in zip(names, seen, strict=True):
            if name not in expected:
                assert isinstance(ours, str) and "context_parallel_degree=1" in ours, (
                    f"{name}: {ours}"
                )
                continue
            theirs = expected[name]
            assert isinstance(ours, Run) and isinstance(theirs, Run), f"{name}: {ours}"
            try:
                assert_same(ours, theirs, 1e-11)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def test_own_models_are_exact_or_refused_before_a_step() -> None:
    check(NORMAL)


@pytest.mark.slow
def test_more_own_models_are_exact_or_refused_before_a_step() -> None:
    check(MORE)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(80, 280, 20))
def test_many_own_models_are_exact_or_refused_before_a_step(first: int) -> None:
    check([str(seed) for seed in range(first, first + 20)])

"""Models of one's own over context ranks under the Trainer: exact, or refused before a step is taken."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from smp_core.context_parallel.active import positions
from tests.core.context_parallel.own_models import LENGTH, VOCABULARY, WIDTH, Case, OwnModel, draw, loss_of
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
        tokens, targets = torch.randint(VOCABULARY, (2, BATCH * STEPS, LENGTH), generator=generator)
        data: Any = TensorDataset(tokens, targets)
        if dist.is_initialized():
            return DataLoader(data, batch_size=BATCH * 2 // dist.get_world_size())
        # In the order of Lightning's own sampler.
        return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, num_replicas=1, rank=0))


class Scattered(OwnModule):
    """The step calls layers itself, with positions that it counts or asks for."""

    def __init__(self, counts: bool) -> None:
        super().__init__(draw(0))
        del self.model
        torch.manual_seed(1)
        self.counts, self.words = counts, nn.Embedding(VOCABULARY, WIDTH)
        self.places, self.head = nn.Embedding(LENGTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        tokens, targets = batch
        places = torch.arange(tokens.shape[1]) if self.counts else positions(tokens)
        x = self.words(tokens) + self.places(places)
        q = x.unflatten(-1, (4, -1)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        loss = loss_of(self.head(x), targets)
        self.losses.append(loss.detach())
        return loss


MODULES: dict[str, Any] = {f"{seed}": functools.partial(OwnModule, draw(seed)) for seed in (0, 6, 8, 11, 23, 73, 75)}
MODULES |= {"scattered": functools.partial(Scattered, False), "scattered, counting": functools.partial(Scattered, True)}
REFUSED = ("11", "23", "73", "75", "scattered, counting")


def lives(names: list[str]) -> list[Run | str]:
    found: list[Run | str] = []
    for name in names:
        module = MODULES[name]()
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


def test_own_models_are_exact_or_refused_before_a_step() -> None:
    """float64, weights after two steps. Two rows' targets are as many on each rank, so that means are, too."""
    expected = lives([name for name in MODULES if name not in REFUSED])
    for seen in run_ranks(lives, 4, list(MODULES), ranks_per_node=2):
        trained = [run for name, run in zip(MODULES, seen, strict=True) if name not in REFUSED]
        for ours, theirs in zip(trained, expected, strict=True):
            assert isinstance(ours, Run) and isinstance(theirs, Run), ours
            assert_same(ours, theirs, 1e-11)
        for name, told in zip(MODULES, seen, strict=True):
            if name in REFUSED:
                assert isinstance(told, str) and "context_parallel_degree=1" in told, f"{name}: {told}"

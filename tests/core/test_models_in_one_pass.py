"""Several models that one backward pass comes through (a generator and its critic)
train like one process.

Replicas may take other ways through them and call them in another order. float64: 1e-12
leaves room for another order of additions; a sum that met another model's, where it did
not abort the process, is orders off.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from smp_core.config import SmpConfig
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import build_mesh, parallelize
from smp_core.topology import Topology
from tests.core.fuzz.hooks import Cell, whole
from tests.harness import run_ranks

WORLD, CELLS = 4, 3


class Branches(nn.Module):
    """Cells, of which a call takes those that the path names; cells of different models
    have different sizes."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(
            nn.Sequential(Cell(), nn.Linear(6, hidden), nn.Linear(hidden, 6))
            for _ in range(CELLS)
        )
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor, path: str) -> torch.Tensor:
        for number in path:
            x = x + torch.tanh(self.cells[int(number)](x))
        return x * self.gain


class Case:
    """What case ``number`` draws.

    Attributes:
        of_model: the mesh of each model.
        calls: by step, micro-batch and replica, which models are called, by which path.
    """

    def __init__(self, number: int) -> None:
        draw = random.Random(number)
        self.number, self.shard_degree = number, draw.choice([1, 2, 2, 2])
        self.ranks_per_node = draw.choice([1, 1, 2, 4])
        self.sizes = draw.sample([3, 5, 9], draw.choice([2, 2, 3]))
        self.own_meshes = draw.random() < 0.2
        modules = draw.choice([["Sequential"], ["Linear"], ["Cell", "Linear"], "auto"])
        self.knobs: dict[str, Any] = {
            "shard_degree": self.shard_degree,
            "units": {"modules": modules},
        }
        if draw.random() < 0.5:
            self.knobs["optimizer_shard"] = "world"
        if draw.random() < 0.3:
            self.knobs["keep_between_micro_batches"] = draw.choice(
                ["parameters", "gradients"]
            )
        self.branches = draw.choice(
            ["everything", "other ways", "other orders", "other orders"]
        )
        self.calls = [
            [self._calls(draw) for _ in range(draw.choice([1, 2]))] for _ in range(3)
        ]

    def _calls(self, draw: random.Random) -> list[list[tuple[int, str]]]:
        models = list(range(len(self.sizes)))
        if self.branches == "everything":
            return [[(model, "012") for model in models]] * WORLD
        of_replicas = []
        for _ in range(WORLD // self.shard_degree):
            order = (
                models
                if self.branches == "other ways"
                else draw.sample(models, len(models))
            )
            if self.branches == "other orders" and draw.random() < 0.5:
                order = [*order, draw.choice(models)]
            of_replicas.append(
                [
                    (model, "".join(sorted(draw.sample("012", draw.randint(1, CELLS)))))
                    for model in order
                ]
            )
        return of_replicas

    def models(self) -> list[nn.Module]:
        torch.manual_seed(self.number)
        return [Branches(size).double() for size in self.sizes]

    def loss(
        self, models: Sequence[nn.Module], step: int, micro: int, rank: int
    ) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
        x = torch.randn(3, 6, generator=generator, dtype=torch.float64)
        for model, path in self.calls[step][micro][rank // self.shard_degree]:
            x = models[model](x, path)
        return x.square().mean()

    def train(
        self,
        handles: Sequence[ParallelModel],
        models: Sequence[nn.Module],
        ranks: Sequence[int],
    ) -> list[Any]:
        optimizers = [
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            for model in models
        ]
        for handle, optimizer in zip(handles, optimizers, strict=False):
            handle.prepare_optimizer(optimizer)
        for step, micro_batches in enumerate(self.calls):
            for micro in range(len(micro_batches)):
                with contextlib.ExitStack() as held:
                    for handle in handles if micro < len(micro_batches) - 1 else []:
                        held.enter_context(handle.window.accumulate())
                    losses = [self.loss(models, step, micro, rank) for rank in ranks]
                    (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [
            {name: whole(parameter) for name, parameter in model.named_parameters()}
            for model in models
        ]

    def together(self) -> list[Any]:
        config, topology = (
            SmpConfig(**self.knobs),
            Topology.uniform(WORLD, self.ranks_per_node),
        )
        mesh, config = build_mesh(config, topology, "cpu")
        models, handles = self.models(), []
        for model in models:
            if self.own_meshes:
                mesh, config = build_mesh(SmpConfig(**self.knobs), topology, "cpu")
            handles.append(parallelize(model, config, mesh=mesh))
        return self.train(handles, models, [dist.get_rank()])


def together(numbers: Sequence[int]) -> list[list[Any]]:
    return [Case(number).together() for number in numbers]


def check(numbers: Sequence[int]) -> None:
    for found in run_ranks(together, WORLD, numbers):
        for number, models in zip(numbers, found, strict=True):
            case = Case(number)
            expected = case.train([], case.models(), range(WORLD))
            for model, (weights, theirs) in enumerate(
                zip(models, expected, strict=True)
            ):
                for name, weight in theirs.items():
                    off = (weights[name] - weight).abs().max().item()
                    assert off <= 1e-12, (number, vars(case), model, name, off)


def test_models_that_one_pass_comes_through_train_like_one_process() -> None:
    check(range(2))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(2, 202, 20))
def test_more_models_that_one_pass_comes_through_train_like_one_process(
    first: int,
) -> None:
    check(range(first, first + 20))

"""Gradients of gradients (penalties of GANs, adversarial samples) equal one process's
to 1e-12 in float64, which leaves room for another order of additions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from smp_core.config import SmpConfig
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from tests.core.fuzz.hooks import Cell, whole
from tests.core.scenarios import parallel_model
from tests.harness import run_ranks


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 6), nn.Linear(6, 1)
        self.cells = nn.ModuleList([Cell(), Cell()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.enter(x))
        for cell in self.cells:
            x = cell(x)
        return self.leave(x)


def _samples(number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64)


def gradient_penalty(critic: nn.Module, number: int, rank: int) -> torch.Tensor:
    """WGAN-GP: forwards of real and generated samples behind the one whose gradient is
    differentiated."""
    real, made = _samples(number, rank), _samples(number + 50, rank)
    between = (0.3 * real + 0.7 * made).requires_grad_(True)
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (
        critic(made).mean()
        - critic(real).mean()
        + 10 * (gradient.norm(dim=1) - 1).square().mean()
    )


def r1(critic: nn.Module, number: int, rank: int) -> torch.Tensor:
    """One forward, and its own gradient; in every second micro-batch only."""
    real = _samples(number, rank).requires_grad_(True)
    out = critic(real)
    if number % 2:
        return nn.functional.softplus(-out).mean()
    (gradient,) = torch.autograd.grad(out.sum(), real, create_graph=True)
    return nn.functional.softplus(-out).mean() + 5 * gradient.square().sum(1).mean()


def curvature(critic: nn.Module, number: int, rank: int) -> torch.Tensor:
    """Two differentiated passes, one through the other."""
    x = _samples(number, rank).requires_grad_(True)
    (first,) = torch.autograd.grad(critic(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(
        (first * _samples(number + 7, rank)).sum(), x, create_graph=True
    )
    return second.square().mean()


def adversarial(critic: nn.Module, number: int, rank: int) -> torch.Tensor:
    """A gradient of samples that is not differentiated, and a look at its norm that
    nothing follows."""
    x = _samples(number, rank).requires_grad_(True)
    loss = critic(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return loss + critic(x.detach() + 0.1 * gradient.sign()).square().mean()


LOSSES: dict[str, Callable[[nn.Module, int, int], torch.Tensor]] = {
    each.__name__: each for each in (gradient_penalty, r1, curvature, adversarial)
}
KNOBS: list[dict[str, Any]] = [
    {"shard_degree": 1},
    {"shard_degree": 2},
    {"shard_degree": 4, "reshard_after_forward": False},
    {
        "shard_degree": 2,
        "reshard_after_forward": False,
        "keep_between_micro_batches": "parameters",
    },
    {
        "shard_degree": 2,
        "reshard_after_forward": True,
        "keep_between_micro_batches": "gradients",
    },
    {"shard_degree": 4, "reshard_after_forward": "node"},
    {"shard_degree": 2, "optimizer_shard": "world"},
    {"shard_degree": 2, "activations": "full"},
]
ALL = [(name, place) for name in LOSSES for place in range(len(KNOBS))]
NORMAL = [("gradient_penalty", 1), ("r1", 3), ("curvature", 6), ("adversarial", 1)]


def _critic() -> nn.Module:
    torch.manual_seed(0)
    return Critic().double()


def _train(
    parallel: ParallelModel | None, critic: nn.Module, name: str, ranks: Sequence[int]
) -> dict[str, Any]:
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.9)
    if parallel is not None:
        parallel.prepare_optimizer(optimizer)
    for number in range(6):
        last = number % 2 == 1
        with (
            contextlib.nullcontext()
            if parallel is None or last
            else parallel.window.accumulate()
        ):
            losses = [LOSSES[name](critic, number, rank) for rank in ranks]
            (sum(losses) / len(ranks)).backward()  # type: ignore[union-attr]
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return {name: whole(p) for name, p in critic.named_parameters()}


def together(cases: list[tuple[str, int]]) -> list[dict[str, Any]]:
    found = []
    for name, place in cases:
        critic = _critic()
        parallel = parallel_model(critic, units=("Cell",), **KNOBS[place])
        found.append(_train(parallel, critic, name, [dist.get_rank()]))
    return found


@pytest.mark.parametrize(
    "cases", [NORMAL, pytest.param(ALL, marks=pytest.mark.slow)], ids=("some", "all")
)
def test_gradients_of_gradients_are_one_processs(cases: list[tuple[str, int]]) -> None:
    expected = {name: _train(None, _critic(), name, range(4)) for name, _ in cases}
    for found in run_ranks(together, 4, cases, ranks_per_node=2):
        for (name, place), weights in zip(cases, found, strict=True):
            for parameter, weight in expected[name].items():
                off = (weights[parameter] - weight).abs().max().item()
                assert off <= 1e-12, (name, KNOBS[place], parameter, off)


def refused() -> list[str]:
    found = []
    critic = _critic()
    parallel_model(critic, units=("Cell",), shard_degree=2)
    split = _critic()
    recipe = {"plan": {"cells.*.layer": "column_gather"}, "sequence_parallel": False}
    parallelize(
        split,
        SmpConfig(tensor_parallel_degree=2, tensor_parallel=recipe, units=("Cell",)),
    )
    passes: list[Callable[[], object]] = [
        lambda: critic(_samples(0, 0)).square().mean().backward(create_graph=True),
        lambda: gradient_penalty(split, 0, 0).backward(),
    ]
    for each in passes:
        try:
            each()
            found.append("")
        except (ValueError, RuntimeError) as error:
            found.append(str(error))
    return found


def test_what_cannot_be_differentiated_again_is_refused() -> None:
    for graph, split in run_ranks(refused, 2, ranks_per_node=2):
        assert "torch.autograd.grad(output.sum(), inputs, create_graph=True)" in graph
        assert "differentiate twice" in split

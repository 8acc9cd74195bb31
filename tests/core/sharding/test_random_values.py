"""Random numbers that are drawn into sharded tensors, or like them, are those of one
process at every degree."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.core.scenarios import parallel_model
from tests.core.sharding.prepared_runs import whole
from tests.harness import run_ranks

INITIALISERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal": lambda p: nn.init.normal_(p, 0.1, 2.0),
    "uniform": nn.init.uniform_,
    "truncated": lambda p: nn.init.trunc_normal_(p, std=0.2, a=-0.3, b=0.3),
    "xavier": nn.init.xavier_uniform_,
    "kaiming": nn.init.kaiming_normal_,
    "bernoulli": lambda p: p.data.bernoulli_(0.3),
    "exponential": lambda p: p.data.exponential_(2.0),
    "random": lambda p: p.data.random_(0, 100),
    "generator": lambda p: p.data.normal_(generator=torch.Generator().manual_seed(3)),
}
LIKE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "randn_like": torch.randn_like,
    "rand_like": lambda p: torch.rand_like(p, dtype=torch.float32),
    "randint_like": lambda p: torch.randint_like(p, 3, 50),
    "bernoulli": lambda p: torch.bernoulli(p.detach().sigmoid()),
    "poisson": lambda p: torch.poisson(p.detach().exp()),
    "normal": lambda p: torch.normal(p.detach(), 0.1),
}


def model() -> nn.Module:
    """Rows that no degree divides, and fewer rows than ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 3), nn.Linear(3, 6)).double()


def drawn(parameters: Iterable[nn.Parameter]) -> dict[str, list[torch.Tensor]]:
    matrices, found = [parameter for parameter in parameters if parameter.ndim > 1], {}
    torch.manual_seed(11)
    for name, function in LIKE.items():
        found[f"{name} of"] = [whole(function(parameter)) for parameter in matrices]
    for name, initialise in INITIALISERS.items():
        for parameter in matrices:
            initialise(parameter)
        found[name] = [whole(parameter) for parameter in matrices]
    return found


def drawn_on_ranks(
    knobs: dict[str, Any], own_seeds: bool
) -> tuple[dict[str, list[torch.Tensor]], list[float]]:
    parallel = parallel_model(model(), **knobs)
    if not own_seeds:
        return drawn(parallel.module.parameters()), []
    torch.manual_seed(dist.get_rank())
    shown = [
        whole(torch.randn_like(parameter)) for parameter in parallel.module.parameters()
    ]
    nn.init.normal_(parallel.module[0].weight)
    return {"own seeds": [*shown, whole(parallel.module[0].weight)]}, torch.rand(
        2
    ).tolist()


@pytest.mark.parametrize(
    "knobs",
    [{"shard_degree": 2}, pytest.param({"shard_degree": 4}, marks=pytest.mark.slow)],
    ids=str,
)
def test_what_is_drawn_is_what_one_process_draws(knobs: dict[str, Any]) -> None:
    expected = drawn(model().parameters())
    for found, _ in run_ranks(drawn_on_ranks, 4, knobs, False, ranks_per_node=2):
        for name, values in expected.items():
            for ours, theirs in zip(found[name], values, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-15, msg=name)


def test_ranks_with_seeds_of_their_own_agree_and_keep_them() -> None:
    """Replicas hold the same weights; what a rank draws for itself afterwards is its
    own."""
    (first, mine), *others = run_ranks(
        drawn_on_ranks, 4, {"shard_degree": 2}, True, ranks_per_node=2
    )
    for found, theirs in others:
        assert all(
            torch.equal(a, b)
            for a, b in zip(first["own seeds"], found["own seeds"], strict=True)
        )
        assert theirs != mine

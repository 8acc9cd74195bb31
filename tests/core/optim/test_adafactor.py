"""Adafactor on shards has the numbers of torch.optim.Adafactor in one process, and
sends what its page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import (
    load_checkpoint,
    load_named_optimizer_state,
    named_optimizer_state,
    save_checkpoint,
)
from smp_core.config import SmpConfig
from smp_core.engine import ParallelModel
from smp_core.entry import parallelize
from smp_core.optim import Adafactor
from smp_core.topology import Topology
from tests.core.optim import stepped_nets
from tests.core.optim.stepped_nets import Net, net_of, step
from tests.core.sharding.prepared_runs import whole
from tests.harness import run_ranks

WORLD = 4
# Sums in another order, in float64, through four steps.
EXACT = 1e-12
OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.05},
    {
        "lr": torch.tensor(0.05, dtype=torch.float64),
        "weight_decay": 0.1,
        "beta2_decay": -0.5,
        "eps": (1e-8, 1e-2),
        "d": 1.5,
    },
    {"lr": 0.1, "maximize": True, "d": 3.0},
]


class Block(nn.Module):
    """Uneven rows, fewer rows than ranks, one row, one column, a kernel, a stack,
    vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.few, self.one = (
            nn.Linear(6, 10),
            nn.Linear(10, 3),
            nn.Linear(3, 1),
        )
        self.column, self.kernel = nn.Linear(1, 9), nn.Conv2d(2, 5, 3)
        self.stack = nn.Parameter(torch.randn(5, 4, 6))


def net(seed: int = 0, dtype: torch.dtype = torch.float64) -> Net:
    return net_of(Block, seed, dtype)


def parallel_net(
    seed: int = 0, dtype: torch.dtype = torch.float64, **knobs: Any
) -> ParallelModel:
    return stepped_nets.parallel(net(seed, dtype), **knobs)


def alone(steps: int, dtype: torch.dtype = torch.float64, **options: Any) -> Net:
    model = net(dtype=dtype)
    optimizer = torch.optim.Adafactor(model.parameters(), **options)
    for number in range(steps):
        step(model, optimizer, number)
    return model


def furthest(model: nn.Module, expected: nn.Module) -> float:
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max((whole(one) - other).abs().max().item() for one, other in pairs)


def at_degrees(options: dict[str, Any]) -> list[float]:
    found = []
    for degree in (1, 2, 4):
        parallel = parallel_net(shard_degree=degree)
        optimizer = Adafactor(parallel.module.parameters(), **options)
        parallel.prepare_optimizer(optimizer)
        for number in range(4):
            step(parallel.module, optimizer, number)
        found.append(furthest(parallel.module, alone(4, **options)))
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_every_degree_has_the_numbers_of_torchs_in_one_process(
    options: dict[str, Any],
) -> None:
    for seen in run_ranks(at_degrees, WORLD, options, ranks_per_node=2):
        assert len(seen) == 3 and max(seen) <= EXACT


class Parts(nn.Module):
    """Layers of which a call leaves some out, and one that none calls."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.some = (
            nn.Linear(6, 10, dtype=torch.float64),
            nn.Linear(6, 10, dtype=torch.float64),
        )
        self.never = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor, calls_some: bool) -> torch.Tensor:
        y = self.always(x)
        return (y + self.some(x) if calls_some else y).square().mean()


def in_parts(degree: int | None) -> dict[str, torch.Tensor]:
    """Train four steps; in each of the first three another rank alone calls a layer,
    and in the last one no rank."""
    torch.manual_seed(0)
    model: Any = Parts()
    optimizer: torch.optim.Optimizer = torch.optim.Adafactor(
        model.parameters(), lr=0.05, weight_decay=0.1
    )
    ranks = list(range(WORLD))
    if degree is not None:
        parallel = parallelize(
            model, SmpConfig(shard_degree=degree), topology=Topology.discover()
        )
        optimizer, ranks = (
            Adafactor(model.parameters(), lr=0.05, weight_decay=0.1),
            [dist.get_rank()],
        )
        parallel.prepare_optimizer(optimizer)
    for number in range(4):
        optimizer.zero_grad()
        for rank in ranks:
            generator = torch.Generator().manual_seed(10 * number + rank)
            x = torch.randn(3, 6, generator=generator, dtype=torch.float64)
            (model(x, number < 3 and rank == number) / len(ranks)).backward()
        optimizer.step()
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "degree",
    [
        pytest.param(1, marks=pytest.mark.slow),
        2,
        pytest.param(4, marks=pytest.mark.slow),
    ],
)
def test_gradients_that_one_rank_has_or_none_are_stepped_as_in_one_process(
    degree: int,
) -> None:
    expected = in_parts(None)
    for seen in run_ranks(in_parts, WORLD, degree, ranks_per_node=2):
        for name, value in expected.items():
            assert (seen[name] - value).abs().max() <= EXACT, name


def half_precision() -> float:
    parallel = parallel_net(dtype=torch.bfloat16, shard_degree=2)
    optimizer = Adafactor(parallel.module.parameters(), lr=0.05, eps=(1e-8, 1e-3))
    parallel.prepare_optimizer(optimizer)
    for number in range(4):
        step(parallel.module, optimizer, number)
    assert all(
        whole(each["row_var"]).dtype == torch.float32
        for each in optimizer.state.values()
        if "row_var" in each
    )
    again = Adafactor(parallel.module.parameters(), lr=0.05)
    again.load_state_dict(optimizer.state_dict())
    for parameter, entry in optimizer.state.items():
        assert all(
            torch.equal(whole(again.state[parameter][name]), whole(value))
            for name, value in entry.items()
        )
    return furthest(
        parallel.module, alone(4, torch.bfloat16, lr=0.05, eps=(1e-8, 1e-3))
    )


def test_factors_of_half_precision_parameters_are_float32() -> None:
    """Also loaded ones. torch's are not: weights are as near as bfloat16's last digits,
    of weights up to 4."""
    assert max(run_ranks(half_precision, 2)) <= 4 * 2**-7


def sent(degree: int) -> tuple[float, float]:
    """Bytes of a step on this rank, and those of the formula in docs/optimizers.md."""
    parallel = parallel_net(shard_degree=degree)
    optimizer = Adafactor(parallel.module.parameters(), lr=0.05)
    parallel.prepare_optimizer(optimizer)
    for parameter in parallel.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    parallel.meter.close_step()
    counted = parallel.meter.per_step().items()
    seen = sum(
        value
        for name, value in counted
        if name.startswith("adafactor") and "bytes" in name
    )
    sharded = [
        each for each in parallel.module.parameters() if isinstance(each, DTensor)
    ]
    numbers = 2 * len(sharded) + sum(
        1 + each.shape[1] for each in sharded if each.ndim == 2
    )
    return seen, 2 * (degree - 1) / degree * numbers * 8


def test_bytes_are_those_of_two_small_sums() -> None:
    for degree in (2, 4):
        for seen, expected in run_ranks(sent, WORLD, degree, ranks_per_node=2):
            assert seen == pytest.approx(expected, rel=1e-12) and expected


def through_checkpoints(folder: Path) -> list[float]:
    found = []
    expected = alone(5, lr=0.05)
    for before, after in ((4, 2), (1, 4)):
        path = folder / f"{before}-{after}"
        first = parallel_net(shard_degree=before)
        optimizer = Adafactor(first.module.parameters(), lr=0.05)
        first.prepare_optimizer(optimizer)
        for number in range(3):
            step(first.module, optimizer, number)
        states = named_optimizer_state(first.module, optimizer)
        save_checkpoint(path, {"model": first.model_state(), "optimizer": states})
        second = parallel_net(1, shard_degree=after)
        resumed = Adafactor(second.module.parameters(), lr=1.0)
        second.prepare_optimizer(resumed)
        load_checkpoint(path, {"model": second.model_state()})
        load_named_optimizer_state(path, ("optimizer",), second.module, resumed)
        for number in range(3, 5):
            step(second.module, resumed, number)
        found.append(furthest(second.module, expected))
    return found


def test_a_checkpoint_goes_on_at_another_degree_as_if_nothing_had_been(
    tmp_path: Path,
) -> None:
    for seen in run_ranks(through_checkpoints, WORLD, tmp_path, ranks_per_node=2):
        assert len(seen) == 2 and max(seen) <= EXACT


def from_torchs() -> float:
    """A state of torch's, whole, goes on here."""
    model = net()
    theirs = torch.optim.Adafactor(model.parameters(), lr=0.05)
    for number in range(2):
        step(model, theirs, number)
    parallel = parallelize(
        model, SmpConfig(units=["Block"], shard_degree=2), topology=Topology.discover()
    )
    ours = Adafactor(parallel.module.parameters(), lr=0.05)
    parallel.prepare_optimizer(ours)
    ours.load_state_dict(theirs.state_dict())
    for number in range(2, 4):
        step(parallel.module, ours, number)
    return furthest(parallel.module, alone(4, lr=0.05))


def test_a_state_of_torchs_adafactor_goes_on() -> None:
    assert max(run_ranks(from_torchs, 2)) <= EXACT


def refused(knobs: dict[str, Any]) -> str:
    parallel = parallel_net(shard_degree=2, **knobs)
    with pytest.raises(ValueError) as caught:
        parallel.prepare_optimizer(Adafactor(parallel.module.parameters()))
    return str(caught.value)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"optimizer_shard": "world"}, "looks across a tensor"),
        ({"state_offload": "optimizer"}, "cannot exchange sums"),
    ],
)
def test_what_it_does_not_go_with_is_refused(knobs: dict[str, Any], words: str) -> None:
    assert all(
        words in seen for seen in run_ranks(refused, WORLD, knobs, ranks_per_node=2)
    )


@pytest.mark.parametrize(
    "wrong",
    [{"lr": -1.0}, {"beta2_decay": 0.1}, {"d": 0.5}, {"eps": (-1.0, 1e-3)}],
    ids=str,
)
def test_options_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Adafactor([nn.Parameter(torch.zeros(2, 2))], **wrong)

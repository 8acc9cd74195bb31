"""AdamW with moments of 8 bits has one process's numbers, bit by bit for equal gradients, at every degree and through
every checkpoint, and stays as near to float32 moments as its docs say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import (
    load_checkpoint,
    load_named_optimizer_state,
    named_optimizer_state,
    save_checkpoint,
    shard_like,
)
from smp_core.config import SmpConfig
from smp_core.engine import ParallelModel
from smp_core.entry import parallelize
from smp_core.optim import AdamW8bit
from smp_core.topology import Topology
from tests.core.sharding.prepared_runs import whole
from tests.harness import run_ranks

WORLD = 4
DEGREES = (1, 2, 4)


class Block(nn.Module):
    """Uneven rows of uneven blocks, fewer rows than ranks, a kernel, a stack, short rows, vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.few = nn.Linear(300, 30), nn.Linear(520, 3)
        self.one, self.kernel = nn.Linear(256, 1), nn.Conv2d(20, 6, 3)
        self.stack, self.short = nn.Parameter(torch.randn(5, 7, 270)), nn.Parameter(torch.randn(40, 5))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.gain = nn.Parameter(torch.tensor(1.5))


def net(seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def adamw8bit(model: nn.Module, **options: Any) -> AdamW8bit:
    return AdamW8bit(model.parameters(), **{"lr": 1e-2, "min_8bit_size": 0, **options})


def parallel_net(dtype: torch.dtype = torch.float32, seed: int = 0, **knobs: Any) -> ParallelModel:
    return parallelize(net(seed, dtype), SmpConfig(units=["Block"], **knobs), topology=Topology.discover())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Step with gradients that every process draws alike; some parameters have none in some steps."""
    generator = torch.Generator().manual_seed(number)
    optimizer.zero_grad()
    for place, parameter in enumerate(model.parameters()):
        gradient = torch.randn(parameter.shape, generator=generator) * 10.0 ** -(place % 4)
        if (place + number) % 5:
            parameter.grad = shard_like(parameter, gradient.to(parameter.dtype))
    optimizer.step()


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and states, whole."""
    found = {name: whole(parameter) for name, parameter in model.named_parameters()}
    for name, entry in named_optimizer_state(model, optimizer)["state"].items():
        found.update({f"{name}.{key}": whole(value) for key, value in entry.items()})
    return found


def unequal(seen: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert seen.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(seen[name].cpu(), value)]


def alone(steps: int, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, torch.Tensor]:
    model = net(dtype=dtype)
    optimizer = adamw8bit(model, **options)
    for number in range(steps):
        step(model, optimizer, number)
    return states(model, optimizer)


def at_degrees(knobs: dict[str, Any], dtype: torch.dtype) -> list[str]:
    wrong = []
    expected = alone(4, dtype)
    for degree in DEGREES:
        parallel = parallel_net(dtype, shard_degree=degree, **knobs)
        optimizer = adamw8bit(parallel.module)
        parallel.prepare_optimizer(optimizer)
        for number in range(4):
            step(parallel.module, optimizer, number)
        wrong += [f"{degree}: {name}" for name in unequal(states(parallel.module, optimizer), expected)]
    return wrong


def test_every_degree_has_one_processs_numbers_bit_by_bit() -> None:
    assert run_ranks(at_degrees, WORLD, {}, torch.float32, ranks_per_node=2) == [[]] * WORLD


def through_checkpoints(folder: Path, pairs: list[tuple[int, int]]) -> list[str]:
    wrong = []
    expected = alone(5, lr=torch.tensor(1e-2))
    for before, after in pairs:
        path = folder / f"{before}-{after}"
        first = parallel_net(shard_degree=before)
        optimizer = adamw8bit(first.module, lr=torch.tensor(1e-2))
        first.prepare_optimizer(optimizer)
        for number in range(3):
            step(first.module, optimizer, number)
        save_checkpoint(
            path, {"model": first.model_state(), "optimizer": named_optimizer_state(first.module, optimizer)}
        )
        second = parallel_net(seed=1, shard_degree=after)
        resumed = adamw8bit(second.module, lr=torch.tensor(1.0))
        second.prepare_optimizer(resumed)
        weights = second.model_state()
        load_checkpoint(path, {"model": weights})
        second.take_model_state(weights)
        load_named_optimizer_state(path, ("optimizer",), second.module, resumed)
        scales = [entry["exp_avg_scale"] for entry in resumed.state.values() if "exp_avg_scale" in entry]
        if any(isinstance(each, DTensor) != (after > 1) for each in scales) or not scales:
            wrong.append(f"{before} -> {after}: scales were read whole")
        if not isinstance(resumed.param_groups[0]["lr"], torch.Tensor):
            wrong.append(f"{before} -> {after}: the rate is no tensor any more")
        for number in range(3, 5):
            step(second.module, resumed, number)
        wrong += [f"{before} -> {after}: {name}" for name in unequal(states(second.module, resumed), expected)]
    return wrong


def test_a_checkpoint_goes_on_at_another_degree_as_if_nothing_had_been(tmp_path: Path) -> None:
    pairs = [(4, 2), (1, 4), (2, 1)]
    assert run_ranks(through_checkpoints, WORLD, tmp_path, pairs, ranks_per_node=2) == [[]] * WORLD


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("knobs", [{}, {"state_offload": "optimizer"}, {"state_offload": "all"}], ids=str)
def test_every_degree_dtype_and_place_of_states_has_one_processs_numbers(
    knobs: dict[str, Any], dtype: torch.dtype
) -> None:
    assert run_ranks(at_degrees, WORLD, knobs, dtype, ranks_per_node=2) == [[]] * WORLD

"""A small net and its optimizers, sharded and in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.engine.parallel_model import ParallelModel
from smp_core.sharding.optimizer.kinds import register_elementwise
from tests.core.scenarios import parallel_model

WORLD = 2
STEPS = 6
LAYOUTS: list[dict[str, Any]] = [
    {"shard_degree": 2},
    {"shard_degree": 1, "optimizer_shard": "world"},
    {"shard_degree": 2, "state_offload": "optimizer"},
    {"shard_degree": 1, "optimizer_shard": "world", "state_offload": "optimizer"},
    {"shard_degree": 2, "state_offload": "all"},
]


class Net(nn.Module):
    """Rows that do not divide, fewer rows than ranks, a matrix tied across units, a 0-d
    parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.second[0].weight = self.first[0].weight
        self.head = nn.Linear(5, 1)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.head(self.second(self.first(x))) * self.gain).square().mean()


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 5, generator=generator, dtype=torch.float64)


Edit = Callable[[Any, torch.optim.Optimizer, int], None]


def nothing(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    pass


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Iterable[int],
    edit: Edit = nothing,
    begin: int = 0,
) -> None:
    """``ranks``: whose batches this process sees."""
    ranks = list(ranks)
    for step in range(begin, STEPS):
        edit(model, optimizer, step)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for rank in ranks:
            (model(batch(step, rank)) / len(ranks)).backward()
        optimizer.step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (
        (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        .detach()
        .clone()
    )


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def difference(
    seen: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> float:
    return max(
        (seen[name] - value).abs().max().item() for name, value in expected.items()
    )


def sharded(knobs: dict[str, Any], seed: int = 0) -> ParallelModel:
    return parallel_model(net(seed), units=["Sequential"], **knobs)


def own_batch(parallel: ParallelModel) -> list[int]:
    return [parallel.mesh.data_rank]


@register_elementwise
class Averages(torch.optim.SGD):
    """Trains at one point and is evaluated at another, as schedule-free optimizers are;
    steps only while training."""

    training = False

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def _swap(self, training: bool) -> None:
        if training != self.training:
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    kept = state.get("kept", torch.zeros_like(parameter))
                    state["kept"] = parameter.detach().clone()
                    parameter.copy_(kept + parameter if training else parameter - kept)
        self.training = training

    def step(self, closure: Any = None) -> Any:
        if not self.training:
            raise RuntimeError("call train() first")
        return super().step(closure)


def unequal(
    made: Callable[[nn.Module], torch.optim.Optimizer],
    edit: Edit,
    layouts: Sequence[dict[str, Any]] = LAYOUTS,
) -> list[str]:
    """Train with edits between steps, in one process and at layouts; return the layouts
    whose weights differ by more than 1e-12, and by how much."""
    model = net()
    train(model, made(model), range(WORLD), edit)
    expected, wrong = weights(model), []
    for knobs in layouts:
        parallel = sharded(knobs)
        optimizer = made(parallel.module)
        parallel.prepare_optimizer(optimizer)
        train(parallel.module, optimizer, own_batch(parallel), edit)
        apart = difference(weights(parallel.module), expected)
        if not apart <= 1e-12:
            wrong.append(f"{knobs}: {apart}")
    return wrong

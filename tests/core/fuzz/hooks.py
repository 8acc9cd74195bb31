"""Random hooks on random parameters, registered before or after sharding, in windows of
random length.

A hook is written once. :func:`alone` runs it in one process, where each micro-batch's
loss is the mean over the samples of all ranks; :func:`together` on ranks that each have
their own. Everything is float64.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.engine.parallel_model import ParallelModel
from tests.core.scenarios import parallel_model

STEPS = 3
NAMES = (
    "enter.weight",
    "enter.bias",
    "cells.0.layer.weight",
    "cells.1.layer.bias",
    "gain",
    "tied.weight",
    "leave.bias",
)
GRADIENT_HOOKS = ("scale", "mask", "zero rows", "clamp", "add", "normalize", "record")
LATE_HOOKS = ("look", "clip", "mask late", "step")


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


class Net(nn.Module):
    """Cells that are units, one of which some micro-batches leave out; a 0-d parameter,
    and a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.cells = nn.ModuleList([Cell(), Cell()])
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.tied = nn.Linear(6, 6, bias=False)
        self.leave = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, all_cells: bool = True) -> torch.Tensor:
        x = self.tied(torch.sin(self.tied(self.enter(x))))
        for cell in self.cells[: 2 if all_cells else 1]:
            x = cell(x)
        return self.leave(x) * self.gain


@dataclass(frozen=True)
class Hooks:
    """What is drawn for one run.

    Attributes:
        hooks: (parameter, kind, whether it is registered before sharding, the step
            behind which it is removed).
        micro_batches: of each step.
        leaves_out: micro-batches, counted through all steps, that leave a cell out;
            only every second rank's with replicas of one rank.
        penalty: whether a term of the loss is made of the parameters.
    """

    seed: int
    world: int
    knobs: dict[str, Any]
    hooks: tuple[tuple[str, str, bool, int], ...]
    micro_batches: tuple[int, ...]
    leaves_out: frozenset[int]
    penalty: bool
    at_once: bool = field(default=False)

    def left_out(self, number: int, rank: int) -> bool:
        by_rank = self.knobs["shard_degree"] == 1 and rank % 2 == 0
        return number in self.leaves_out and not by_rank


def draw(seed: int) -> Hooks:
    """Draw a run."""
    rng = random.Random(seed)
    world = rng.choice((2, 2, 4))
    degree = rng.choice([d for d in (1, 2, 2, 4) if d <= world])
    knobs: dict[str, Any] = {"shard_degree": degree}
    if rng.random() < 0.3:
        knobs["reshard_after_forward"] = False
    if rng.random() < 0.4:
        knobs["keep_between_micro_batches"] = rng.choice(("parameters", "gradients"))
        knobs["reshard_after_forward"] = (
            knobs["keep_between_micro_batches"] == "gradients"
        )
    over_world = rng.random() < 0.3
    if over_world:
        knobs["optimizer_shard"] = "world"
    kinds = GRADIENT_HOOKS if over_world else GRADIENT_HOOKS * 2 + LATE_HOOKS
    hooks = []
    for _ in range(rng.randint(1, 4)):
        removed = rng.choice((0, STEPS, STEPS))
        hooks.append(
            (rng.choice(NAMES), rng.choice(kinds), rng.random() < 0.5, removed)
        )
    micro_batches = tuple(rng.randint(1, 3) for _ in range(STEPS))
    leaves_out = frozenset(
        number for number in range(sum(micro_batches)) if rng.random() < 0.25
    )
    penalty, at_once = rng.random() < 0.25, rng.random() < 0.2
    return Hooks(
        seed, world, knobs, tuple(hooks), micro_batches, leaves_out, penalty, at_once
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (
        (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        .detach()
        .clone()
    )


def register(parameter: nn.Parameter, kind: str, seen: list[torch.Tensor]) -> Any:
    """Register a hook; what it notes goes to ``seen``."""
    mask = (
        (torch.arange(float(parameter.numel())) % 3 != 0).double().view(parameter.shape)
    )

    def zero_rows(gradient: torch.Tensor) -> None:
        gradient[..., :1] = 0

    def step(stepped: nn.Parameter) -> None:
        with torch.no_grad():
            stepped.add_(stepped.grad, alpha=-0.05)
        stepped.grad = None

    of_gradients: dict[str, Callable[[torch.Tensor], Any]] = {
        "scale": lambda gradient: gradient * 0.5,
        "mask": lambda gradient: gradient * mask,
        "zero rows": lambda gradient: (
            gradient * 0 if gradient.ndim == 0 else zero_rows(gradient)
        ),
        "clamp": lambda gradient: gradient.clamp(-0.01, 0.01),
        "add": lambda gradient: gradient + 0.01,
        "normalize": lambda gradient: gradient / (0.1 + gradient.norm()),
        "record": lambda gradient: seen.append(whole(gradient)),
    }
    late: dict[str, Callable[[Any], None]] = {
        "look": lambda p: seen.append(whole(p.grad)),
        "clip": lambda p: _done(p.grad.clamp_(-0.02, 0.02)),
        "mask late": lambda p: _done(p.grad.mul_(mask)),
        "step": step,
    }
    if kind in late:
        return parameter.register_post_accumulate_grad_hook(late[kind])
    return parameter.register_hook(of_gradients[kind])


def _train(
    run: Hooks,
    parallel: ParallelModel | None,
    model: nn.Module,
    ranks: range,
    handles: Any,
) -> list[Any]:
    """Train; return what hooks and losses showed, by hook and for the losses, and the
    weights."""
    by_hook: list[list[torch.Tensor]] = [[] for _ in run.hooks]

    def registers(before: bool) -> None:
        for place, (name, kind, is_before, _) in enumerate(run.hooks):
            if is_before is before:
                handles[place] = register(
                    model.get_parameter(name), kind, by_hook[place]
                )

    registers(True)
    if parallel is None and len(ranks) == 1:
        parallel = parallel_model(model, units=("Cell",), **run.knobs)
    registers(False)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01
    )
    if parallel is not None:
        parallel.prepare_optimizer(optimizer)
    number, losses = 0, []
    for step, micro_batches in enumerate(run.micro_batches):
        for micro in range(micro_batches):
            last = micro == micro_batches - 1 and not run.at_once
            held = (
                contextlib.nullcontext()
                if parallel is None or last
                else parallel.window.accumulate()
            )
            with held:
                loss: Any = sum(
                    model(_samples(number, rank), not run.left_out(number, rank))
                    .square()
                    .mean()
                    for rank in ranks
                ) / len(ranks)
                if run.penalty:
                    terms = [p.square().sum() for p in model.parameters()]
                    loss = loss + 0.1 * sum(
                        t.full_tensor() if isinstance(t, DTensor) else t for t in terms
                    )
                loss.backward()
            losses.append(loss.detach().clone())
            number += 1
        optimizer.step()
        optimizer.zero_grad()
        for place, (*_, removed) in enumerate(run.hooks):
            if removed == step:
                handles[place].remove()
    return [
        *by_hook,
        torch.stack(losses),
        {name: whole(p) for name, p in model.named_parameters()},
    ]


def _done(_: torch.Tensor) -> None:
    """What a hook behind the accumulation has to return."""


def _samples(number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(3, 6, generator=generator, dtype=torch.float64)


def alone(run: Hooks) -> list[Any]:
    torch.manual_seed(run.seed)
    return _train(run, None, Net().double(), range(run.world), {})


def together(runs: list[Hooks]) -> list[Any]:
    """On the ranks; of a refusal its words."""
    found: list[Any] = []
    for run in runs:
        torch.manual_seed(run.seed)
        rank = dist.get_rank()
        try:
            found.append(_train(run, None, Net().double(), range(rank, rank + 1), {}))
        except ValueError as error:
            found.append(str(error))
    return found


def problems(run: Hooks, ranks: list[list[Any]], expected: list[Any]) -> list[str]:
    """Compare what every rank found with one process."""
    found = []
    losses = torch.stack([each[-2] for each in ranks]).mean(0)
    if not torch.allclose(losses, expected[-2], rtol=0, atol=1e-11):
        found.append(f"losses {losses.tolist()} instead of {expected[-2].tolist()}")
    for rank, seen in enumerate(ranks):
        for name, weight in expected[-1].items():
            off = (seen[-1][name] - weight).abs().max().item()
            if not off <= 1e-11:
                found.append(f"rank {rank}: {name} is {off:.3g} off")
        for hook, own, theirs in zip(run.hooks, seen, expected, strict=False):
            if len(own) != len(theirs):
                found.append(
                    f"rank {rank}: {hook} saw {len(own)} instead of {len(theirs)}"
                )
            elif any(
                not torch.allclose(a, b, rtol=0, atol=1e-11)
                for a, b in zip(own, theirs, strict=True)
            ):
                found.append(f"rank {rank}: {hook} saw other gradients")
    return found

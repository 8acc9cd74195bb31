"""Programs drawn from a seed that save a training in its middle, at one layout, and go
on with it at another: models that keep states in unusual places, optimizers, schedules,
objects of the user's own. The second half is that of one process that never stopped."""

from __future__ import annotations

import copy
import os
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.accelerate.running import fresh_accelerator
from tests.core.equivalence import full_weights

STEPS, SAMPLES, WIDTH = 4, 8, 7


class Noted(nn.Module):
    """Its output depends on what only its extra state has."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.seen = kind, 0, torch.zeros(3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.seen = self.seen + 0.5
        return x * (1 + 0.01 * self.calls) + self.seen.sum() * 0.01

    def get_extra_state(self) -> Any:
        if self.kind == "tensor":
            return self.seen + 10 * self.calls
        return {"calls": self.calls, "seen": self.seen, "told": [("a", 1), None]}

    def set_extra_state(self, state: Any) -> None:
        if self.kind == "tensor":
            self.calls = int(state[0]) // 10
            self.seen = state - 10 * self.calls
        else:
            self.calls, self.seen = state["calls"], state["seen"]


class Copies(nn.Linear):
    """Its state dict has copies, under another name, in another form."""

    def __init__(self, kind: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("turns", torch.zeros((), dtype=torch.int64))
        self.register_buffer("size", torch.ones(WIDTH))
        self.kind = kind
        self.register_state_dict_post_hook(_leaves)
        self.register_load_state_dict_pre_hook(_takes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.turns += 1
            self.size.mul_(1.1)
        return super().forward(x) * (1 + 0.01 * self.turns) * self.size


def _leaves(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if module.kind == "copied":
        state[prefix + "size"] = state[prefix + "size"].clone()
        state[prefix + "turns"] = state[prefix + "turns"].clone()
    else:
        state[prefix + "old size"] = state.pop(prefix + "size")
        state[prefix + "turns"] = state[prefix + "turns"] + 100


def _takes(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if module.kind == "renamed" and prefix + "old size" in state:
        state[prefix + "size"] = state.pop(prefix + "old size")
        state[prefix + "turns"] = state[prefix + "turns"] - 100


class Caches(nn.Module):
    """Computes with what it makes of its weights whenever they are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.twice = 2.0
        self.register_load_state_dict_post_hook(_renewed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.scale.add_(0.1)
            self.twice = 2.0 * float(self.scale)
        return x * self.twice


def _renewed(module: Any, keys: Any) -> None:
    module.twice = 2.0 * float(module.scale)


class Counts(nn.Module):
    """Buffers of several kinds, one put in anew at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("table", torch.linspace(0, 1, WIDTH), persistent=False)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.flags[int(self.count) % 3] = True
            self.mean = self.mean * 0.5 + self.count
        return x + 0.01 * self.mean + self.flags.sum() * 0.1 + self.table


class Odd(nn.Module):
    """Parameters of unusual shapes and memory, in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.unused = nn.Parameter(torch.randn(3))
        self.listed = nn.ParameterList([torch.randn(WIDTH), torch.randn(2, WIDTH)])
        self.named = nn.ParameterDict(
            {"a/b": torch.randn(WIDTH), "имя": torch.randn(1)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.turned * self.scalar + self.empty.sum()
        return (
            x
            + self.listed[0]
            + self.listed[1].sum(0)
            + self.named["a/b"] * self.named["имя"]
        )


class Shared(nn.Module):
    """One layer under two names, and a weight under two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.again = self.first
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.again(self.first(x).tanh()))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fixed, self.free = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fixed.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.free(self.fixed(x))


PARTS: dict[str, Callable[[], nn.Module]] = {
    "extra state": lambda: Noted("dict"),
    "extra tensor": lambda: Noted("tensor"),
    "copied": lambda: Copies("copied"),
    "renamed": lambda: Copies("renamed"),
    "cached": Caches,
    "counts": Counts,
    "odd": Odd,
    "shared": Shared,
    "frozen": Frozen,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(
        nn.Linear(WIDTH, WIDTH)
    ),
}


class Model(nn.Module):
    def __init__(self, parts: tuple[str, ...]) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleDict({name: PARTS[name]() for name in parts})
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for part in self.parts.values():
            x = x + part(x).sin()
        return self.leave(x)


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **{"lr": 1e-2, "eps": 1e-3, **options})


def _by_shape(model: nn.Module) -> list[dict[str, Any]]:
    flat = [p for p in model.parameters() if p.ndim <= 1]
    wide = [p for p in model.parameters() if p.ndim > 1]
    return [
        {"params": wide[::-1], "weight_decay": 0.1, "tag": ("wide", 1)},
        {"params": flat, "lr": 0.02, "more": {"limits": [1, None]}},
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "AdamW": lambda model: [adamw(model.parameters())],
    "groups": lambda model: [adamw(_by_shape(model), amsgrad=True)],
    "tensor lr": lambda model: [
        adamw(model.parameters(), lr=torch.tensor(0.01).double())
    ],
    "momentum": lambda model: [
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    ],
    "plain": lambda model: [torch.optim.SGD(model.parameters(), lr=0.05)],
    "Adagrad": lambda model: [
        torch.optim.Adagrad(model.parameters(), lr=0.02, eps=1e-3)
    ],
    "centered": lambda model: [
        torch.optim.RMSprop(model.parameters(), lr=0.01, eps=1e-3, centered=True)
    ],
    "trainable": lambda model: [
        adamw([p for p in model.parameters() if p.requires_grad])
    ],
    "two": lambda model: [
        adamw([*model.enter.parameters(), *model.parts.parameters()]),  # type: ignore[union-attr]
        torch.optim.SGD(model.leave.parameters(), lr=0.05, momentum=0.5),  # type: ignore[union-attr]
    ],
}

_SCHEDULES = torch.optim.lr_scheduler
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "none": lambda optimizer: None,
    "lambda": lambda optimizer: _SCHEDULES.LambdaLR(optimizer, lambda step: 0.9**step),
    "cosine": lambda optimizer: _SCHEDULES.CosineAnnealingWarmRestarts(optimizer, 3),
    "sequence": lambda optimizer: _SCHEDULES.SequentialLR(
        optimizer,
        [
            _SCHEDULES.ConstantLR(optimizer, 0.5, 2),
            _SCHEDULES.ExponentialLR(optimizer, 0.8),
        ],
        [2],
    ),
}


class Kept:
    """An object of the user's own, whose rate the loss is scaled by."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = {
            "rate": 1.0,
            "sum": torch.zeros(3),
            "nested": {"a": [(1, 2.5), None, {3: torch.arange(4)}], (1, "x"): {"y"}},
        }

    def step(self) -> None:
        self.state["rate"] *= 0.9
        self.state["sum"] += 1
        self.state["nested"]["a"].append(torch.ones(len(self.state["nested"]["a"])))

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = copy.deepcopy(state)


@dataclass(frozen=True)
class Layout:
    """The ranks and knobs of one half of a program."""

    world: int = 1
    knobs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Program:
    parts: tuple[str, ...]
    optimizer: str
    schedule: str
    saved: Layout
    loaded: Layout


def _layout(generator: random.Random, world: int) -> Layout:
    knobs: dict[str, Any] = {}
    if world > 1:
        degrees = [degree for degree in (1, 2, 4) if degree <= world]
        knobs["shard_degree"] = generator.choice(degrees)
        if generator.random() < 0.3:
            knobs["optimizer_shard"] = "world"
        elif generator.random() < 0.2:
            knobs["state_offload"] = generator.choice(("optimizer", "all"))
    if generator.random() < 0.3:
        knobs["checkpoint"] = "async"
    return Layout(world, tuple(knobs.items()))


def draw(seed: int, saved: int, loaded: int) -> Program:
    """Draw a program that is saved on some ranks and goes on on others."""
    generator = random.Random(seed)
    count = generator.choice((1, 2, 3))
    return Program(
        tuple(generator.sample(sorted(PARTS), count)),
        generator.choice(sorted(OPTIMIZERS)),
        generator.choice(sorted(SCHEDULES)),
        _layout(generator, saved),
        _layout(generator, loaded),
    )


def _batches() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(STEPS, SAMPLES, WIDTH, generator=generator, dtype=torch.float64)


@dataclass
class Seen:
    losses: list[float]
    weights: dict[str, Any]
    kept: dict[Any, Any]


def _train(
    accelerator: Any,
    model: Any,
    optimizers: Any,
    schedules: Any,
    kept: Kept,
    steps: range,
) -> list[float]:
    losses = []
    world = 1 if accelerator is None else accelerator.num_processes
    rank = 0 if accelerator is None else accelerator.process_index
    for step in steps:
        own = _batches()[step].chunk(world)[rank]
        loss = model(own).square().mean() * kept.state["rate"]
        loss.backward() if accelerator is None else accelerator.backward(loss)
        for each in (*optimizers, *schedules):
            each.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        kept.step()
        loss = (
            loss.detach()
            if accelerator is None
            else accelerator.reduce(loss.detach(), "mean")
        )
        losses.append(float(loss))
    return losses


def _made(program: Program, seed: int) -> tuple[Any, list[Any], list[Any], Kept]:
    torch.manual_seed(seed)
    model = Model(program.parts).double()
    optimizers = OPTIMIZERS[program.optimizer](model)
    schedules = [SCHEDULES[program.schedule](optimizer) for optimizer in optimizers]
    return model, optimizers, [each for each in schedules if each is not None], Kept()


def alone(program: Program) -> Seen:
    """The second half of a run in one process that never stops."""
    made = _made(program, 0)
    losses = _train(None, *made, range(STEPS))
    weights = full_weights_and_others(made[0])
    return Seen(losses[STEPS // 2 :], weights, made[-1].state)


def full_weights_and_others(model: nn.Module) -> dict[str, Any]:
    """The state dict as of one process; values that are no tensors as text."""
    module = getattr(model, "_orig_mod", model)
    tensors = {
        k: v for k, v in module.state_dict().items() if isinstance(v, torch.Tensor)
    }
    others = {k: repr(v) for k, v in module.state_dict().items() if k not in tensors}
    holder = nn.Module()
    holder.state_dict = lambda: tensors  # type: ignore[method-assign,assignment]
    return {**full_weights(holder), **others}


def half(program: Program, folder: str, second: bool) -> Seen | str:
    """One half of the program on this rank, or the words that refused it."""
    layout = program.loaded if second else program.saved
    try:
        accelerator = fresh_accelerator(**dict(layout.knobs))
        model, optimizers, schedules, kept = _made(program, 7 if second else 0)
        ready = accelerator.prepare(model, *optimizers, *schedules)
    except ValueError as error:
        return f"refused: {error}"
    ready = ready if isinstance(ready, tuple) else (ready,)
    model, rest = ready[0], ready[1:]
    optimizers = rest[: len(optimizers)]
    schedules = [each.scheduler for each in rest[len(optimizers) :]]
    accelerator.register_for_checkpointing(kept)
    first = range(STEPS // 2)
    if second:
        accelerator.load_state(folder)
    else:
        _train(accelerator, model, optimizers, schedules, kept, first)
        accelerator.save_state(folder)
    # Saving changes nothing: the run that saved goes on, too.
    losses = _train(
        accelerator, model, optimizers, schedules, kept, range(STEPS // 2, STEPS)
    )
    accelerator.wait_for_save()
    if dist.is_initialized():
        dist.barrier()
    return Seen(losses, full_weights_and_others(model), kept.state)


def halves(programs: list[tuple[Program, str]], second: bool) -> list[Seen | str]:
    """One half of each program, or the words that refused it."""
    found: list[Seen | str] = []
    for program, folder in programs:
        if second and not os.path.isdir(folder):
            found.append("nothing saved")
            continue
        try:
            found.append(half(program, folder, second))
        except Exception:
            found.append(traceback.format_exc())
    return found


def differences(seen: Seen, expected: Seen) -> list[str]:
    wrong = []
    for ours, theirs in zip(seen.losses, expected.losses, strict=True):
        if abs(ours - theirs) > 1e-11:
            wrong.append(f"loss {ours} instead of {theirs}")
    if seen.weights.keys() != expected.weights.keys():
        wrong.append(f"names {sorted(seen.weights.keys() ^ expected.weights.keys())}")
    for name in seen.weights.keys() & expected.weights.keys():
        ours, theirs = seen.weights[name], expected.weights[name]
        if isinstance(theirs, str):
            if ours != theirs:
                wrong.append(f"{name}: {ours} instead of {theirs}")
        elif ours.dtype != theirs.dtype or not torch.allclose(
            ours.double(), theirs.double(), 0, 1e-11
        ):
            wrong.append(f"{name} differs")
    if repr(seen.kept) != repr(expected.kept):
        wrong.append(f"kept {seen.kept} instead of {expected.kept}")
    return wrong

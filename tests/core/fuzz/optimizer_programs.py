"""Random programs around optimizers, as loops of people's own have them: kinds and
flags, groups, schedules, clipping, scalers, hooks, closures, edits of gradients, states
and weights between steps, averages.

A program is drawn as data and written once. :func:`alone` runs it in one process, where
each micro-batch's loss is the mean over the samples of all ranks; :func:`together` on
ranks that each have their own. Everything is float64, and what a program looks at on its
way (losses, norms, rates, gradients, weights) is noted and compared in its order.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import traceback
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer, lr_scheduler

from smp_core.engine.parallel_model import ParallelModel
from tests.core.fuzz.optimizer_edits import (
    BETWEEN,
    CLIPS,
    CLIPS_OVER_WORLD,
    EDITS,
    state_norms,
)
from tests.core.fuzz.optimizer_hooks import (
    AVERAGES,
    HOOKS,
    HOOKS_OVER_WORLD,
    SCHEDULES,
)
from tests.core.fuzz.optimizer_kinds import KINDS, Kind
from tests.core.fuzz.optimizer_nets import STEPS, Net, samples, whole
from tests.core.scenarios import parallel_model


@dataclass(frozen=True)
class Stepper:
    """An optimizer of a program.

    Attributes:
        kind: a name of `KINDS`.
        options: of all groups.
        part: "all", or the parameters of one of two optimizers ("even", "odd").
        groups: (a piece of parameters' names, options): groups of their own, in this
            order.
        late: a piece of the names that :meth:`add_param_group` brings; "": none.
        named: whether it is made of named parameters.
        before: whether it is made before the model is sharded.
    """

    kind: str
    options: dict[str, Any]
    part: str
    groups: tuple[tuple[str, dict[str, Any]], ...]
    late: str
    named: bool
    before: bool


@dataclass(frozen=True)
class Program:
    """What is drawn for one run.

    Attributes:
        schedule: a name of `SCHEDULES`; "": none.
        hooks: names of `HOOKS`.
        between: by step, names of `BETWEEN`, run before its forward.
        edits: by step, names of `EDITS`, run between backward and clipping.
        leaves_out: steps that leave a cell out.
        micro_batches: of each step.
        frozen: a piece of the names of parameters that are frozen at the beginning.
    """

    seed: int
    world: int
    knobs: dict[str, Any]
    steppers: tuple[Stepper, ...]
    schedule: str
    clip: str
    scaler: bool
    infinite: frozenset[int]
    hooks: tuple[str, ...]
    between: tuple[tuple[str, ...], ...]
    edits: tuple[tuple[str, ...], ...]
    closure: bool
    zero: str
    average: str
    frozen: str
    leaves_out: frozenset[int]
    micro_batches: tuple[int, ...]
    second_order: bool
    once: bool = field(default=False)

    @property
    def over_world(self) -> bool:
        return self.knobs.get("optimizer_shard") == "world"


# What a program does


class Run:
    """One run of a program.

    Attributes:
        parallel: None in one process.
        ranks: whose samples this process has.
        noted: (what, value), in the order in which it was looked at.
    """

    def __init__(self, program: Program, ranks: range, is_sharded: bool) -> None:
        self.program, self.ranks = program, ranks
        self.parallel: ParallelModel | None = None
        self.noted: list[tuple[str, torch.Tensor]] = []
        self.draw = random.Random(program.seed)
        self.model: nn.Module = Net().double()
        self.kept: dict[str, Any] = {}
        for name, parameter in self.model.named_parameters():
            if program.frozen and program.frozen in name:
                parameter.requires_grad_(False)
        self.optimizers: list[Any] = [
            self.make(each) if each.before else None for each in program.steppers
        ]
        if is_sharded:
            self.parallel = parallel_model(self.model, units=("Cell",), **program.knobs)
            self.model = self.parallel.module
        for place, each in enumerate(program.steppers):
            if self.optimizers[place] is None:
                self.optimizers[place] = self.make(each)
            self.prepare(self.optimizers[place])
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
            if program.scaler
            else None
        )
        self.averaged = AVERAGES[program.average](self) if program.average else None
        self.schedulers = [
            SCHEDULES[program.schedule](optimizer)
            for optimizer in self.optimizers
            if program.schedule
        ]
        for name in program.hooks:
            HOOKS[name](self)

    # Optimizers

    def prepare(self, optimizer: Optimizer) -> None:
        if self.parallel is not None:
            self.parallel.prepare_optimizer(optimizer)

    def members(self, stepper: Stepper) -> list[tuple[str, nn.Parameter]]:
        named = list(self.model.named_parameters())
        if stepper.part == "all":
            return named
        first = 0 if stepper.part == "even" else 1
        return named[first::2]

    def make(self, stepper: Stepper, late: bool = False) -> Optimizer:
        kind = KINDS[stepper.kind]
        left = {
            name: parameter
            for name, parameter in self.members(stepper)
            if late or not (stepper.late and stepper.late in name)
        }
        if kind.matrices_only:
            left = {n: p for n, p in left.items() if p.ndim == 2}
        groups = []
        for piece, options in stepper.groups:
            names = [name for name in left if piece in name]
            if names:
                pairs = [(name, left.pop(name)) for name in names]
                groups.append({"params": self.shown(stepper, pairs), **options})
        groups.append({"params": self.shown(stepper, list(left.items()))})
        options = dict(stepper.options)
        if options.pop("tensor lr", False):
            options["lr"] = torch.tensor(options["lr"], dtype=torch.float64)
        return kind.make(groups, **options)

    def shown(self, stepper: Stepper, pairs: list[Any]) -> list[Any]:
        return pairs if stepper.named else [parameter for _, parameter in pairs]

    # What is looked at

    def note(self, what: str, value: Any) -> None:
        self.noted.append((what, whole(torch.as_tensor(value))))

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        loss = loss.detach().clone()
        if self.parallel is not None:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return loss

    # A step

    def loss(self, step: int, micro: int) -> torch.Tensor:
        total: Any = 0.0
        for rank in self.ranks:
            tokens = samples(10 * step + micro, rank)
            logits = self.model(tokens, step not in self.program.leaves_out)
            each = logits.square().mean() + nn.functional.cross_entropy(
                logits.flatten(0, 1), tokens.flatten()
            )
            if step in self.program.infinite and rank == 1:
                each = each * float("inf")
            total = total + each / len(self.ranks)
        if self.program.second_order:
            weights = [p.square().sum() for _, p in self.trained() if p.ndim == 2]
            total = total + 0.01 * sum(
                w.full_tensor() if isinstance(w, DTensor) else w for w in weights
            )
        return total

    def backward(self, step: int) -> torch.Tensor:
        total, count = (
            torch.zeros((), dtype=torch.float64),
            self.program.micro_batches[step],
        )
        for micro in range(count):
            last = micro == count - 1 and not self.program.once
            held = (
                contextlib.nullcontext()
                if self.parallel is None or last
                else self.parallel.window.accumulate()
            )
            with held:
                loss = self.loss(step, micro) / count
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total += loss.detach()
        return total

    def zero(self, optimizer: Optimizer) -> None:
        if self.program.zero == "model":
            self.model.zero_grad()
        elif self.program.zero == "kept":
            optimizer.zero_grad(set_to_none=False)
        else:
            optimizer.zero_grad()

    def step(self, step: int) -> None:
        for name in self.program.between[step]:
            BETWEEN[name](self, step)
        if self.program.closure:
            (optimizer,) = self.optimizers

            def closure() -> torch.Tensor:
                self.zero(optimizer)
                return self.backward(step)

            loss = optimizer.step(closure)
            self.note("loss", self.mean(loss))
        else:
            for optimizer in self.optimizers:
                self.zero(optimizer)
            self.note("loss", self.mean(self.backward(step)))
            if self.scaler is not None:
                for optimizer in self.optimizers:
                    if _has_gradient(optimizer) or self.parallel is not None:
                        self.scaler.unscale_(optimizer)
            if self.parallel is not None and (
                self.program.once or self.program.edits[step]
            ):
                self.parallel.window.close()
            for name in self.program.edits[step]:
                EDITS[name](self, step)
            if self.program.clip:
                CLIPS[self.program.clip](self)
            for optimizer in self.optimizers:
                if self.scaler is None:
                    optimizer.step()
                else:
                    self.scaler.step(optimizer)
            if self.scaler is not None:
                self.scaler.update()
                self.note("scale", self.scaler.get_scale())
        if self.averaged is not None:
            self.averaged()
        for scheduler in self.schedulers:
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(float(self.noted[-1][1].sum()) if step < 2 else 1e9)
            else:
                scheduler.step()
        for number, optimizer in enumerate(self.optimizers):
            for place, group in enumerate(optimizer.param_groups):
                self.note(f"step {step}: rate {number}.{place}", group.get("lr", 0.0))
        for name, parameter in self.model.named_parameters():
            self.note(f"step {step}: {name}", parameter)


def _has_gradient(optimizer: Optimizer) -> bool:
    return any(
        p.grad is not None for group in optimizer.param_groups for p in group["params"]
    )


# Drawing


def _some(rng: random.Random, names: Any, chance: float, most: int) -> tuple[str, ...]:
    if rng.random() >= chance:
        return ()
    return tuple(rng.choice(list(names)) for _ in range(rng.randint(1, most)))


def _draw_stepper(rng: random.Random, part: str, scheduled: bool) -> Stepper:
    name = rng.choices(list(KINDS), [each.weight for each in KINDS.values()])[0]
    kind: Kind = KINDS[name]
    options = dict(kind.options)
    for flag, values in kind.flags.items():
        if rng.random() < 0.4:
            options[flag] = rng.choice(values)
    if options.get("fused"):
        options.pop("foreach", None)
    # torch's fused SGD has no first step of some parameters beside later ones of others.
    if options.get("momentum"):
        options.pop("fused", None)
    groups: list[tuple[str, dict[str, Any]]] = []
    if rng.random() < 0.5 and name != "LBFGS":
        pieces = rng.sample(
            ["bias", "norm", "table", "cells.1", "gain"], rng.choice((1, 2))
        )
        for piece in pieces:
            own: dict[str, Any] = {"lr": rng.choice((0.02, 0.005))}
            if "weight_decay" in kind.options:
                own["weight_decay"] = 0.0
            groups.append((piece, own))
    late = rng.choice(("", "", "", "cells.2", "row")) if not scheduled else ""
    late = "" if name == "LBFGS" else late
    return Stepper(
        name, options, part, tuple(groups), late, rng.random() < 0.2, rng.random() < 0.4
    )


def draw(seed: int) -> Program:
    """Draw a program."""
    rng = random.Random(seed)
    world = rng.choice((2, 2, 4))
    knobs: dict[str, Any] = {
        "shard_degree": rng.choice([d for d in (1, 2, 2, 4) if d <= world])
    }
    if rng.random() < 0.2:
        knobs["reshard_after_forward"] = False
    elif rng.random() < 0.2:
        knobs["keep_between_micro_batches"] = "gradients"
    if rng.random() < 0.3:
        knobs["optimizer_shard"] = "world"
    if rng.random() < 0.2:
        knobs["state_offload"] = rng.choice(("optimizer", "optimizer", "all"))
    over_world = "optimizer_shard" in knobs
    schedule = rng.choice(list(SCHEDULES)) if rng.random() < 0.4 else ""
    parts = ("even", "odd") if rng.random() < 0.2 else ("all",)
    steppers = tuple(_draw_stepper(rng, part, bool(schedule)) for part in parts)
    scaler, closure = rng.random() < 0.2, False
    if not scaler and len(parts) == 1:
        closure = rng.random() < 0.15 or steppers[0].kind == "LBFGS"
    clips: Any = CLIPS_OVER_WORLD if over_world else CLIPS
    clip = rng.choice(list(clips)) if rng.random() < 0.5 else ""
    hooks = _some(rng, HOOKS_OVER_WORLD if over_world else HOOKS, 0.3, 2)
    # torch calls hooks of a step that calls another one once for each, or once in all.
    if any(each.kind == "Decayed" for each in steppers):
        hooks = tuple(name for name in hooks if not name.endswith(("before", "after")))
    between = tuple(_some(rng, BETWEEN, 0.5, 2) for _ in range(STEPS))
    edits: Any = tuple(
        _some(rng, EDITS, 0.35, 2) if not over_world else () for _ in range(STEPS)
    )
    average = rng.choice(list(AVERAGES)) if rng.random() < 0.25 else ""
    return Program(
        seed, world, knobs, steppers, schedule, clip, scaler,
        frozenset(s for s in range(STEPS) if scaler and rng.random() < 0.25),
        hooks, between, edits, closure,
        rng.choice(("", "", "model", "kept")), average,
        rng.choice(("", "", "", "norm", "table", "cells.0")),
        frozenset(s for s in range(STEPS) if rng.random() < 0.2),
        tuple(rng.choice((1, 1, 2, 3)) for _ in range(STEPS)),
        rng.random() < 0.1, rng.random() < 0.1,
    )  # fmt: skip


# Running


def _run(program: Program, ranks: range, is_sharded: bool) -> Any:
    torch.manual_seed(program.seed)
    run = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = Run(program, ranks, is_sharded)
            for step in range(STEPS):
                run.step(step)
            state_norms(run, STEPS)
        # One tensor: thousands would take long to send.
        shapes = [(name, value.shape) for name, value in run.noted]
        values = [value.reshape(-1).double() for _, value in run.noted]
        return shapes, torch.cat(values)
    except Exception as error:
        return "".join(traceback.format_exception(error))


def alone(program: Program) -> Any:
    return _run(program, range(program.world), False)


def together(programs: list[Program]) -> list[Any]:
    """On the ranks; of a refusal its words."""
    rank = dist.get_rank()
    return [_run(program, range(rank, rank + 1), True) for program in programs]


# What an error may say that one process does not raise: by words of it.
REFUSALS = (
    "cannot step sharded parameters: a step on small ones failed",
    "optimizer_shard='world' gives each rank a part of every tensor, but",
    "steps in host memory, where",
    "optimizer_shard='world' steps parts",
    "was frozen when the optimizer was made and has no master to step",
)


def problems(program: Program, ranks: list[Any], expected: Any) -> list[str]:
    """Compare what every rank found with one process."""
    tolerance = max(KINDS[each.kind].tolerance for each in program.steppers)
    for rank, seen in enumerate(ranks):
        if isinstance(seen, str) or isinstance(expected, str):
            if isinstance(seen, str) and isinstance(expected, str):
                continue
            if isinstance(seen, str) and any(words in seen for words in REFUSALS):
                continue
            which = f"rank {rank} failed" if isinstance(seen, str) else "only alone"
            return [f"{which}: {seen if isinstance(seen, str) else expected}"]
        (own, values), (theirs, numbers) = seen, expected
        if own != theirs:
            pairs = itertools.zip_longest(own, theirs)
            first = next(pair for pair in pairs if pair[0] != pair[1])
            return [f"rank {rank} looked at {first[0]} instead of {first[1]}"]
        close = torch.isclose(
            values, numbers, rtol=tolerance, atol=tolerance, equal_nan=True
        )
        if not close.all():
            place = int((~close).nonzero()[0])
            ends = itertools.accumulate(shape.numel() for _, shape in own)
            number = next(i for i, end in enumerate(ends) if end > place)
            off = float((values - numbers)[~close].abs().max())
            return [f"rank {rank}: {own[number][0]} first; up to {off:.3g} off"]
    return []

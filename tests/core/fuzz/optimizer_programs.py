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
import copy
import itertools
import random
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer, lr_scheduler, swa_utils

from smp_core.engine.averaging import ShardedAverage
from smp_core.engine.parallel_model import ParallelModel
from tests.core.fuzz.optimizer_kinds import KINDS, Kind
from tests.core.scenarios import parallel_model

STEPS = 6
WIDTH = 6


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Cells that are units, one of which some steps leave out; a table whose weight is
    the head's, a 0-d parameter, a row that one of two ranks has nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH)
        self.cells = nn.ModuleList([Cell(), Cell(), Cell()])
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.row = nn.Parameter(torch.ones(1, WIDTH))
        self.head = nn.Linear(WIDTH, 9)
        self.head.weight = self.table.weight
        self.never = nn.Linear(3, 3)

    def forward(self, tokens: torch.Tensor, all_cells: bool = True) -> torch.Tensor:
        x = self.table(tokens) * self.row
        for cell in self.cells if all_cells else self.cells[:2]:
            x = cell(x)
        return self.head(x) * self.gain


def samples(number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randint(9, (3, 4), generator=generator)


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
                groups.append({"params": self._shown(stepper, pairs), **options})
        groups.append({"params": self._shown(stepper, list(left.items()))})
        options = dict(stepper.options)
        if options.pop("tensor lr", False):
            options["lr"] = torch.tensor(options["lr"], dtype=torch.float64)
        return kind.make(groups, **options)

    def _shown(self, stepper: Stepper, pairs: list[Any]) -> list[Any]:
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


def whole(tensor: Any) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


def _gradients(run: Run) -> list[nn.Parameter]:
    return [p for p in run.model.parameters() if p.grad is not None]


# Clipping


def _clip_all(run: Run, **options: Any) -> None:
    total = nn.utils.clip_grad_norm_(run.model.parameters(), 0.05, **options)
    run.note("norm", total)


def _clip_parts(run: Run) -> None:
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            total = nn.utils.clip_grad_norm_(group["params"], 0.02)
            run.note("norm of a group", total)


def _clip_in_two(run: Run) -> None:
    gradients = [p.grad for p in _gradients(run)]
    total = nn.utils.get_total_norm(gradients, 2.0)
    run.note("norm", total)
    nn.utils.clip_grads_with_norm_(run.model.parameters(), 0.05, total)


def _clip_here(run: Run, norm_type: float = 2.0) -> None:
    if run.parallel is None:
        total = nn.utils.clip_grad_norm_(run.model.parameters(), 0.05, norm_type)
    else:
        total = run.parallel.clip_grad_norm_(0.05, norm_type)
    run.note("norm", total)


def _clip_by_hand(run: Run) -> None:
    total = sum(p.grad.pow(2).sum() for p in _gradients(run)) ** 0.5
    run.note("norm", total)
    for p in _gradients(run):
        p.grad.mul_(torch.clamp(0.05 / (total + 1e-6), max=1.0))


def _clip_by_norms(run: Run) -> None:
    norms = [p.grad.norm() for p in _gradients(run)]
    total = torch.stack(norms).norm()
    run.note("norm", total)
    for p in _gradients(run):
        p.grad.div_(max(1.0, float(total) / 0.05))


CLIPS: dict[str, Callable[[Run], None]] = {
    "norm": _clip_all,
    "foreach": lambda run: _clip_all(run, foreach=True),
    "for-loop": lambda run: _clip_all(run, foreach=False),
    "largest": lambda run: _clip_all(run, norm_type=float("inf")),
    "one": lambda run: _clip_all(run, norm_type=1.0),
    "value": lambda run: nn.utils.clip_grad_value_(run.model.parameters(), 0.003),
    "value, for-loop": lambda run: nn.utils.clip_grad_value_(
        run.model.parameters(), 0.003, foreach=False
    ),
    "groups": _clip_parts,
    "in two": _clip_in_two,
    "by hand": _clip_by_hand,
    "norms": _clip_by_norms,
    "here": _clip_here,
    "here, largest": lambda run: _clip_here(run, float("inf")),
}
CLIPS_OVER_WORLD = ("here", "here, largest")

# Edits of gradients


def _noise(run: Run, step: int) -> None:
    for p in _gradients(run):
        p.grad.add_(torch.randn_like(p.grad), alpha=0.01)


def _noise_of_shape(run: Run, step: int) -> None:
    for p in _gradients(run):
        p.grad += 0.01 * torch.randn(p.shape, dtype=p.dtype)


def _sign(run: Run, step: int) -> None:
    for p in _gradients(run):
        p.grad = p.grad.sign() * 0.1


def _whole(run: Run, step: int) -> None:
    for p in _gradients(run):
        p.grad = torch.full(p.shape, 0.01, dtype=p.dtype) * p.grad.sum()


def _drop_some(run: Run, step: int) -> None:
    for place, p in enumerate(_gradients(run)):
        if place % 3 == step % 3:
            p.grad = None


def _penalty(run: Run, step: int) -> None:
    for p in _gradients(run):
        p.grad.add_(p.detach(), alpha=0.1)


def _centralise(run: Run, step: int) -> None:
    for p in _gradients(run):
        if p.ndim > 1:
            p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.ndim)), keepdim=True))


def _project(run: Run, step: int) -> None:
    for p in _gradients(run):
        dot = (p.grad * p.detach()).sum() / (p.detach().square().sum() + 1e-3)
        p.grad = p.grad - dot * p.detach()


def _normalise(run: Run, step: int) -> None:
    for p in _gradients(run):
        p.grad /= p.grad.norm() + 0.1


def _surgery(run: Run, step: int) -> None:
    before = run.kept.get("gradients")
    now = {n: p.grad.detach().clone() for n, p in run.trained() if p.grad is not None}
    if before is not None:
        both = [n for n in now if n in before]
        dot = sum((now[n] * before[n]).sum() for n in both)
        run.note("cosine", dot)
        if dot < 0:
            scale = dot / sum(before[n].square().sum() for n in both)
            for n in both:
                run.model.get_parameter(n).grad.sub_(scale * before[n])
    run.kept["gradients"] = now


def _threshold(run: Run, step: int) -> None:
    largest = max(float(p.grad.abs().max()) for p in _gradients(run))
    run.note("largest", largest)
    for p in _gradients(run):
        p.grad.masked_fill_(p.grad.abs() < 0.1 * largest, 0.0)


def _momentum(run: Run, step: int) -> None:
    mean = run.kept.setdefault("slow", {})
    for n, p in run.trained():
        if p.grad is not None:
            slow = mean.setdefault(n, torch.zeros_like(p.grad))
            slow.mul_(0.9).add_(p.grad, alpha=0.1)
            p.grad.add_(slow)


def _foreach(run: Run, step: int) -> None:
    gradients = [p.grad for p in _gradients(run)]
    torch._foreach_mul_(gradients, 0.5)
    run.note("norms", torch.stack([g.norm() for g in gradients]))


def _look(run: Run, step: int) -> None:
    for n, p in run.trained():
        if p.grad is not None:
            run.note(f"gradient of {n}", p.grad)
            run.note(f"mean gradient of {n}", p.grad.abs().mean())


def _sharpness(run: Run, step: int) -> None:
    """Sharpness-aware steps: gradients at weights that were moved uphill."""
    norm = torch.stack([p.grad.norm() for p in _gradients(run)]).norm()
    moved = {}
    with torch.no_grad():
        for n, p in run.trained():
            if p.grad is not None:
                moved[n] = p.grad * (0.05 / (norm + 1e-6))
                p.add_(moved[n])
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    run.note("loss uphill", run.mean(run.backward(step)))
    if run.parallel is not None:
        run.parallel.window.close()
    with torch.no_grad():
        for n, p in run.trained():
            if n in moved:
                p.sub_(moved[n])


EDITS: dict[str, Callable[[Run, int], None]] = {
    "noise": _noise,
    "noise of shape": _noise_of_shape,
    "sign": _sign,
    "whole": _whole,
    "drop some": _drop_some,
    "penalty": _penalty,
    "centralise": _centralise,
    "project": _project,
    "normalise": _normalise,
    "surgery": _surgery,
    "threshold": _threshold,
    "momentum": _momentum,
    "foreach": _foreach,
    "look": _look,
    "sharpness": _sharpness,
}

# Between steps


def _freeze(run: Run, step: int) -> None:
    piece = run.draw.choice(["up", "norm", "table", "cells.1", "gain", "bias"])
    for n, p in run.model.named_parameters():
        if piece in n:
            p.requires_grad_(False)
            if step % 2:
                p.grad = None


def _thaw(run: Run, step: int) -> None:
    for p in run.model.parameters():
        p.requires_grad_(True)


def _late(run: Run, step: int) -> None:
    for stepper, optimizer in zip(run.program.steppers, run.optimizers, strict=True):
        if not stepper.late or run.kept.get(id(optimizer)):
            continue
        run.kept[id(optimizer)] = True
        pairs = [(n, p) for n, p in run.members(stepper) if stepper.late in n]
        if KINDS[stepper.kind].matrices_only:
            pairs = [(n, p) for n, p in pairs if p.ndim == 2]
        if pairs:
            group = {"params": run._shown(stepper, pairs), "lr": 0.003}
            optimizer.add_param_group(group)
            # Schedulers of torch know only the groups of when they were made.
            for scheduler in run.schedulers:
                if getattr(scheduler, "optimizer", None) is optimizer:
                    scheduler.base_lrs.append(0.003) if hasattr(
                        scheduler, "base_lrs"
                    ) else None


def _rates(run: Run, step: int) -> None:
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"].mul_(0.7)
            elif group.get("lr") is not None:
                group["lr"] = group["lr"] * 0.7
            if "weight_decay" in group:
                group["weight_decay"] = 0.03


def _snapshot(run: Run, step: int) -> None:
    run.kept["states"] = [copy.deepcopy(o.state_dict()) for o in run.optimizers]
    run.kept["weights"] = {
        n: p.detach().clone() for n, p in run.model.named_parameters()
    }
    run.kept["groups"] = [len(o.param_groups) for o in run.optimizers]


def _rewind(run: Run, step: int) -> None:
    if "states" not in run.kept:
        return
    if run.kept["groups"] != [len(o.param_groups) for o in run.optimizers]:
        return
    for optimizer, state in zip(run.optimizers, run.kept["states"], strict=True):
        optimizer.load_state_dict(state)
    with torch.no_grad():
        for n, p in run.model.named_parameters():
            p.copy_(run.kept["weights"][n])


def _made_anew(run: Run, step: int) -> None:
    if run.schedulers or run.program.hooks or run.averaged:
        return
    for place, stepper in enumerate(run.program.steppers):
        old = run.optimizers[place]
        new = run.make(stepper)
        if len(old.param_groups) > len(new.param_groups):
            continue
        run.prepare(new)
        new.load_state_dict(old.state_dict())
        run.optimizers[place] = new


def _forget(run: Run, step: int) -> None:
    for optimizer in run.optimizers:
        if step % 2:
            optimizer.state.clear()
        else:
            optimizer.state = defaultdict(dict)


def _reset_moments(run: Run, step: int) -> None:
    for optimizer in run.optimizers:
        for entry in optimizer.state.values():
            for value in entry.values():
                if isinstance(value, torch.Tensor) and value.ndim:
                    value.mul_(0.5)


def _reset_by_parameter(run: Run, step: int) -> None:
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            for place, p in enumerate(group["params"]):
                if place % 2 and p in optimizer.state:
                    optimizer.state[p] = {}


def _shrink(run: Run, step: int) -> None:
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(0.95)


def _perturb(run: Run, step: int) -> None:
    with torch.no_grad():
        for p in run.model.parameters():
            p.add_(torch.randn_like(p) * 0.01)


def _bounded(run: Run, step: int) -> None:
    with torch.no_grad():
        for p in run.model.parameters():
            if p.ndim == 2:
                p.div_(p.norm(dim=1, keepdim=True).clamp(min=1.0))


def _evaluate(run: Run, step: int) -> None:
    run.model.eval()
    with torch.no_grad():
        run.note("evaluated", run.model(samples(77, 0)))
    run.model.train()


def _drop_group(run: Run, step: int) -> None:
    for optimizer in run.optimizers:
        if len(optimizer.param_groups) > 1 and not run.schedulers:
            optimizer.param_groups.pop(0)


def _empty_step(run: Run, step: int) -> None:
    for optimizer in run.optimizers:
        optimizer.zero_grad()
        optimizer.step()


def _dropped_gradients(run: Run, step: int) -> None:
    run.backward(step)
    for optimizer in run.optimizers:
        optimizer.zero_grad()


def _state_norms(run: Run, step: int) -> None:
    for number, optimizer in enumerate(run.optimizers):
        saved = optimizer.state_dict()
        for key in sorted(saved["state"]):
            for name, value in sorted(saved["state"][key].items()):
                if isinstance(value, torch.Tensor):
                    run.note(f"state {number}.{key}.{name}", value)


BETWEEN: dict[str, Callable[[Run, int], None]] = {
    "freeze": _freeze,
    "thaw": _thaw,
    "late": _late,
    "rates": _rates,
    "snapshot": _snapshot,
    "rewind": _rewind,
    "made anew": _made_anew,
    "forget": _forget,
    "reset moments": _reset_moments,
    "reset by parameter": _reset_by_parameter,
    "shrink": _shrink,
    "perturb": _perturb,
    "bounded": _bounded,
    "evaluate": _evaluate,
    "drop group": _drop_group,
    "empty step": _empty_step,
    "dropped gradients": _dropped_gradients,
    "state norms": _state_norms,
}

# Hooks


def _scaling_before(run: Run) -> None:
    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)

    for optimizer in run.optimizers:
        optimizer.register_step_pre_hook(before)


def _looking_before(run: Run) -> None:
    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            held = [p.grad.norm() for p in group["params"] if p.grad is not None]
            run.note("norms before", torch.stack(held) if held else torch.zeros(0))

    for optimizer in run.optimizers:
        optimizer.register_step_pre_hook(before)


def _rates_before(run: Run) -> None:
    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), float):
                group["lr"] *= 0.9

    for optimizer in run.optimizers:
        optimizer.register_step_pre_hook(before)


def _bounding_after(run: Run) -> None:
    @torch.no_grad()
    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.clamp_(-0.5, 0.5)
                run.note("norm after", p.norm())

    for optimizer in run.optimizers:
        optimizer.register_step_post_hook(after)


def _masking_after(run: Run) -> None:
    masks = {
        p: (torch.arange(p.numel()).view(p.shape) % 3 != 0).double()
        for p in run.model.parameters()
    }

    @torch.no_grad()
    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for p in run.model.parameters():
            p.mul_(masks[p])

    run.optimizers[-1].register_step_post_hook(after)


def _states_hooks(run: Run) -> None:
    def saved(optimizer: Optimizer, state: Any) -> Any:
        state["note"] = len(state["state"])
        return state

    def loading(optimizer: Optimizer, state: Any) -> Any:
        run.note("loading", state.get("note", -1))
        return {key: value for key, value in state.items() if key != "note"}

    for optimizer in run.optimizers:
        optimizer.register_state_dict_post_hook(saved)
        optimizer.register_load_state_dict_pre_hook(loading)
        optimizer.register_load_state_dict_post_hook(
            lambda optimizer: run.note("loaded", len(optimizer.state))
        )


def _late_gradients(run: Run) -> None:
    def complete(p: torch.Tensor) -> None:
        p.grad.clamp_(-0.01, 0.01)

    for n, p in run.trained():
        if "cells.1" in n:
            p.register_post_accumulate_grad_hook(complete)


def _gradient_hooks(run: Run) -> None:
    for n, p in run.trained():
        if "cells.0" in n or "table" in n:
            p.register_hook(lambda gradient: gradient * 0.5 + 0.001)


HOOKS: dict[str, Callable[[Run], None]] = {
    "scaling before": _scaling_before,
    "looking before": _looking_before,
    "rates before": _rates_before,
    "bounding after": _bounding_after,
    "masking after": _masking_after,
    "states": _states_hooks,
    "late gradients": _late_gradients,
    "gradients": _gradient_hooks,
}
HOOKS_OVER_WORLD = (
    "rates before", "bounding after", "masking after", "states", "gradients",
)  # fmt: skip

# Schedules

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.8**step),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "steps": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.2, 1.0, 4),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 5, 2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 4, 1e-4),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=STEPS + 2),
    "cycle": lambda o: lr_scheduler.CyclicLR(
        o, 0.001, 0.02, 2, cycle_momentum="momentum" in o.defaults
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.CosineAnnealingLR(o, 4)],
        [2],
    ),
    "averaging": lambda o: swa_utils.SWALR(o, 0.004, 3),
}

# Averages


def _averaged_model(run: Run, **options: Any) -> Callable[[], None]:
    averaged: Any = (
        swa_utils.AveragedModel(run.model, **options)
        if run.parallel is None
        else ShardedAverage(run.parallel, **options)
    )

    def update() -> None:
        averaged.update_parameters(run.model)
        for n, value in sorted(averaged.state_dict().items()):
            run.note(f"average of {n}", value)

    return update


def _average_by_hand(run: Run) -> Callable[[], None]:
    average = {n: p.detach().clone() for n, p in run.model.named_parameters()}

    @torch.no_grad()
    def update() -> None:
        for n, p in run.model.named_parameters():
            average[n].lerp_(p, 0.3)
            run.note(f"average of {n}", average[n])

    return update


def _average_of_states(run: Run) -> Callable[[], None]:
    average = copy.deepcopy(run.model.state_dict())

    @torch.no_grad()
    def update() -> None:
        for n, value in run.model.state_dict().items():
            average[n].mul_(0.7).add_(value, alpha=0.3)
            run.note(f"average of {n}", average[n])

    return update


def _average_in_lists(run: Run) -> Callable[[], None]:
    average = [p.detach().clone() for p in run.model.parameters()]

    @torch.no_grad()
    def update() -> None:
        torch._foreach_lerp_(average, [p.detach() for p in run.model.parameters()], 0.3)
        run.note("averages", torch.stack([each.norm() for each in average]))

    return update


AVERAGES: dict[str, Callable[[Run], Callable[[], None]]] = {
    "mean": _averaged_model,
    "ema": lambda run: _averaged_model(
        run, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.7)
    ),
    "ema, one by one": lambda run: _averaged_model(
        run, avg_fn=swa_utils.get_ema_avg_fn(0.7), use_buffers=True
    ),
    "by hand": _average_by_hand,
    "states": _average_of_states,
    "lists": _average_in_lists,
}


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
            _state_norms(run, STEPS)
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

"""What random programs around optimizers do to gradients before a step, and between
steps: clipping, edits, states, groups, weights."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.core.fuzz.optimizer_kinds import KINDS
from tests.core.fuzz.optimizer_nets import samples

if TYPE_CHECKING:
    from tests.core.fuzz.optimizer_programs import Run


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
            group = {"params": run.shown(stepper, pairs), "lr": 0.003}
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


def state_norms(run: Run, step: int) -> None:
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
    "state norms": state_norms,
}

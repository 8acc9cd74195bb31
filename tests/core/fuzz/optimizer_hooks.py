"""Hooks, schedules and averages of random programs around optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer, lr_scheduler, swa_utils

from smp_core.engine.averaging import ShardedAverage
from tests.core.fuzz.optimizer_nets import STEPS

if TYPE_CHECKING:
    from tests.core.fuzz.optimizer_programs import Run

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
    "one cycle": lambda o: lr_scheduler.OneCycleLR(
        o, 0.02, total_steps=STEPS + 2, cycle_momentum="betas" in o.defaults
    ),
    "cycle": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.02, 2, cycle_momentum=False),
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

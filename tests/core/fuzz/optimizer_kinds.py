"""The optimizers that random programs make: torch's, ours, and some of a user's own.

``eps`` is 1e-3 wherever there is one: with torch's own 1e-8 the update of a gradient
that is zero but for rounding would be as large as any other, and nothing could be
compared to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from smp_core.optim import Adafactor, Muon
from smp_core.sharding.optimizer.kinds import register_elementwise

_KERNELS: dict[str, list[Any]] = {
    "foreach": [True, False],
    "maximize": [True],
    "tensor lr": [True],
}


@dataclass(frozen=True)
class Kind:
    """A kind of optimizer.

    Attributes:
        options: that are always given.
        flags: what may be given besides.
        tolerance: of comparisons; some keep numbers in float32.
        weight: how often it is drawn.
    """

    make: Callable[..., Optimizer]
    options: dict[str, Any]
    flags: dict[str, list[Any]] = field(default_factory=lambda: dict(_KERNELS))
    matrices_only: bool = False
    tolerance: float = 1e-9
    weight: float = 1.0


@register_elementwise
class Signs(Optimizer):
    """A user's own, with states in lists and a counter of its own."""

    def __init__(self, params: Any, lr: float = 0.01, keep: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "keep": keep})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.steps += 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["kept"] = [torch.zeros_like(p), torch.zeros_like(p)]
                slow, fast = state["kept"]
                slow.lerp_(p.grad, 1 - group["keep"])
                fast.lerp_(p.grad, 0.5)
                update = torch.tanh(30 * (slow + fast))
                p.add_(update, alpha=-group["lr"] / self.steps**0.5)
        return loss


@register_elementwise
class Decayed(torch.optim.SGD):
    """A user's own, made of torch's."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.add_(p, alpha=0.01)
        return super().step(closure)


class Trusting(Optimizer):
    """A user's own that looks across tensors, by operations of tensors."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    ratio = p.norm() / (p.grad.norm() + 1e-3)
                    p.sub_(p.grad * ratio * group["lr"])
        return loss


_ADAM = {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.05}
_FUSED = {**_KERNELS, "fused": [True], "capturable": [False]}

KINDS: dict[str, Kind] = {
    "SGD": Kind(
        torch.optim.SGD,
        {"lr": 0.05, "weight_decay": 0.01},
        {**_KERNELS, "momentum": [0.9], "dampening": [0.1], "fused": [True]},
    ),
    "SGD, Nesterov": Kind(
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.0},
    ),
    "Adam": Kind(
        torch.optim.Adam,
        _ADAM,
        {**_FUSED, "amsgrad": [True], "decoupled_weight_decay": [True]},
    ),
    "AdamW": Kind(torch.optim.AdamW, _ADAM, {**_FUSED, "amsgrad": [True]}),
    "Adamax": Kind(torch.optim.Adamax, {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.01}),
    "NAdam": Kind(
        torch.optim.NAdam,
        {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.01},
        {**_KERNELS, "decoupled_weight_decay": [True]},
        tolerance=1e-6,
    ),
    "RAdam": Kind(
        torch.optim.RAdam,
        {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.01},
        {**_KERNELS, "decoupled_weight_decay": [True]},
    ),
    "Adagrad": Kind(
        torch.optim.Adagrad,
        {
            "lr": 0.02,
            "eps": 1e-3,
            "initial_accumulator_value": 0.01,
            "weight_decay": 0.01,
        },
        {**_KERNELS, "lr_decay": [0.1], "fused": [True]},
    ),
    "Adadelta": Kind(
        torch.optim.Adadelta, {"lr": 0.5, "eps": 1e-3, "weight_decay": 0.01}
    ),
    "RMSprop": Kind(
        torch.optim.RMSprop,
        {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.01},
        {**_KERNELS, "momentum": [0.5], "centered": [True]},
    ),
    # Uphill its rate in float32 would grow to any difference.
    "ASGD": Kind(
        torch.optim.ASGD,
        {"lr": 0.02, "t0": 2, "weight_decay": 0.01},
        {"foreach": [True, False], "tensor lr": [True]},
        tolerance=1e-6,
    ),
    "Rprop": Kind(
        torch.optim.Rprop, {"lr": 0.002}, {"foreach": [True, False]}, weight=0.5
    ),
    "LBFGS": Kind(torch.optim.LBFGS, {"lr": 0.05, "max_iter": 2}, {}, weight=0.5),
    "torch's Adafactor": Kind(torch.optim.Adafactor, {"lr": 0.01}, {}, weight=0.2),
    "torch's Muon": Kind(
        torch.optim.Muon,
        {"lr": 0.01},
        {},
        matrices_only=True,
        tolerance=1e-2,
        weight=0.2,
    ),
    "Adafactor": Kind(Adafactor, {"lr": 0.01, "weight_decay": 0.01}, {"d": [2.0]}),
    "Muon": Kind(
        Muon,
        {"lr": 0.01, "ns_dtype": torch.float32},
        {"nesterov": [False]},
        matrices_only=True,
        tolerance=1e-4,
    ),
    "Signs": Kind(Signs, {"lr": 0.01}, {"keep": [0.5]}),
    "Decayed": Kind(Decayed, {"lr": 0.02, "momentum": 0.5}, {"nesterov": [True]}),
    "Trusting": Kind(Trusting, {"lr": 0.01}, {}),
}

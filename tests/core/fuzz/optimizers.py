"""Optimizers of random runs: kinds with their options, parameter groups, and parameters
that are added later.

``eps`` is 1e-3 wherever there is one: with torch's own 1e-8 the update of a gradient
that is zero but for rounding would be as large as any other, and nothing could be
compared to rounding. (ASGD and NAdam keep a rate and a product in float32, which their
kernels round in different ways.) A new kind: a line in `KINDS`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.core.fuzz.families import matching

_ADAM = {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.05}

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "SGD, momentum": (
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.05},
    ),
    "SGD, Nesterov": (
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "maximize": True},
    ),
    "Adam": (torch.optim.Adam, {**_ADAM, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, _ADAM),
    "Adagrad": (
        torch.optim.Adagrad,
        {"lr": 0.02, "eps": 1e-3, "initial_accumulator_value": 0.01},
    ),
    "RMSprop": (
        torch.optim.RMSprop,
        {"lr": 0.01, "eps": 1e-3, "momentum": 0.5, "centered": True},
    ),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01, "eps": 1e-3}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01, "eps": 1e-3}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5, "eps": 1e-3}),
}

KERNELS = ("default", "foreach", "for-loop", "fused", "tensor lr")
WITH_FUSED_KERNELS = ("Adam", "AdamW")  # on shards; torch has no others for DTensors
WITH_TENSOR_LR = ("Adam", "AdamW")
# Their steps are as far apart as their gradients are.
IN_STEP_WITH_ROUNDING = ("SGD", "SGD, momentum", "SGD, Nesterov")


def make_optimizer(spec: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over its part of the model, without what is added later.

    Args:
        spec: ``{"kind", "kernels", "part", "groups": [[pattern, options]], "late":
            pattern or None, "frozen": bool}``; ``frozen``: whether it is given frozen
            parameters too.
    """
    make, options = KINDS[spec["kind"]]
    options = {**options, **_kernels(spec, options)}
    left = {
        name: p for name, p in model.named_parameters() if name.startswith(spec["part"])
    }
    for name in _late(spec, model):
        left.pop(name, None)
    if not spec["frozen"]:
        left = {
            name: parameter
            for name, parameter in left.items()
            if parameter.requires_grad
        }
    groups: list[dict[str, Any]] = []
    for pattern, own in spec["groups"]:
        members = [name for name, _ in matching(model, pattern) if name in left]
        if members:
            groups.append({"params": [left.pop(name) for name in members], **own})
    return make([*groups, {"params": list(left.values())}], **options)


def late_group(spec: dict[str, Any], model: nn.Module) -> dict[str, Any] | None:
    """What ``add_param_group`` gets, if there is anything."""
    members = list(_late(spec, model).values())
    return {"params": members, "lr": 0.02} if members else None


def _late(spec: dict[str, Any], model: nn.Module) -> dict[str, nn.Parameter]:
    if spec["late"] is None:
        return {}
    return {
        name: p
        for name, p in matching(model, spec["late"])
        if name.startswith(spec["part"])
    }


def _kernels(spec: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    kernels = spec["kernels"]
    if kernels == "tensor lr":
        return {"lr": torch.tensor(options["lr"], dtype=torch.float64)}
    flags = {
        "default": {},
        "foreach": {"foreach": True},
        "for-loop": {"foreach": False},
        "fused": {"fused": True},
    }
    return flags[kernels]

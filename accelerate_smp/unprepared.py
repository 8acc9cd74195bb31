"""The error for an optimizer that was made before its model was sharded, and was not prepared with it: it would train
nothing.

Such an optimizer steps tensors that the model does not use any more and that never receive a gradient. So its first
step is an error; a prepared optimizer has been given the model's present parameters.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from smp_core.sharding import of_replaced

_prepared: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_hooks: list[Any] = []


def watch_for_unprepared() -> None:
    """Look at every optimizer's first step from now on, and refuse one that was not prepared with its model."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_refuse))


def is_prepared(optimizer: torch.optim.Optimizer) -> None:
    """Record that ``optimizer`` has been given the model's present parameters."""
    _prepared.add(optimizer)


def _refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if optimizer in _prepared:
        return
    model, n = of_replaced(parameter for group in optimizer.param_groups for parameter in group["params"])
    if model is not None:
        raise ValueError(
            f"{type(optimizer).__name__} steps {n} parameters that {model} had before it was sharded, "
            "which would train nothing; write model, optimizer = accelerator.prepare(model, optimizer), or make the "
            "optimizer after prepare(model) and prepare it too"
        )

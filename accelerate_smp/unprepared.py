"""The error for an optimizer that was made before its model was sharded, and was not prepared with it: it would train
nothing.

Such an optimizer steps tensors that the model does not use any more and that never receive a gradient. So its first
step is an error; a prepared optimizer has been given the model's present parameters.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

_replaced = WeakIdKeyDictionary()  # parameters that a model had before it was sharded -> the name of its class
_prepared: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_hooks: list[Any] = []


@contextlib.contextmanager
def parameters_replaced(model: nn.Module) -> Iterator[None]:
    """Watch for optimizers that step parameters which ``model`` loses inside the block. Keeps none of them alive."""
    before = [TensorWeakRef(parameter) for parameter in model.parameters()]
    name = type(model).__name__
    yield
    now = {id(parameter) for parameter in model.parameters()}
    for reference in before:
        parameter = reference()
        if parameter is not None and id(parameter) not in now:
            _replaced[parameter] = name
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_refuse))


def is_prepared(optimizer: torch.optim.Optimizer) -> None:
    """Record that ``optimizer`` has been given the model's present parameters."""
    _prepared.add(optimizer)


def _refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if optimizer in _prepared:
        return
    old = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter in _replaced]
    if old:
        kind = type(optimizer).__name__
        raise ValueError(
            f"{kind} steps {len(old)} parameters that {_replaced[old[0]]} had before it was sharded, "
            "which would train nothing; write model, optimizer = accelerator.prepare(model, optimizer), or make the "
            "optimizer after prepare(model) and prepare it too"
        )

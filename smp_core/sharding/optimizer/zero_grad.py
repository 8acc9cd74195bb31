"""``zero_grad`` of modules: what an open window holds of their parameters is dropped too, as by an optimizer's.

A method of the instance, because every module of the model has one and their classes are not ours. It copies and
pickles as the plain method of the copy.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Drop = Callable[[Iterable[torch.Tensor], bool], None]


def drop_with_zero_grad(model: nn.Module, drop: Drop) -> None:
    """Let ``zero_grad`` of the model and of every module in it call ``drop`` (parameters, set_to_none) first."""
    for module in model.modules():
        module.zero_grad = _ZeroGrad(module, drop)  # type: ignore[method-assign]


class _ZeroGrad:
    def __init__(self, module: nn.Module, drop: Drop) -> None:
        self._module, self._drop = module, drop

    def __call__(self, set_to_none: bool = True) -> None:
        """Reset gradients of all the module's parameters, held by the open window or not."""
        self._drop(self._module.parameters(), set_to_none)
        _plain(self._module)(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _plain(memo[id(self._module)])

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module]]:
        return _plain, (self._module,)


def _plain(module: nn.Module) -> Callable[..., None]:
    return types.MethodType(type(module).zero_grad, module)

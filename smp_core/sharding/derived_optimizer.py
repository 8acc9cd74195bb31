"""Optimizers with methods of their own: one derived class for each kind of optimizer, one set of methods for each one.

A subclass, not attributes of the instance: Lightning derives its own wrapper's class from an optimizer's. Two
optimizers of one kind stay of one kind: Lightning's LearningRateMonitor, for one, counts them by their class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def override_methods(optimizer: torch.optim.Optimizer, methods: dict[str, Callable[..., Any]]) -> None:
    """Give ``optimizer`` these methods in the place of those it was given before, if any. They take it as the first
    argument and find the methods of its kind in :func:`kind_of`."""
    kind = kind_of(optimizer)
    optimizer.smp_methods = methods  # type: ignore[attr-defined]
    optimizer.__class__ = _derived(kind, tuple(sorted(methods)))


def kind_of(optimizer: torch.optim.Optimizer) -> Any:
    """The optimizer's class without what :func:`override_methods` has put on top of it."""
    return getattr(type(optimizer), "smp_kind", type(optimizer))


@functools.cache
def _derived(kind: type, names: tuple[str, ...]) -> type:
    methods: dict[str, Any] = {name: _overridden(name) for name in names}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "smp_kind": kind, **methods})


def _overridden(name: str) -> Callable[..., Any]:
    def method(this: Any, *args: Any, **kwargs: Any) -> Any:
        return this.smp_methods[name](this, *args, **kwargs)

    method.__name__ = name
    method.hooked = True  # type: ignore[attr-defined]  # torch wraps a class's step in its profiler unless it says so
    return method

"""What forwards keep beside parameters and buffers: containers, objects and generators in
attributes of modules, and what their hooks keep. Forwards before training put all of it
back; and tensors in it are a way past the model's outputs.

Private names: torch has no public way to look at hooks (``_forward_hooks``,
``_forward_pre_hooks``).
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn


def kept_by_forwards(model: nn.Module) -> list[Callable[[], None]]:
    """Copy the containers, generators and objects that a forward may write into, and
    Python's and NumPy's random states. Return what puts them back."""
    containers: dict[int, Any] = {}
    owners: dict[int, Any] = {}
    for _, _, value in _places(model):
        if type(value) in _COPIED:
            containers[id(value)] = value
        else:
            owners[id(value)] = value
    restores = [_COPIED[type(each)](each) for each in containers.values()]
    numbers = [(owner, _numbers(owner)) for owner in owners.values()]

    def restore_numbers() -> None:
        for owner, before in numbers:
            vars(owner).update(before)

    return [
        *restores,
        restore_numbers,
        functools.partial(random.setstate, random.getstate()),
        functools.partial(np.random.set_state, np.random.get_state()),
    ]


def numbers_of(model: nn.Module) -> dict[str, float]:
    """Return the numbers that modules have as attributes, by their places: those that
    each forward changes count calls."""
    found = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) in (int, float):
                found[f"{path}.{name}".removeprefix(".")] = value
    return found


class KeptTensors:
    """The tensors that forwards leave in attributes, containers and objects of modules
    and in what hooks keep: a step may take its loss of them, past what the model
    returns.

    Args:
        model: before these forwards; what it keeps already is none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {id(tensor): tensor for _, _, tensor in _tensors(model)}

    def found(self) -> list[tuple[str, nn.Module, torch.Tensor]]:
        """Return where each is kept ("layers.0.loss"), the module, and the tensor."""
        return [
            (place, module, tensor)
            for place, module, tensor in _tensors(self._model)
            if id(tensor) not in self._before
        ]


def _tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    for path, module in model.named_modules():
        # Layers of torch's keep weights that hooks have computed (weight_norm, prune).
        if {_package(kind) for kind in type(module).__mro__} <= _LIBRARIES:
            continue
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}".removeprefix("."), module, value
    for place, module, value in _places(model):
        held: Any = vars(value).values() if type(value) not in _COPIED else ()
        if isinstance(value, (list, collections.deque, set)):
            held = value
        elif isinstance(value, dict):
            held = value.values()
        for each in held:
            if isinstance(each, torch.Tensor):
                yield place, module, each


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield where a container, generator or object is that a module has as attribute, or
    that its hooks reach by closures, objects and globals; its module, and what it is.
    """
    # Objects of the packages that the model's own code is in; others may have threads.
    packages = {
        _package(kind) for module in model.modules() for kind in type(module).__mro__
    }
    packages -= _LIBRARIES
    for path, module in model.named_modules():
        values: list[tuple[str, Any]] = []
        for name, value in vars(module).items():
            is_own = type(value) in _COPIED or _package(type(value)) in packages
            if is_own and name not in _OF_TORCH:
                values.append((f"{path}.{name}".removeprefix("."), value))
        for hooks in ("_forward_hooks", "_forward_pre_hooks"):
            for hook in vars(module)[hooks].values():
                values += [(f"a hook of {path}", value) for value in _reached(hook)]
        for place, value in values:
            if type(value) in _COPIED:
                yield place, module, value
            elif _is_object(value):
                yield place, module, value
                # One level of the object's own attributes.
                for name, each in vars(value).items():
                    if type(each) in _COPIED and name not in _OF_TORCH:
                        yield f"{place} ({name})", module, each


def _package(kind: type) -> str:
    return kind.__module__.split(".")[0]


def _is_object(value: Any) -> bool:
    """Return whether a value is an object that may count in its attributes."""
    return hasattr(value, "__dict__") and not isinstance(
        value, (type, types.ModuleType, types.FunctionType, torch.Tensor)
    )


def _of_container(kept: Any) -> Callable[[], None]:
    before = copy.copy(kept)
    fill = kept.extend if isinstance(kept, (list, collections.deque)) else kept.update

    def put_back() -> None:
        kept.clear()
        fill(before)

    return put_back


def _of_array(kept: np.ndarray) -> Callable[[], None]:
    return functools.partial(np.copyto, kept, kept.copy())


def _of_numpy(kept: np.random.Generator) -> Callable[[], None]:
    bits = kept.bit_generator
    return functools.partial(setattr, bits, "state", bits.state)


_COPIED: dict[type, Callable[[Any], Callable[[], None]]] = {
    list: _of_container,
    collections.deque: _of_container,
    dict: _of_container,
    collections.OrderedDict: _of_container,
    collections.defaultdict: _of_container,
    collections.Counter: _of_container,
    set: _of_container,
    np.ndarray: _of_array,
    np.random.Generator: _of_numpy,
    np.random.RandomState: lambda kept: functools.partial(
        kept.set_state, kept.get_state()
    ),
    random.Random: lambda kept: functools.partial(kept.setstate, kept.getstate()),
    torch.Generator: lambda kept: functools.partial(kept.set_state, kept.get_state()),
}
"""Classes of what is copied -> makes a copy of one, and returns what puts it back."""

_LIBRARIES = {"torch", "smp_core", "lightning", "pytorch_lightning", "builtins"}


def _reached(hook: Any) -> Iterator[Any]:
    """Yield what a user's hook refers to."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    function = getattr(hook, "__func__", hook)
    module = getattr(function, "__module__", None) or type(hook).__module__
    if module.split(".")[0] in ("torch", "smp_core"):
        return
    code = getattr(function, "__code__", None)
    values = [owner if owner is not None else hook]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            values.append(cell.cell_contents)
    if code is not None:
        values += [function.__globals__.get(name) for name in code.co_names]
    yield from values


def _numbers(owner: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(owner).items()
        if isinstance(value, (int, float)) and name not in _OF_TORCH
    }


# Attributes of every module, which are none of a hook's.
_OF_TORCH = vars(nn.Module()).keys()

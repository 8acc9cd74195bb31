"""The buffers that are saved with a model, and where in its chain of blocks they work;
and the state of a model that a forward before training leaves as it was.

Private names: torch has no public way to ask which buffers are not saved
(``_non_persistent_buffers_set``), to put back one that was None (``_buffers``), to
look at hooks (``_forward_hooks``, ``_forward_pre_hooks``), and to
ask whether a tensor without values was written to (``_version``).
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

from smp_core.plan.chain.stand_ins import Early

_PLAIN = (type(None), bool, int, float, str, torch.Tensor)
# Transformers' word for its hooks that collect outputs, which stay behind a forward as
# well: they would be added twice.
_HOOKED = "_output_capturing_hooks_installed"


def _saved(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yield a buffer's name in the model, its module, its name in that, and the
    buffer."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, module, name, buffer


def places_of_buffers(
    model: nn.Module, early: list[Early], blocks: tuple[str, ...]
) -> Iterator[tuple[str, int | None]]:
    """Yield each one's name and place, as :class:`smp_core.plan.chain.chain.Chain` has
    them.

    Args:
        early: calls that were over before the first block.
        blocks: their names, in the order they run in.
    """
    before = {module for module, *_ in early}
    # A buffer works where its module does: in a block, before them, or elsewhere.
    inside = {
        module: number
        for number, name in enumerate(blocks)
        for module in model.get_submodule(name).modules()
    }
    for full_name, module, *_ in _saved(model):
        yield full_name, inside.get(module, -1 if module in before else None)


@contextlib.contextmanager
def state_restored(model: nn.Module) -> Iterator[list[str]]:
    """Restore what forwards inside may count or cache in, also where one of them fails:
    buffers, changed in place (statistics) or replaced, attributes of modules (``self.steps
    += 1``, ``self.losses.append(...)``, a generator of their own), Python's and NumPy's
    random states, and what hooks of the user's keep (activations, counts).

    Yields:
        a list that has the names of saved buffers that were changed, at the end.
    """
    modules = list(model.modules())
    attributes = [_plain(module) for module in modules]
    registered = [dict(vars(module)["_buffers"]) for module in modules]
    values = [
        (buffer, buffer.clone())
        for buffers in registered
        for buffer in buffers.values()
        if buffer is not None
    ]
    restores = [_kept(model), _of_python(), _of_numpys_own()]
    saved = {name: (each, _version(each)) for name, _, _, each in _saved(model)}
    changed: list[str] = []
    try:
        yield changed
        for name, _, _, each in _saved(model):
            before, version = saved.get(name, (each, _version(each)))
            if each is not before or _version(each) != version:
                changed.append(name)
    finally:
        # What was added goes, and the rest gets its value back.
        for module, plain, buffers in zip(modules, attributes, registered, strict=True):
            for name in _plain(module).keys() - plain.keys():
                del vars(module)[name]
            vars(module).update(plain)
            vars(module)["_buffers"].clear()
            vars(module)["_buffers"].update(buffers)
        for restore in restores:
            restore()
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def _version(buffer: torch.Tensor) -> int:
    """Return the number of writes into a buffer; inference tensors count none."""
    return 0 if buffer.is_inference() else buffer._version


def _plain(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes that a forward may count or cache in."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) and name != _HOOKED
    }


def _kept(model: nn.Module) -> Callable[[], None]:
    """Copy what a forward can write into beside tensors: the containers, generators and
    objects that modules have as attributes, and that their hooks reach by closures,
    objects and globals. Return what puts it back."""
    found: dict[int, Any] = {}
    # Objects of the packages that the model's own code is in; others may have threads.
    packages = {_package(type(module)) for module in model.modules()} - _LIBRARIES
    for module in model.modules():
        values = []
        for name, value in vars(module).items():
            is_own = type(value) in _COPIED or _package(type(value)) in packages
            if is_own and name not in _OF_TORCH:
                values.append(value)
        for hooks in ("_forward_hooks", "_forward_pre_hooks"):
            for hook in vars(module)[hooks].values():
                values += _reached(hook)
        for value in values:
            if type(value) in _COPIED or _is_object(value):
                found[id(value)] = value
    owners = [each for each in found.values() if type(each) not in _COPIED]
    # One level of the objects' own attributes.
    for owner in owners:
        for name, each in vars(owner).items():
            if type(each) in _COPIED and name not in _OF_TORCH:
                found[id(each)] = each
    restores = [
        _COPIED[type(each)](each) for each in found.values() if type(each) in _COPIED
    ]
    numbers = [(owner, _numbers(owner)) for owner in owners]

    def restore() -> None:
        for put_back in restores:
            put_back()
        for owner, before in numbers:
            vars(owner).update(before)

    return restore


def _package(kind: type) -> str:
    return kind.__module__.split(".")[0]


def _is_object(value: Any) -> bool:
    """Return whether a value is an object that may count in its attributes."""
    return hasattr(value, "__dict__") and not isinstance(
        value, (type, types.ModuleType, types.FunctionType, torch.Tensor)
    )


def _of_list(kept: Any) -> Callable[[], None]:
    before = copy.copy(kept)

    def put_back() -> None:
        kept.clear()
        kept.extend(before)

    return put_back


def _of_mapping(kept: Any) -> Callable[[], None]:
    before = copy.copy(kept)

    def put_back() -> None:
        kept.clear()
        kept.update(before)

    return put_back


def _of_python() -> Callable[[], None]:
    return functools.partial(random.setstate, random.getstate())


def _of_numpys_own() -> Callable[[], None]:
    return functools.partial(np.random.set_state, np.random.get_state())


def _of_array(kept: np.ndarray) -> Callable[[], None]:
    return functools.partial(np.copyto, kept, kept.copy())


def _of_numpy(kept: np.random.Generator) -> Callable[[], None]:
    bits = kept.bit_generator
    return functools.partial(setattr, bits, "state", bits.state)


_COPIED: dict[type, Callable[[Any], Callable[[], None]]] = {
    list: _of_list,
    collections.deque: _of_list,
    dict: _of_mapping,
    collections.OrderedDict: _of_mapping,
    collections.defaultdict: _of_mapping,
    collections.Counter: _of_mapping,
    set: _of_mapping,
    np.ndarray: _of_array,
    np.random.Generator: _of_numpy,
    np.random.RandomState: lambda kept: functools.partial(
        kept.set_state, kept.get_state()
    ),
    random.Random: lambda kept: functools.partial(kept.setstate, kept.getstate()),
    torch.Generator: lambda kept: functools.partial(kept.set_state, kept.get_state()),
}
"""Classes of what is copied -> makes a copy of one, and returns what puts it back."""

_LIBRARIES = {"torch", "smp_core", "lightning", "pytorch_lightning"}


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

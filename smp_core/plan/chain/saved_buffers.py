"""The buffers that are saved with a model, and where in its chain of blocks they work;
and the state of a model that a forward before training leaves as it was.

Private names: torch has no public way to ask which buffers are not saved
(``_non_persistent_buffers_set``), to put back one that was None (``_buffers``), to
look at hooks (``_forward_hooks``, ``_forward_pre_hooks``), and to
ask whether a tensor without values was written to (``_version``).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

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
    buffers, changed in place (statistics) or replaced, plain attributes of modules
    (``self.steps += 1``), and what hooks of the user's keep (activations, counts).

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
    restore_kept = _kept_by_hooks(model)
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
        restore_kept()
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


def _kept_by_hooks(model: nn.Module) -> Callable[[], None]:
    """Copy what the hooks of a model can reach by their closures, objects and globals;
    return what puts it back."""
    found: dict[int, Any] = {}
    for module in model.modules():
        for hooks in ("_forward_hooks", "_forward_pre_hooks"):
            for hook in vars(module)[hooks].values():
                for value in _reached(hook):
                    found[id(value)] = value
    containers = [each for each in found.values() if isinstance(each, (list, dict))]
    owners = [each for each in found.values() if not isinstance(each, (list, dict))]
    for owner in owners:
        containers += [
            each
            for name, each in vars(owner).items()
            if type(each) in (list, dict) and name not in _OF_TORCH
        ]
    copies = [(each, copy.copy(each)) for each in containers]
    numbers = [(owner, _numbers(owner)) for owner in owners]

    def restore() -> None:
        for container, before in copies:
            container.clear()
            if isinstance(container, list):
                container.extend(before)
            else:
                container.update(before)
        for owner, before in numbers:
            vars(owner).update(before)

    return restore


def _reached(hook: Any) -> Iterator[Any]:
    """Yield the plain lists, dictionaries and objects of a user's hook."""
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
    for value in values:
        is_object = hasattr(value, "__dict__") and not isinstance(
            value, (type, types.ModuleType, types.FunctionType, torch.Tensor)
        )
        if type(value) in (list, dict) or is_object:
            yield value


def _numbers(owner: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(owner).items()
        if isinstance(value, (int, float)) and name not in _OF_TORCH
    }


# Attributes of every module, which are none of a hook's.
_OF_TORCH = vars(nn.Module()).keys()

"""The buffers that are saved with a model, and where in its chain of blocks they work.

Private names: torch has no public way to ask which buffers are not saved
(``_non_persistent_buffers_set``), to put back one that was None (``_buffers``), and to
ask whether a tensor without values was written to (``_version``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from smp_core.plan.chain.stand_ins import Early


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
    inside = {
        module: number
        for number, name in enumerate(blocks)
        for module in model.get_submodule(name).modules()
    }
    for full_name, module, *_ in _saved(model):
        yield full_name, inside.get(module, -1 if module in before else None)


@contextlib.contextmanager
def buffers_restored(model: nn.Module) -> Iterator[list[str]]:
    """Restore what forwards inside may change: buffers, saved or not (statistics), and
    plain attributes of modules (counters, a state that goes from call to call).

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
    saved = {name: (each, each._version) for name, _, _, each in _saved(model)}
    changed: list[str] = []
    yield changed
    for name, _, _, each in _saved(model):
        before, version = saved.get(name, (each, each._version))
        if each is not before or each._version != version:
            changed.append(name)
    for module, plain, buffers in zip(modules, attributes, registered, strict=True):
        for name in _plain(module).keys() - plain.keys():
            del vars(module)[name]
        vars(module).update(plain)
        vars(module)["_buffers"].clear()
        vars(module)["_buffers"].update(buffers)
    with torch.no_grad():
        for buffer, value in values:
            buffer.copy_(value)


def _plain(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes that are numbers, texts or tensors."""
    return {
        name: value
        for name, value in vars(module).items()
        if value is None or isinstance(value, (int, float, str, torch.Tensor))
    }

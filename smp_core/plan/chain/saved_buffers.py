"""The buffers that are saved with a model, and where in its chain of blocks they work;
and the state of a model that a forward before training leaves as it was.

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

from smp_core.plan.chain.kept import kept_by_forwards
from smp_core.plan.chain.stand_ins import Early

EXTRA_STATE = "_extra_state"
"""The last part of an extra state's name in a state dict."""
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
    """Yield the name and place of each, and of what modules save as extra states, as
    :class:`smp_core.plan.chain.chain.Chain` has them.

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
    # What a module saves beside its tensors is on the same stage.
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            place = inside.get(module, -1 if module in before else None)
            yield f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE, place


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
    restores = kept_by_forwards(model)
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

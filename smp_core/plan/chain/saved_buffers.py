"""The buffers that are saved with a model, and where in its chain of blocks they work;
and the state of a model that a forward before training leaves as it was.

Private name: torch has no public way to ask which buffers are not saved
(``_non_persistent_buffers_set``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
def state_restored(model: nn.Module) -> Iterator[None]:
    """Restore what forwards inside may count or cache in, also where one of them fails:
    buffers, changed in place (statistics) or replaced, and plain attributes of modules
    (``self.steps += 1``)."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    attributes = [(module, _plain(module)) for module in model.modules()]
    try:
        yield
    finally:
        # Attributes that were added go, and the others get their value back.
        for module, values in attributes:
            for name in _plain(module).keys() - values.keys():
                delattr(module, name)
            vars(module).update(values)
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                setattr(module, name, buffer)


def _plain(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes that a forward may count or cache in."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) and name != _HOOKED
    }

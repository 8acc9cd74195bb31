"""The buffers that are saved with a model, and where in its chain of blocks they work.

Private name: torch has no public way to ask which buffers are not saved
(``_non_persistent_buffers_set``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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
    # A buffer works where its module does: in a block, before them, or elsewhere.
    inside = {
        module: number
        for number, name in enumerate(blocks)
        for module in model.get_submodule(name).modules()
    }
    for full_name, module, *_ in _saved(model):
        yield full_name, inside.get(module, -1 if module in before else None)


@contextlib.contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Restore all buffers, which forwards inside may change in place (statistics) or
    replace (``self.steps = self.steps + 1``), also where one of them fails."""
    before = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in before:
                buffer.copy_(value)
                setattr(module, name, buffer)

"""Buffers that a recomputed forward reads and changes: statistics of batch norm,
counters, codebooks.

A recomputation reads what the forward read, and what it does to buffers is dropped:
they change once in each forward, as without recomputation. (``torch.utils.checkpoint``
by itself lets them change twice, and lets the recomputation read what the forward
left.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SMALL = 65_536
"""Elements up to which a buffer is copied before each forward; a larger one only where
the first forward, or a later one by operations that count it, wrote into it."""

Place = tuple[nn.Module, str]


class ForwardWithBuffers:
    """Call ``function``, the forward of a module, first once and then as its
    recomputation.

    Args:
        places: the module's buffers.
        written: of these, large ones that an earlier forward wrote into; None: there
            was no forward yet. Returned by :meth:`written` after the first call.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        places: list[Place],
        written: set[int] | None,
    ) -> None:
        self._function = function
        self._places = places
        self._written = written
        self._before: dict[int, torch.Tensor] | None = None
        self._lost: set[int] = set()

    def __call__(self, *args: Any) -> Any:
        return (
            self._first(args)
            if self._before is None
            else self._again(self._before, args)
        )

    def written(self) -> set[int]:
        """Return the buffers, by number, that a forward wrote into so far."""
        return (self._written or set()) | self._lost

    def _first(self, args: tuple[Any, ...]) -> Any:
        # What there was, and copies of what the forward may write into. A tensor's
        # _version counts most writes, but not batch norm's, nor those into its `.data`.
        there = {number: getattr(*place) for number, place in enumerate(self._places)}
        versions = {
            number: tensor._version
            for number, tensor in there.items()
            if tensor is not None
        }
        copies = {
            number: there[number].clone()
            for number in versions
            if self._may_be_written(number, there[number])
        }
        output = self._function(*args)
        # What it changed: it wrote into a buffer, or put another tensor in its place.
        self._before = {}
        for number, tensor in there.items():
            if getattr(*self._places[number]) is not tensor:
                self._before[number] = tensor
                continue
            if tensor is None:
                continue
            copy = copies.get(number)
            is_large = tensor.numel() > SMALL
            is_written = tensor._version != versions[number]
            if copy is not None and is_large and not is_written:  # once, as it waits
                is_written = number in self.written() or _differ(copy, tensor)
            if is_written:
                self._lost.add(number)
            if copy is not None and (is_written or not is_large):
                self._before[number] = copy
        return output

    def _may_be_written(self, number: int, tensor: torch.Tensor) -> bool:
        return (
            self._written is None or number in self._written or tensor.numel() <= SMALL
        )

    def _again(self, before: dict[int, torch.Tensor], args: tuple[Any, ...]) -> Any:
        lost = self._lost - before.keys()
        if lost:
            module, name = self._places[min(lost)]
            raise RuntimeError(
                f"{type(module).__name__}.{name} was written into by a forward that is recomputed, for the first time "
                "now, and what it was before is gone; leave the module out of activations={'checkpoint': ...}"
            )
        # What the model has now comes back afterwards, whatever happens.
        left = {number: getattr(*self._places[number]) for number in before}
        try:
            for number, tensor in before.items():
                setattr(
                    *self._places[number], tensor if tensor is None else tensor.clone()
                )
            return self._function(*args)
        finally:
            for number, tensor in left.items():
                setattr(*self._places[number], tensor)


def _differ(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    # Rehearsals have tensors without values, of a class of their own.
    if copy.is_meta or type(copy) is not torch.Tensor:
        return False
    return not torch.equal(copy, tensor)


def buffer_places(module: nn.Module) -> list[Place]:
    """Return where the buffers of a module are."""
    return [
        (inner, name)
        for inner in module.modules()
        for name, _ in inner.named_buffers(recurse=False)
    ]

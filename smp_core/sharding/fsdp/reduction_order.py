"""The order in which units are reduced when a backward pass is over, the same on all ranks.

FSDP2 reduces a unit when its inputs have their gradients, the last unit of the forward first. Units whose inputs want
none (those before anything trainable) have no such moment: FSDP2 reduces them at the end of the pass, a root first.
Whether a unit's inputs want gradients may depend on the branch that a rank took before it (embeddings that an image
tower adds to, while the rest is frozen), so that ranks would reduce in different orders. Here the units that are left
are reduced like the others, the last of the forward first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


class ReductionOrder:
    """The units of one model that are reduced at the end of the present pass, in the order of forward."""

    def __init__(self) -> None:
        self._left: dict[object, Callable[[], None]] = {}

    def used(self, unit: object, inputs: Any, reduce: Callable[[], None]) -> None:
        """Take note of a forward that a backward pass may follow.

        Args:
            reduce: reduces the unit; what FSDP2 calls itself.
        """
        self._left.pop(unit, None)
        if not _want_gradient(inputs):
            self._left[unit] = reduce

    def reduce_left(self, unit: object) -> bool:
        """Reduce all that are left, where FSDP2 begins with ``unit``; False: it is no such unit."""
        if unit not in self._left:
            return False
        left, self._left = self._left, {}
        for reduce in reversed(left.values()):
            reduce()
        return True


def _want_gradient(inputs: Any) -> bool:
    """Return whether FSDP2 finds a tensor among a forward's inputs that wants a gradient."""
    if isinstance(inputs, torch.Tensor):
        return inputs.requires_grad
    if isinstance(inputs, (tuple, list)):
        return any(map(_want_gradient, inputs))
    if isinstance(inputs, Mapping):
        return any(map(_want_gradient, inputs.values()))
    if dataclasses.is_dataclass(inputs):
        return any(_want_gradient(getattr(inputs, field.name)) for field in dataclasses.fields(inputs))
    return False

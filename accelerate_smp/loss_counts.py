"""Whether a loss is divided by the count of targets that it is given.

Trainer takes a loss that was given the count of a whole optimizer step for a part of
the step's loss, which adds up; a model that takes the count and does not divide by it
(BERT's classifiers) gives a mean all the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from smp_core.checkpoint import iterate_tensors


class ReadsValue(TorchFunctionMode):
    """Sees whether anything is computed with the value of a tensor; where it lies and
    what it is does not count."""

    _OTHER = frozenset(
        (
            "__get__",
            "to",
            "cpu",
            "cuda",
            "contiguous",
            "clone",
            "detach",
            "reshape",
            "view",
            "size",
            "dim",
            "is_floating_point",
        )
    )

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._copies = [tensor]
        self.seen = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        # A copy of the count stands for the count; computing with either is use.
        given = iterate_tensors([args, kwargs])
        if any(tensor is copy for _, tensor in given for copy in self._copies):
            name = function.__name__
            # Pipeline stages compare the bytes of what they are called with.
            compared = name == "numpy" and args[0].dtype == torch.uint8
            if name not in self._OTHER and not compared:
                self.seen = True
            elif isinstance(result, torch.Tensor):
                self._copies.append(result)
        return result


@contextlib.contextmanager
def seeing_use(count: torch.Tensor) -> Iterator[ReadsValue]:
    """Let ``count`` be watched inside the block, where nothing runs compiled: compiled
    code calls no functions that a mode would see."""
    with torch.compiler.set_stance("force_eager"), ReadsValue(count) as reads:
        yield reads

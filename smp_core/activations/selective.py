"""Selective checkpointing: outputs that are expensive to compute are kept, cheap ones
are recomputed.

The kept outputs are those of matrix products, convolutions and attention (the split
between the two kinds of operations is Megatron's, arXiv 2205.05198, section 5), and of
communication: a collective is never repeated in backward, but for those between tensor
ranks, whose outputs are whole inputs of layers. An operator that is not torch's own is
kept after :func:`keep_outputs_of`. The other operators (norms, activation functions,
dropout, element-wise arithmetic, casts) are recomputed from the kept outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

# _python_dispatch is where torch documents it to be.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from smp_core.plan import is_kept, keep_outputs_of

__all__ = [
    "ContextPair",
    "is_kept",
    "keep_outputs_of",
    "kept_outputs_shown_to",
    "selective_contexts",
]


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if is_kept(operator)
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def _all_else(
    context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    kept = is_kept(operator, in_all_modes=True)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def all_else_contexts() -> tuple[
    AbstractContextManager[Any], AbstractContextManager[Any]
]:
    """Return the same for modules that recompute all but what is never sent twice."""
    forward, recomputation = create_selective_checkpoint_contexts(_all_else)
    return forward, recomputation


def selective_contexts() -> tuple[
    AbstractContextManager[Any], AbstractContextManager[Any]
]:
    """Return the contexts of forward and of recomputation, the ``context_fn`` of
    ``torch.utils.checkpoint``."""
    forward, recomputation = create_selective_checkpoint_contexts(_policy)
    # Only tests and measurements look.
    if _observers:
        return _observed(forward), recomputation
    return forward, recomputation


_observers: list[Callable[[Tensor], object]] = []


@contextlib.contextmanager
def kept_outputs_shown_to(observer: Callable[[Tensor], object]) -> Iterator[None]:
    """Show every tensor that a selectively checkpointed module keeps inside the block
    to ``observer``."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@contextlib.contextmanager
def _observed(forward: AbstractContextManager[Any]) -> Iterator[None]:
    with _Observed(), forward:
        yield


class _Observed(TorchDispatchMode):
    """A dispatch mode below the one that keeps outputs: it sees the operators that
    run."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_kept(func):
            outputs = result if isinstance(result, (tuple, list)) else [result]
            for tensor in outputs:
                if isinstance(tensor, Tensor):
                    for observer in _observers:
                        observer(tensor)
        return result


ContextPair = Callable[
    [], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
]

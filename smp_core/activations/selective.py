"""Selective checkpointing: outputs that are expensive to compute are kept, cheap ones are recomputed.

The kept outputs are those of matrix products, convolutions and attention (the split between the two kinds of operations
is Megatron's, arXiv 2205.05198, section 5), and of communication: a collective is never repeated in backward. An
operator that is not torch's own is kept after :func:`keep_outputs_of`. The other operators (norms, activation
functions, dropout, element-wise arithmetic, casts) are recomputed from the kept outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # _python_dispatch is where torch documents it to be
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_KEPT_NAMES: dict[str, tuple[str, ...]] = {
    "aten": (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "addmv",
        "mv",
        "dot",
        "_scaled_mm",
        "_scaled_grouped_mm",
        "_grouped_mm",
        "_int_mm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
        "_cudnn_attention_forward",
    ),
    "_c10d_functional": (
        "all_reduce",
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
        "all_to_all_single",
        "broadcast",
    ),
}


def _ops_of_torch() -> set[Any]:
    """Return the operators of the names above that this torch has."""
    found: set[Any] = set()
    for space, names in _KEPT_NAMES.items():
        operators = getattr(torch.ops, space)
        packets = [getattr(operators, name) for name in names if hasattr(operators, name)]
        found.update(packet.default for packet in packets if "default" in packet.overloads())
    if hasattr(torch.ops.higher_order, "flex_attention"):
        found.add(torch.ops.higher_order.flex_attention)
    return found


_kept: set[Any] = _ops_of_torch()


def keep_outputs_of(*operators: Any) -> None:
    """Keep the outputs of these operators under selective checkpointing from now on: backward never runs them again.

    It is meant for operators that communicate or are expensive (``keep_outputs_of(torch.ops.smp.context_attention)``).
    Call it where the operator is defined.

    Args:
        operators: ``torch.ops.<space>.<name>``, all its overloads, or one overload of it. Their outputs must not be
            changed in place later.
    """
    for operator in operators:
        if hasattr(operator, "overloads"):
            _kept.update(getattr(operator, overload) for overload in operator.overloads())
        else:
            _kept.add(operator)


def is_kept(operator: Any) -> bool:
    """Tell whether selective checkpointing keeps the outputs of an operator's overload."""
    return operator in _kept


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of forward and of recomputation, the ``context_fn`` of ``torch.utils.checkpoint``."""
    forward, recomputation = create_selective_checkpoint_contexts(_policy)
    if _observers:
        return _observed(forward), recomputation
    return forward, recomputation


_observers: list[Callable[[torch.Tensor], object]] = []


@contextlib.contextmanager
def kept_outputs_shown_to(observer: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Show every tensor that a selectively checkpointed module keeps inside the block to ``observer``."""
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
    """A dispatch mode below the one that keeps outputs: it sees the operators that run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_kept(func):
            outputs = result if isinstance(result, (tuple, list)) else [result]
            for tensor in outputs:
                if isinstance(tensor, torch.Tensor):
                    for observer in _observers:
                        observer(tensor)
        return result


ContextPair = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

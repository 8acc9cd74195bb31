"""The operators whose outputs selective checkpointing keeps: matrix products,
convolutions, attention (the split between the two kinds of operations is Megatron's,
arXiv 2205.05198, section 5), and communication."""

from __future__ import annotations

from typing import Any

import torch

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
    # Names that an older torch lacks are passed over.
    for space, names in _KEPT_NAMES.items():
        operators = getattr(torch.ops, space)
        packets = [
            getattr(operators, name) for name in names if hasattr(operators, name)
        ]
        found.update(
            packet.default for packet in packets if "default" in packet.overloads()
        )
    if hasattr(torch.ops.higher_order, "flex_attention"):
        found.add(torch.ops.higher_order.flex_attention)
    return found


_kept: set[Any] = _ops_of_torch()


_kept_in_all_modes: set[Any] = set()


def keep_outputs_of(*operators: Any, in_all_modes: bool = False) -> None:
    """Keep the outputs of these operators under selective checkpointing from now on:
    backward never runs them again.

    It is meant for operators that communicate or are expensive
    (``keep_outputs_of(torch.ops.smp.context_attention)``). Call it where the operator
    is defined.

    Args:
        operators: ``torch.ops.<space>.<name>``, all its overloads, or one overload of
            it. Their outputs must not be changed in place later.
        in_all_modes: modules that recompute everything else, and have units inside,
            keep them too.
    """
    for operator in operators:
        # A packet stands for all its overloads.
        is_packet = hasattr(operator, "overloads")
        found = (
            {getattr(operator, each) for each in operator.overloads()}
            if is_packet
            else {operator}
        )
        _kept.update(found)
        _kept_in_all_modes.update(found if in_all_modes else ())


def is_kept(operator: Any, in_all_modes: bool = False) -> bool:
    """Return whether selective checkpointing, or recomputation of all else, keeps the
    outputs of an operator's overload."""
    return operator in (_kept_in_all_modes if in_all_modes else _kept)

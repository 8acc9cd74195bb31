"""Adapters of split layers: PEFT's LoRA, ``base(x) + B(A(x)) * scaling``, follows the
role of its base layer.

    base      A [r, inputs]                                     B [outputs, r]
    column    whole on every rank; gradients added up where     column, in the same stretches of outputs
              ranks see other tokens or other outputs of B
    row       row: each rank's inputs, outputs added up         whole; gradients added up where tokens are split

r features are few, so what A and B send beside the base layer is small. A is found by
its container's names (``lora_A``, ``lora_B``: modules by the name of an adapter); this
file does not import PEFT.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from smp_core.tensor_parallel.roles import Split

_PARTS = ("lora_A", "lora_B")


def has_adapters(module: nn.Module) -> bool:
    """Return whether a module is a layer of PEFT around another one."""
    return hasattr(module, "base_layer")


def with_adapters(split: Split) -> Iterator[Split]:
    """List the base layer and the adapters of a layer that PEFT has wrapped, with their
    roles; any other layer itself.

    Raises:
        ValueError: adapters that are not plain LoRA.
    """
    if not has_adapters(split.module):
        yield split
        return
    layer: Any = split.module
    _require_lora(split)
    yield replace(split, name=f"{split.name}.base_layer", module=layer.base_layer)
    column = split.role in ("column", "column_gather")
    # Several adapters may stand beside one layer; each follows the base layer.
    for adapter in layer.lora_A:
        first = replace(
            split, name=f"{split.name}.lora_A.{adapter}", module=layer.lora_A[adapter]
        )
        second = replace(
            split, name=f"{split.name}.lora_B.{adapter}", module=layer.lora_B[adapter]
        )
        yield replace(first, role="adapter", blocks=1) if column else first
        yield second if column else replace(second, role="adapter", blocks=1)


def refuse_later_adapters(split: Split) -> None:
    """Let a layer that PEFT has wrapped refuse adapters that are added to it from now
    on: their matrices would be whole beside a split layer."""
    known = frozenset(getattr(split.module, "lora_A", ()))

    def refuse(layer: Any, *_: Any) -> None:
        later = [
            adapter
            for adapter in layer.active_adapters
            if adapter in layer.lora_A and adapter not in known
        ]
        if later:
            raise ValueError(
                f"tensor_parallel: adapter {later[0]!r} was added to {split.name} after the layer was split over "
                "tensor ranks; add it (add_adapter, load_adapter) before prepare(model), or write "
                "tensor_parallel_degree=1"
            )

    split.module.register_forward_pre_hook(refuse)


def _require_lora(split: Split) -> None:
    layer: Any = split.module
    kind = f"{type(layer).__module__.rpartition('.')[0]}.{type(layer).__name__}"
    # Only plain LoRA is known to be the product of two linear layers.
    if not all(
        isinstance(getattr(layer, name, None), nn.ModuleDict) for name in _PARTS
    ) or not len(layer.lora_A):
        what = f"{kind} around a layer"
    elif getattr(layer, "lora_variant", None):
        what = "a variant of LoRA (use_dora, for example)"
    elif split.role not in ("column", "column_gather", "row", "row_split"):
        what = f"LoRA on a layer whose role is {split.role!r}"
    else:
        return
    raise ValueError(
        f"tensor_parallel: {split.name}: {what} is not built yet; leave it out of the adapters' target_modules, write "
        "plain LoRA, or tensor_parallel_degree=1"
    )


def is_of_adapter(name: str) -> bool:
    """Return whether a layer is an adapter's, by its name."""
    parts = name.split(".")
    return len(parts) > 2 and parts[-2] in _PARTS


def around(name: str) -> str:
    """Return the name of the module that a layer is in: of what PEFT wraps, the module
    around it."""
    # PEFT's containers do not count as modules around the layer.
    parts = name.split(".")
    if len(parts) > 1 and parts[-1] == "base_layer":
        parts = parts[:-1]
    elif is_of_adapter(name):
        parts = parts[:-2]
    return ".".join(parts[:-1])

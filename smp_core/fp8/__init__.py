"""The FP8 training: delayed scaling, FP8 layers, FP8 weight gathering. Only the recipe is loaded at once (no torch)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smp_core.config.fp8_recipe import Fp8Recipe

if TYPE_CHECKING:
    from smp_core.fp8.convert import Fp8Model, convert_to_fp8
    from smp_core.fp8.linear import Float8Linear
    from smp_core.fp8.scaling import Fp8State

_LAZY = {"Fp8Model": "convert", "convert_to_fp8": "convert", "Float8Linear": "linear", "Fp8State": "scaling"}

__all__ = ["Float8Linear", "Fp8Model", "Fp8Recipe", "Fp8State", "convert_to_fp8"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)

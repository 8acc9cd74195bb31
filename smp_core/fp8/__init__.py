"""The FP8 training: delayed scaling, FP8 layers, FP8 weight gathering. Only the recipe is loaded at once (no torch)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from smp_core.config import Fp8Recipe

if TYPE_CHECKING:
    from smp_core.fp8.backends import convert_with
    from smp_core.fp8.convert import Fp8Model, convert_to_fp8
    from smp_core.fp8.gathered import WeightGather
    from smp_core.fp8.linear import SITES, Float8Linear, unquantized
    from smp_core.fp8.monitoring import Fp8Probe, Fp8Watch
    from smp_core.fp8.rules import FP8
    from smp_core.fp8.scaling import Fp8State

_PLACES = {
    "convert_to_fp8": "convert",
    "convert_with": "backends",
    "Float8Linear": "linear",
    "FP8": "rules",
    "Fp8Model": "convert",
    "Fp8Probe": "monitoring",
    "Fp8State": "scaling",
    "Fp8Watch": "monitoring",
    "SITES": "linear",
    "unquantized": "linear",
    "WeightGather": "gathered",
}

__all__ = [
    "convert_to_fp8",
    "convert_with",
    "Float8Linear",
    "FP8",
    "Fp8Model",
    "Fp8Probe",
    "Fp8Recipe",
    "Fp8State",
    "Fp8Watch",
    "SITES",
    "unquantized",
    "WeightGather",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

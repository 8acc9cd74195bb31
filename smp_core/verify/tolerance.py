"""Tolerances: how far a layout may be from one process, by the dtype that it computes
in.

Layouts add the same numbers up in another order. In float64 that changes the last of 16
digits, so that a difference is a defect. In float32 it changes the seventh, and
optimizers that divide by a gradient's own size (Adam) make a change of a whole update
of what rounding left of a gradient near zero; in half precision it changes the third.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tolerance:
    """Limits of relative differences.

    Attributes:
        dtype: in words.
        activations: of sums over a module's inputs and outputs in the first step, of
            their magnitudes' sum.
        loss: of each step's loss, of its value.
        gradients: of gradient norms, and of each parameter's gradient, of its norm.
        weights: of each parameter at the end, of the norm of what training changed in
            it.
        floor: of a parameter's gradient, relative to the root mean square of all: a
            smaller one may be rounding, and is held against the floor.
    """

    dtype: str
    activations: float
    loss: float
    gradients: float
    weights: float
    floor: float


_FLOAT64 = Tolerance("float64", 1e-9, 1e-9, 1e-7, 1e-5, 1e-6)
_FLOAT64_AND_32 = Tolerance("float64, parts in float32", 1e-6, 1e-6, 1e-5, 1e-2, 3e-2)
_FLOAT32 = Tolerance("float32", 1e-4, 1e-4, 2e-3, 5e-2, 1e-3)
_HALF = Tolerance("half precision", 3e-2, 2e-2, 1e-1, 5e-1, 1e-1)


def tolerance_of(facts: Mapping[str, Any], float64: bool) -> Tolerance:
    """Return the limits for what a run computes in.

    Args:
        facts: of a record: dtypes, precision, the knobs that send or multiply fewer
            bits, and whether activations are in float32 where float64 was asked for.
    """
    names = [str(facts.get("precision", "")), *facts.get("dtypes", [])]
    if facts.get("lossy") or any("16" in name for name in names):
        return _HALF
    if not float64:
        return _FLOAT32
    return _FLOAT64_AND_32 if facts.get("float32 inside") else _FLOAT64

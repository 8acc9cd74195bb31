"""Gradients from the first micro-batch of a window to the optimizer step.

An AccumulationWindow holds a UnitWindow for each unit: gradients are added up, summed across replicas, divided once,
and become ``.grad``. Before that, ranks compare what they received and issued; where they differ, all of them raise
RanksDiverged. Replicated parameters and hooks of parameters have their own files.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.sharding.gradients.accumulation import AccumulationWindow
    from smp_core.sharding.gradients.divergence import RanksDiverged, require_same_collectives
    from smp_core.sharding.gradients.received_gradients import Told
    from smp_core.sharding.gradients.window import Window

_PLACES = {
    "AccumulationWindow": "accumulation",
    "RanksDiverged": "divergence",
    "require_same_collectives": "divergence",
    "Told": "received_gradients",
    "Window": "window",
}

__all__ = [
    "AccumulationWindow",
    "RanksDiverged",
    "require_same_collectives",
    "Told",
    "Window",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

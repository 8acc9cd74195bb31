"""Activations that forward keeps for backward: recomputed, or offloaded to host memory.

``save_activations`` (activation_memory) applies what the rules settled: checkpointed modules, the outputs that are kept
all the same (selective), and inputs that wait in host memory (offloading, host_pool).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.activations.activation_memory import NO_ACTIVATION_MEMORY_SAVED, ActivationMemory, save_activations
    from smp_core.activations.host_pool import HostPool
    from smp_core.activations.rules import ACTIVATIONS
    from smp_core.activations.selective import keep_outputs_of, kept_outputs_shown_to

_PLACES = {
    "ActivationMemory": "activation_memory",
    "ACTIVATIONS": "rules",
    "HostPool": "host_pool",
    "keep_outputs_of": "selective",
    "kept_outputs_shown_to": "selective",
    "NO_ACTIVATION_MEMORY_SAVED": "activation_memory",
    "save_activations": "activation_memory",
}

__all__ = [
    "ActivationMemory",
    "ACTIVATIONS",
    "HostPool",
    "keep_outputs_of",
    "kept_outputs_shown_to",
    "NO_ACTIVATION_MEMORY_SAVED",
    "save_activations",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

"""Values for sharded parameters: drawn, broadcast, loaded or cast, a part for each rank.

Delayed initialisation draws the numbers of one process, rank 0's values reach every rank, whole tensors are cut for
each rank, and for code that one rank runs alone a module is a plain one for a while.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.sharding.weights.cast_parameters import CastParameters
    from smp_core.sharding.weights.delayed_init import materialize
    from smp_core.sharding.weights.load_state_dict import load_own_parts
    from smp_core.sharding.weights.own_parts import load_full_state
    from smp_core.sharding.weights.random_values import draw_whole_tensors
    from smp_core.sharding.weights.rank_0 import broadcast_from_rank_0, send_to_stages

_PLACES = {
    "broadcast_from_rank_0": "rank_0",
    "CastParameters": "cast_parameters",
    "draw_whole_tensors": "random_values",
    "load_full_state": "own_parts",
    "load_own_parts": "load_state_dict",
    "materialize": "delayed_init",
    "send_to_stages": "rank_0",
}

__all__ = [
    "broadcast_from_rank_0",
    "CastParameters",
    "draw_whole_tensors",
    "load_full_state",
    "load_own_parts",
    "materialize",
    "send_to_stages",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

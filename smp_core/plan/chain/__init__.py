"""A model's blocks in the order they run in, recorded by running the model once on the meta device.

Chain is the result; recording runs the model with an example; stand_ins and saved_buffers are about modules and buffers
that work before or between the blocks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.plan.chain.chain import Chain, StandIn, argument, given_by, of_kind, with_argument
    from smp_core.plan.chain.played import is_played, with_fake_values
    from smp_core.plan.chain.recording import as_in_training, record_chain, refusal_of, running_the_example, with_chain
    from smp_core.plan.chain.saved_buffers import buffers_restored

_PLACES = {
    "argument": "chain",
    "as_in_training": "recording",
    "buffers_restored": "saved_buffers",
    "Chain": "chain",
    "given_by": "chain",
    "is_played": "played",
    "of_kind": "chain",
    "record_chain": "recording",
    "refusal_of": "recording",
    "running_the_example": "recording",
    "StandIn": "chain",
    "with_argument": "chain",
    "with_chain": "recording",
    "with_fake_values": "played",
}

__all__ = [
    "argument",
    "as_in_training",
    "buffers_restored",
    "Chain",
    "given_by",
    "is_played",
    "of_kind",
    "record_chain",
    "refusal_of",
    "running_the_example",
    "StandIn",
    "with_argument",
    "with_chain",
    "with_fake_values",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

"""Communication: collectives as FSDP2 communication objects, and the meter that counts their bytes.

Traffic makes the objects that a plan asks for: collectives in one stage (flat) or two (hierarchical), sums across
replicas (replica_hop), quantized gathers and reductions. IssuedCollectives notes each call, CommMeter counts it. The
rules settle what is sent and in which form, with measured links (link_rules) where there are any.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.comm.background import Background, Pending
    from smp_core.comm.deferred import Deferred
    from smp_core.comm.exchange import prefers_messages, sum_rows
    from smp_core.comm.flat import CommObject, FlatAllGather, FlatAllReduce, FlatMaxReduce, FlatReduceScatter
    from smp_core.comm.issued import IssuedCollectives, first_to_differ
    from smp_core.comm.measuring import SIZES, TIMEOUT, measure
    from smp_core.comm.meter import LINK_CLASSES, CommMeter, LinkClass
    from smp_core.comm.remainder_state import KEY, load_remainder_state
    from smp_core.comm.replica_hop import ReplicaHop
    from smp_core.comm.rules import COMMUNICATION
    from smp_core.comm.traffic import Route, Traffic

_PLACES = {
    "Background": "background",
    "CommMeter": "meter",
    "CommObject": "flat",
    "COMMUNICATION": "rules",
    "Deferred": "deferred",
    "first_to_differ": "issued",
    "FlatAllGather": "flat",
    "FlatAllReduce": "flat",
    "FlatMaxReduce": "flat",
    "FlatReduceScatter": "flat",
    "IssuedCollectives": "issued",
    "KEY": "remainder_state",
    "LINK_CLASSES": "meter",
    "LinkClass": "meter",
    "load_remainder_state": "remainder_state",
    "measure": "measuring",
    "Pending": "background",
    "prefers_messages": "exchange",
    "ReplicaHop": "replica_hop",
    "Route": "traffic",
    "SIZES": "measuring",
    "sum_rows": "exchange",
    "TIMEOUT": "measuring",
    "Traffic": "traffic",
}

__all__ = [
    "Background",
    "CommMeter",
    "CommObject",
    "COMMUNICATION",
    "Deferred",
    "first_to_differ",
    "FlatAllGather",
    "FlatAllReduce",
    "FlatMaxReduce",
    "FlatReduceScatter",
    "IssuedCollectives",
    "KEY",
    "LINK_CLASSES",
    "LinkClass",
    "load_remainder_state",
    "measure",
    "Pending",
    "prefers_messages",
    "ReplicaHop",
    "Route",
    "SIZES",
    "sum_rows",
    "TIMEOUT",
    "Traffic",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

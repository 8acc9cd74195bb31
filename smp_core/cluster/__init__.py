"""The machines and the ranks on them: launchers, links, the layout's axes and its process groups.

A Layout names the axes of a run; an SmpMesh makes their process groups. Links are latency and bandwidth as measured.
agreement checks that all ranks were given the same. (Which rank sits on which node is smp_core/topology.py.)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.cluster.agreement import agreed, of_all_ranks, of_rank_0
    from smp_core.cluster.launch import LaunchEnvironment, launch_environment
    from smp_core.cluster.layout import (
        DATA,
        DEGREES,
        GRADIENTS,
        INNER,
        PARTITION,
        Axis,
        Layout,
        Ranks,
        degrees_of,
        inner_degree,
    )
    from smp_core.cluster.links import (
        KINDS,
        LINKS_VARIABLE,
        PLACES,
        Collectives,
        Kind,
        LinkFit,
        Links,
        Place,
        gather_seconds,
        reduce_seconds,
        replica_sum_seconds,
        ring_bytes,
        rounds,
    )
    from smp_core.cluster.mesh import SmpMesh

_PLACES = {
    "agreed": "agreement",
    "Axis": "layout",
    "Collectives": "links",
    "DATA": "layout",
    "DEGREES": "layout",
    "degrees_of": "layout",
    "gather_seconds": "links",
    "GRADIENTS": "layout",
    "INNER": "layout",
    "inner_degree": "layout",
    "Kind": "links",
    "KINDS": "links",
    "launch_environment": "launch",
    "LaunchEnvironment": "launch",
    "Layout": "layout",
    "LinkFit": "links",
    "Links": "links",
    "LINKS_VARIABLE": "links",
    "of_all_ranks": "agreement",
    "of_rank_0": "agreement",
    "PARTITION": "layout",
    "Place": "links",
    "PLACES": "links",
    "Ranks": "layout",
    "reduce_seconds": "links",
    "replica_sum_seconds": "links",
    "ring_bytes": "links",
    "rounds": "links",
    "SmpMesh": "mesh",
}

__all__ = [
    "agreed",
    "Axis",
    "Collectives",
    "DATA",
    "DEGREES",
    "degrees_of",
    "gather_seconds",
    "GRADIENTS",
    "INNER",
    "inner_degree",
    "Kind",
    "KINDS",
    "launch_environment",
    "LaunchEnvironment",
    "Layout",
    "LinkFit",
    "Links",
    "LINKS_VARIABLE",
    "of_all_ranks",
    "of_rank_0",
    "PARTITION",
    "Place",
    "PLACES",
    "Ranks",
    "reduce_seconds",
    "replica_sum_seconds",
    "ring_bytes",
    "rounds",
    "SmpMesh",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

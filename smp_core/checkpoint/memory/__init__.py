"""The newest state in shared memory: a restart goes on from there, and a lost node's state from the next node.

A training holds a MemoryTier, which keeps each rank's shards in its node's folder and copies of them on the next node,
commits a state on all ranks at once, and finds the newest one that all nodes hold.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.checkpoint.memory.folder import launcher_job, left_by_ended_jobs
    from smp_core.checkpoint.memory.search import MemoryCheckpoint
    from smp_core.checkpoint.memory.tier import MemoryTier

_PLACES = {
    "launcher_job": "folder",
    "left_by_ended_jobs": "folder",
    "MemoryCheckpoint": "search",
    "MemoryTier": "tier",
}

__all__ = [
    "launcher_job",
    "left_by_ended_jobs",
    "MemoryCheckpoint",
    "MemoryTier",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

"""The newest state in shared memory: a restart goes on from there, and a lost node's
state from the next node.

A training holds a MemoryTier, which keeps each rank's shards in its node's folder and
copies of them on the next node, commits a state on all ranks at once, and finds the
newest one that all nodes hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.checkpoint.memory.folder import (
        launcher_job as launcher_job,
        left_by_ended_jobs as left_by_ended_jobs,
    )
    from smp_core.checkpoint.memory.search import MemoryCheckpoint as MemoryCheckpoint
    from smp_core.checkpoint.memory.tier import MemoryTier as MemoryTier
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)

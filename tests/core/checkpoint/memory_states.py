"""States of one process in shared memory: kept, and found again by another process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from smp_core.checkpoint import load_checkpoint, read_per_rank
from smp_core.checkpoint.memory.tier import MemoryTier
from tests.core.checkpoint.states import differences


def nodes() -> list[list[int]]:
    world = dist.get_world_size() if dist.is_initialized() else 1
    per_node = int(os.environ.get("SMP_RANKS_PER_NODE", world))
    return [list(range(first, first + per_node)) for first in range(0, world, per_node)]


def tier(folder: str, layout: str = "shard 2", by: str = "") -> MemoryTier:
    os.environ["SMP_MEMORY_FOLDER"] = folder
    return MemoryTier(
        1, f"{folder}/disk", nodes(), posed=len(nodes()) > 1, layout=layout, by=by
    )


STATE = {
    "weights": torch.arange(6.0),
    "rest": {"epoch": 1, "names": {"a"}, "sizes": torch.Size([2])},
}


def state_of(step: int) -> dict[str, Any]:
    return {**STATE, "weights": torch.arange(6.0) + step}


def kept_until(folder: Path, steps: int, **options: Any) -> MemoryTier:
    kept = tier(str(folder), **options)
    kept.leave()
    kept.begin(0)
    for step in range(1, steps + 1):
        kept.save(state_of(step), step, {}, step)
    kept._saver.wait()
    return kept


def found_in(folder: Path, **options: Any) -> int | None:
    """The step of the state that a new process finds; its values are those of the
    step."""
    kept = tier(str(folder), **options)
    found = kept.find()
    if found is None:
        return None
    state = {"weights": torch.zeros(6), "rest": {}}
    opened = kept.take(found)
    load_checkpoint(opened, state)
    assert differences(state, state_of(found.step)) == []
    assert read_per_rank(opened) == [found.step]
    return found.step


def files(folder: Path, pattern: str = "*") -> list[Path]:
    return sorted(folder.glob(f"torch-smp-*/*/{pattern}"))

"""The newest state in shared memory: what survives which loss, what is never used, and what is left behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from smp_core.checkpoint import load_checkpoint, read_per_rank
from smp_core.checkpoint.memory_tier import MemoryTier
from tests.core.checkpoint.states import differences, gathered, sharded_state
from tests.harness import run_ranks


def nodes() -> list[list[int]]:
    per_node = int(os.environ["SMP_RANKS_PER_NODE"])
    world = dist.get_world_size()
    return [list(range(first, first + per_node)) for first in range(0, world, per_node)]


def tier(folder: str, layout: str = "shard 2") -> MemoryTier:
    os.environ["SMP_MEMORY_FOLDER"] = folder
    return MemoryTier(1, f"{folder}/disk", nodes(), posed=True, layout=layout)


def keep(folder: str, degree: int, steps: int = 3) -> list[Any]:
    """Keep some states as training would, and end without a word; the states, whole."""
    kept, expected = tier(folder), []
    kept.leave("")
    kept.begin(0)
    for step in range(1, steps + 1):
        state = sharded_state(degree, seed=step)
        expected.append(gathered(state))
        kept.save(state, step, {"step": step}, {"rank": dist.get_rank(), "step": step})
        kept.before_update()
        for name in ("state_dict", "optimizer_states", "best"):
            clear(state[name])
        kept.after_step(step)
    kept._saver.wait()
    return expected


def clear(state: Any) -> None:
    if isinstance(state, torch.Tensor):
        state.zero_()
    else:
        for value in state.values() if isinstance(state, dict) else state if isinstance(state, list) else ():
            clear(value)


def resume(folder: str, degree: int) -> Any:
    """What a new process finds: the state, each rank's own part, how many ranks were sent theirs."""
    kept = tier(folder)
    found = kept.find()
    if found is None:
        return None
    opened = kept.take(found)
    state = sharded_state(degree, seed=-1)
    load_checkpoint(opened, state)
    own = read_per_rank(opened)
    return found.step, gathered(state), own, found.sent


def folder_of(folder: Path, node: int) -> Path:
    (found,) = folder.glob(f"torch-smp-*/*-node{node}")
    return found


@pytest.mark.parametrize("degree", [2, 4])
def test_a_lost_node_is_given_its_part_by_a_replica_or_from_the_copy(tmp_path: Path, degree: int) -> None:
    """Groups of 2 fill a node, so that the other one has the same shards; of 4 they do not, and a copy is kept."""
    expected = run_ranks(keep, 4, str(tmp_path), degree, ranks_per_node=2)[0]
    shutil.rmtree(folder_of(tmp_path, 1))
    for step, state, own, sent in run_ranks(resume, 4, str(tmp_path), degree, ranks_per_node=2):
        assert (step, sent) == (3, [2, 3])
        assert differences(state, expected[-1]) == []
        assert own == [{"rank": rank, "step": 3} for rank in range(4)]

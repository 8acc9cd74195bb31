"""One load reads one save: a path that is overwritten meanwhile gives that save, or an
error that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import smp_core.checkpoint.verify as verify
from smp_core.checkpoint import (
    CheckpointError,
    load_checkpoint,
    read_rest,
    read_tensors,
    save_checkpoint,
)
from smp_core.checkpoint.opening import OpenCheckpoint, open_checkpoint
from smp_core.checkpoint.ranks import Ranks
from tests.core.checkpoint.states import rest, values
from tests.harness import run_ranks


def state(seed: int) -> dict[str, Any]:
    return {"state_dict": values(seed), "rest": rest(seed)}


@pytest.mark.parametrize("overwritten_by", ["another save", "a removal"])
def test_what_is_open_does_not_become_another_save(
    tmp_path: Path, overwritten_by: str
) -> None:
    path = tmp_path / "last.ckpt"
    save_checkpoint(path, state(1))
    opened = open_checkpoint(path)
    assert read_rest(opened, "rest")["epoch"] == 1
    fresh = open_checkpoint(path)
    if overwritten_by == "another save":
        save_checkpoint(path, state(2))
    else:
        path.rename(tmp_path / "elsewhere")
    assert read_rest(opened, "rest")["epoch"] == 1, "what was read is kept"
    readers = [
        lambda: read_tensors(opened),
        lambda: read_rest(fresh),
        lambda: load_checkpoint(fresh, state(0)),
    ]
    for reader in readers:
        with pytest.raises(CheckpointError, match=r"while it was read|is missing"):
            reader()
    if overwritten_by == "another save":
        with pytest.raises(
            CheckpointError,
            match=r"was overwritten by another save .* while it was read; load again",
        ):
            read_tensors(opened)
        assert read_rest(path, "rest")["epoch"] == 2


def load_while_overwritten(path: str, forever: bool) -> tuple[str, float]:
    """Rank 1 opens what was saved after rank 0 has opened, once or each time; the
    error, and what was loaded."""
    original, opened_here = verify.open_checkpoint, 0

    def opening(where: Any) -> OpenCheckpoint:
        nonlocal opened_here
        opened_here += 1
        if dist.get_rank() == 1 and (forever or opened_here == 1):
            dist.barrier()
        found = original(where)
        if dist.get_rank() == 0 and (forever or opened_here == 1):
            save_alone(path, 10.0 + opened_here)
            dist.barrier()
        return found

    target = {"w": torch.zeros(4)}
    verify.open_checkpoint = opening  # type: ignore[assignment]
    try:
        load_checkpoint(path, target)
    except CheckpointError as error:
        return str(error), 0.0
    finally:
        verify.open_checkpoint = original
    return "", float(target["w"][0])


def save_alone(path: str, value: float) -> None:
    from smp_core.checkpoint.staging import stage
    from smp_core.checkpoint.writer import SaveOptions, write_staged

    options = SaveOptions({}, {}, True, "xxh3")
    write_staged(
        path,
        lambda: stage({"w": torch.full((4,), value)}, None, 0, False),
        options,
        Ranks(alone=True),
    )


def test_all_ranks_load_the_same_save(tmp_path: Path) -> None:
    save_alone(str(tmp_path / "a"), 1.0)
    assert (
        run_ranks(load_while_overwritten, 2, str(tmp_path / "a"), False)
        == [("", 11.0)] * 2
    )
    for error, _ in run_ranks(load_while_overwritten, 2, str(tmp_path / "a"), True):
        assert "overwritten again and again" in error

"""Checkpoints beside others: which is the newest, what rotation and sweeping leave
alone, whose folder it is."""

from __future__ import annotations

import datetime
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import smp_core.checkpoint.folders.local_folder as local_folder
import smp_core.checkpoint.root as root
import smp_core.checkpoint.writer as writer
from smp_core.checkpoint import (
    CheckpointError,
    find_checkpoints,
    newest_checkpoint,
    remove_checkpoint,
    save_checkpoint,
    save_step,
    verify_checkpoint,
)
from tests.core.checkpoint.fault_runs import attempt, loaded, small, temporaries
from tests.core.checkpoint.states import differences
from tests.harness import run_ranks


def broken(path: Path) -> None:
    (path / "tensors-00000-of-00001.safetensors").unlink()


def test_rotation_counts_whole_checkpoints_only(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_step(tmp_path, step, small(step))
    broken(tmp_path / "step-00000003")
    broken(tmp_path / "step-00000004")
    save_step(tmp_path, 5, small(5), keep_last=2)
    assert sorted(os.listdir(tmp_path)) == [
        "LATEST",
        *(f"step-0000000{step}" for step in (2, 3, 4, 5)),
    ]


def test_rotation_removes_nothing_when_the_newest_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save_step(tmp_path, step, small(step))
    tidy = root.tidy
    monkeypatch.setattr(
        root,
        "tidy",
        lambda *arguments: (broken(tmp_path / "step-00000003"), tidy(*arguments)),
    )
    save_step(tmp_path, 3, small(3), keep_last=1)
    assert len(find_checkpoints(tmp_path)) == 3
    assert "no older checkpoint is removed" in caplog.text


class Clock(datetime.datetime):
    """A clock that is set back by an hour with each look at it."""

    looks = 0

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        Clock.looks += 1
        return super().now(tz) - datetime.timedelta(hours=Clock.looks)


def test_the_newest_is_found_and_kept_when_clocks_run_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        writer, "datetime", SimpleNamespace(datetime=Clock, timezone=datetime.timezone)
    )
    monkeypatch.setattr(Clock, "looks", 0)
    for step in (5, 6, 7, 3, 4):  # set back to an earlier step in between
        save_step(tmp_path, step, small(step), keep_last=3)
        assert newest_checkpoint(tmp_path) == str(tmp_path / f"step-{step:08d}")
    assert find_checkpoints(tmp_path) == [
        "step-00000007",
        "step-00000003",
        "step-00000004",
    ]
    assert Clock.looks == 5


def save_as_two_jobs(root: str) -> str:
    """Ranks 0,1 and ranks 2,3 are two jobs that know nothing of each other and save
    into one root at the same time."""
    job = dist.get_rank() // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for number in range(4):
        save_checkpoint(
            f"{root}/last.ckpt", small(10 * job + number), process_group=groups[job]
        )
        save_step(
            root, 2 * number + job, small(10 * job + number), process_group=groups[job]
        )
    return "done"


def test_two_jobs_in_one_root_do_not_break_each_other(tmp_path: Path) -> None:
    assert run_ranks(save_as_two_jobs, 4, str(tmp_path)) == ["done"] * 4
    for step in range(8):
        job, number = step % 2, step // 2
        assert (
            differences(loaded(tmp_path / f"step-{step:08d}"), small(10 * job + number))
            == []
        )
    assert any(
        differences(loaded(tmp_path / "last.ckpt"), small(last)) == []
        for last in (3, 13)
    )
    assert temporaries(tmp_path) == []


def test_what_a_live_save_is_writing_is_not_swept(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    live = local_folder.LocalTransaction(str(path))
    live.begin(local_folder.new_save_id(), overwrite=True)
    save_checkpoint(path, small(1))
    assert os.path.isdir(live.temporary)
    live.abort()
    # What a dead process left is removed, of any checkpoint in the folder: nobody holds
    # its lock.
    (tmp_path / f".tmp-last.ckpt-{local_folder.new_save_id()}").mkdir()
    (tmp_path / f".tmp-epoch=3.ckpt-{local_folder.new_save_id()}").mkdir()
    # One that another host may be writing over the network stays until it is old.
    other = tmp_path / ".tmp-last.ckpt-00000000-0123456789ab"
    other.mkdir()
    save_checkpoint(path, small(2))
    assert temporaries(tmp_path) == [other.name]
    os.utime(other, (0, 0))
    save_checkpoint(path, small(2))
    assert temporaries(tmp_path) == []


def test_what_nobody_has_written_to_for_long_is_swept(tmp_path: Path) -> None:
    """Half exports, and temporaries of a crash before they had a lock."""
    made = [
        tmp_path / f".new-{local_folder.new_save_id()}",
        tmp_path / f".partial-out.pt-{local_folder.new_save_id()}",
    ]
    made[0].mkdir()
    made[1].write_bytes(b"half")
    (tmp_path / ".partial-of-my-own").write_text("not ours")
    save_checkpoint(tmp_path / "a", small(1))
    assert sorted(temporaries(tmp_path)) == sorted(
        [".partial-of-my-own", *(path.name for path in made)]
    )
    for path in (*made, tmp_path / ".partial-of-my-own"):
        os.utime(path, (0, 0))
    save_checkpoint(tmp_path / "a", small(2))
    assert temporaries(tmp_path) == [".partial-of-my-own"]


def test_files_of_the_user_outlive_the_checkpoint_that_they_lie_in(
    tmp_path: Path,
) -> None:
    save_checkpoint(tmp_path / "a", small(1), extra_files={"config.json": "{}"})
    (tmp_path / "a" / "notes.txt").write_text("mine")
    (tmp_path / "a" / "plots").mkdir()
    (tmp_path / "a" / "plots" / "loss.svg").write_text("mine too")
    save_checkpoint(tmp_path / "a", small(2))
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "a" / "plots" / "loss.svg").read_text() == "mine too"
    assert not (tmp_path / "a" / "extra").exists(), "of the checkpoint before"
    assert differences(loaded(tmp_path / "a"), small(2)) == []
    assert verify_checkpoint(tmp_path / "a", deep=True) == []


def test_leftovers_that_cannot_be_removed_cost_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another user's file, in a folder where each may remove only their own."""
    other = tmp_path / f".partial-out.pt-{local_folder.new_save_id()}"
    other.write_bytes(b"half")
    os.utime(other, (0, 0))
    unlink = os.unlink

    def refused(path: Any, **options: Any) -> None:
        if str(path) == str(other):
            raise PermissionError(1, "Operation not permitted")
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", refused)
    save_checkpoint(tmp_path / "a", small(1))
    assert differences(loaded(tmp_path / "a"), small(1)) == []
    assert temporaries(tmp_path) == [other.name]
    assert f"{other} could not be removed" in caplog.text


def test_half_a_checkpoint_of_ours_is_replaced_by_a_whole_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", small(1))
    (tmp_path / "a" / "manifest.json").unlink()
    save_checkpoint(tmp_path / "a", small(2))
    assert differences(loaded(tmp_path / "a"), small(2)) == []


def test_something_foreign_at_the_path_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("years of work")
    with pytest.raises(
        CheckpointError, match="not a torch-smp checkpoint; it is not overwritten"
    ):
        save_checkpoint(tmp_path / "notes", small(1))
    assert (tmp_path / "notes" / "thesis.tex").read_text() == "years of work"
    save_checkpoint(tmp_path / "a", small(1))
    with pytest.raises(CheckpointError, match="exists already"):
        save_checkpoint(tmp_path / "a", small(2), overwrite=False)
    assert verify_checkpoint(tmp_path / "a", deep=True) == []
    shutil.rmtree(tmp_path / "a")


def test_a_link_is_replaced_and_removed_as_a_link(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "best", small(1))
    (tmp_path / "last").symlink_to("best")
    assert differences(loaded(tmp_path / "last"), small(1)) == []
    save_checkpoint(tmp_path / "last", small(2))
    assert not (tmp_path / "last").is_symlink()
    assert differences(loaded(tmp_path / "best"), small(1)) == []
    assert differences(loaded(tmp_path / "last"), small(2)) == []
    (tmp_path / "link").symlink_to("best")
    remove_checkpoint(tmp_path / "link")
    assert sorted(os.listdir(tmp_path)) == ["best", "last"]


def save_where_one_rank_sees_nothing(path: str) -> str:
    if dist.get_rank() == 1:
        path = path.replace("shared", "private")
    with mock.patch.object(local_folder, "_SEEN_SECONDS", 0.2):
        return attempt(lambda: save_checkpoint(path, small(1)))


def test_a_path_that_nodes_do_not_share_is_an_error_that_says_so(
    tmp_path: Path,
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "private").mkdir()
    for message in run_ranks(
        save_where_one_rank_sees_nothing, 2, str(tmp_path / "shared" / "a")
    ):
        assert (
            "rank 1:" in message
            and "save to a path on a file system that all nodes share" in message
        )
    assert os.listdir(tmp_path / "shared") == []


def test_a_file_that_is_no_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("years of work")
    os.mkfifo(tmp_path / "pipe")
    for name in ("notes.txt", "pipe"):
        with pytest.raises(CheckpointError, match=r"is not overwritten\. Choose"):
            save_checkpoint(tmp_path / name, {"w": torch.ones(2)})
    assert (tmp_path / "notes.txt").read_text() == "years of work"
    assert (tmp_path / "pipe").is_fifo()
    # A run that saved single files before goes on with folders.
    torch.save({"w": torch.ones(2)}, tmp_path / "last.ckpt")
    save_checkpoint(tmp_path / "last.ckpt", {"w": torch.ones(2)})
    assert (tmp_path / "last.ckpt").is_dir()

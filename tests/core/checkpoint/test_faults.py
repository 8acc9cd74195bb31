"""Disks that fill, power that fails, jobs that share a folder: no save is half done, and an error reaches all ranks."""

from __future__ import annotations

import contextlib
import datetime
import errno
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import smp_core.checkpoint.file_system as file_system
import smp_core.checkpoint.local_folder as local_folder
import smp_core.checkpoint.root as root
import smp_core.checkpoint.storage as storage
import smp_core.checkpoint.writer as writer
from smp_core.checkpoint import (
    AsyncCheckpointer,
    CheckpointError,
    find_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    remove_checkpoint,
    save_checkpoint,
    save_step,
    verify_checkpoint,
)
from tests.core.checkpoint.damage import rewrite_manifest
from tests.core.checkpoint.states import differences, gathered, sharded_state
from tests.harness import run_ranks

ROWS = 1 << 16


def small(seed: int) -> dict[str, Any]:
    return {"model": {f"w{i}": torch.full((ROWS,), float(seed * 10 + i)) for i in range(4)}, "step": seed}


def loaded(path: str | Path) -> dict[str, Any]:
    target = {"model": {f"w{i}": torch.zeros(ROWS) for i in range(4)}, "step": 0}
    load_checkpoint(path, target, verify="digests")
    return target


def temporaries(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".")]


def attempt(action: Callable[[], None]) -> str:
    """The message of the CheckpointError that an action raises, "" when it raises none."""
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return ""


def save_with_full_disk(path: str, broken_rank: int, bytes_left: int, async_save: bool) -> tuple[str, Any]:
    """Save step 2 while the disk of one rank fills up; the message and what loads afterwards."""
    save_checkpoint(path, sharded_state(2, seed=1))
    expected = gathered(sharded_state(2, seed=1))
    original = storage.Sink.write
    left = bytes_left

    def write(self: storage.Sink, data: Any) -> None:
        nonlocal left
        left -= len(memoryview(data).cast("B"))
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(self, data)

    if dist.get_rank() == broken_rank:
        storage.Sink.write = write  # type: ignore[method-assign]
    try:
        if async_save:
            saver = AsyncCheckpointer()
            saver.save(path, sharded_state(2, seed=2))
            message = attempt(saver.wait)
            assert attempt(saver.wait) == "", "an error is raised once"
        else:
            message = attempt(lambda: save_checkpoint(path, sharded_state(2, seed=2)))
    finally:
        storage.Sink.write = original  # type: ignore[method-assign]
    state = sharded_state(2, seed=-1)
    load_checkpoint(path, state, verify="digests")
    return message, differences(gathered(state), expected)


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("rank", "bytes_left"), [(3, 100), (0, 1500)], ids=["tensors of rank 3", "index of rank 0"])
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_costs_nothing(
    tmp_path: Path, rank: int, bytes_left: int, async_save: bool
) -> None:
    results = run_ranks(save_with_full_disk, 4, str(tmp_path / "last.ckpt"), rank, bytes_left, async_save)
    for message, wrong in results:
        assert f"rank {rank}: OSError: [Errno 28] No space left on device" in message
        assert wrong == []
    assert temporaries(tmp_path) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MB; skipped where mounting is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_really_full_leaves_the_old_checkpoint(tiny_disk: Path) -> None:
    path = tiny_disk / "last.ckpt"
    save_checkpoint(path, small(1))  # 1 MB: the second does not fit beside it
    with pytest.raises(CheckpointError, match="No space left"):
        save_checkpoint(path, small(2))
    assert differences(loaded(path), small(1)) == []
    assert temporaries(tiny_disk) == []


def test_a_read_only_directory_is_an_error_that_says_so(tiny_disk: Path) -> None:
    path = tiny_disk / "last.ckpt"
    save_checkpoint(path, small(1))
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        save_checkpoint(path, small(2))
    assert differences(loaded(path), small(1)) == []


class PowerCut(Exception):
    """Raised in place of everything that would come after the instant at which the power fails."""


class Disk:
    """Forgets, at a power cut, whatever was not fsynced: contents of files and entries of directories."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cut_before_rename: bool) -> None:
        self.synced: set[tuple[int, int]] = set()
        self.cut_before_rename = cut_before_rename
        fsync, rename_new, exchange = os.fsync, local_folder.rename_new, local_folder.rename_exchange

        def recording_fsync(descriptor: int) -> None:
            fsync(descriptor)
            status = os.fstat(descriptor)
            self.synced.add((status.st_dev, status.st_ino))

        def cut(rename: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
            def renamed(source: str, target: str) -> Any:
                if not self.cut_before_rename:
                    rename(source, target)  # where the target exists, this raises and the exchange is tried
                raise PowerCut

            return renamed

        monkeypatch.setattr(os, "fsync", recording_fsync)
        monkeypatch.setattr(local_folder, "rename_new", cut(rename_new))
        monkeypatch.setattr(local_folder, "rename_exchange", cut(exchange))
        monkeypatch.setattr(local_folder.LocalTransaction, "abort", lambda self: None)

    def _is_synced(self, path: str) -> bool:
        status = os.stat(path)
        return (status.st_dev, status.st_ino) in self.synced

    def lose_power(self, folder: Path) -> None:
        for where, _, names in os.walk(folder, topdown=False):
            for name in names:
                file = os.path.join(where, name)
                if not self._is_synced(file):
                    os.truncate(file, 0)
                if not self._is_synced(where):
                    os.unlink(file)


def after_power_cut(folder: Path, monkeypatch: pytest.MonkeyPatch, cut_before_rename: bool) -> str:
    """Save step 2 over step 1, lose the power at the rename; which step loads afterwards, or the error."""
    path = folder / "last.ckpt"
    save_checkpoint(path, small(1))
    with monkeypatch.context() as patch:
        disk = Disk(patch, cut_before_rename)
        for where, _, names in os.walk(path):  # step 1 has been on the disk for long
            for entry in (where, *(os.path.join(where, name) for name in names)):
                status = os.stat(entry)
                disk.synced.add((status.st_dev, status.st_ino))
        with pytest.raises(CheckpointError, match="PowerCut"):
            save_checkpoint(path, small(2), extra_files={"config.json": "{}"})
        disk.lose_power(path)
    try:
        found = loaded(path)
    except CheckpointError as error:
        return str(error)
    return next(str(seed) for seed in (1, 2) if differences(found, small(seed)) == [])


def test_power_loss_at_the_rename_leaves_a_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    assert after_power_cut(tmp_path / "before", monkeypatch, cut_before_rename=True) == "1"
    assert after_power_cut(tmp_path / "after", monkeypatch, cut_before_rename=False) == "2"


@pytest.mark.parametrize("left_out", ["files", "directories"])
def test_without_fsync_before_the_rename_power_loss_would_break_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: str
) -> None:
    """The test above bites: a writer that renames before its files or directories are durable loses the checkpoint."""
    if left_out == "files":
        original = storage.Sink.__init__

        def unsynced(self: storage.Sink, raw: Any, name: str, algorithm: str, sync: bool = True) -> None:
            original(self, raw, name, algorithm, sync=False)

        monkeypatch.setattr(storage.Sink, "__init__", unsynced)
    else:
        monkeypatch.setattr(local_folder, "fsync_directory", lambda path: None)
    assert after_power_cut(tmp_path, monkeypatch, cut_before_rename=False) not in ("1", "2")


def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without RENAME_EXCHANGE, as NFS is."""
    monkeypatch.setattr(file_system, "rename_exchange", lambda first, second: False)
    monkeypatch.setattr(local_folder, "rename_exchange", lambda first, second: False)


class Killed(BaseException):
    """The process is gone: nothing runs after it."""


def save_killed_at(path: Path, step: int, call: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Overwrite a checkpoint without exchange, killed before the n-th change of a name; whether it came that far."""
    done = 0
    with monkeypatch.context() as patch:

        def counted(change: Callable[..., Any]) -> Callable[..., Any]:
            def changed(*arguments: Any, **keywords: Any) -> Any:
                nonlocal done
                done += 1
                if done > call:
                    raise Killed
                return change(*arguments, **keywords)

            return changed

        for name in ("rename", "replace", "unlink", "rmdir", "mkdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(local_folder.LocalTransaction, "abort", lambda self: self._unlock())  # as the system does
        with contextlib.suppress(Killed, CheckpointError):
            save_checkpoint(path, small(step), extra_files={"config.json": str(step)})
    return done > call


def test_without_exchange_a_kill_at_any_change_leaves_a_whole_checkpoint_under_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    without_exchange(monkeypatch)
    save_checkpoint(path, small(0), extra_files={"config.json": "0"})
    found, call, killed = [0], 0, True
    while killed:
        killed = save_killed_at(path, call + 1, call, monkeypatch)
        assert path.is_dir(), f"nothing is under the name after change {call}"
        assert verify_checkpoint(path, deep=True) == []
        found.append(loaded(path)["step"])
        call += 1
    assert call > 12, "files were moved one by one"
    assert found[-1] == call and found[-2] == call - 1, "the last ones had committed"
    assert all(now in (before, number) for number, (before, now) in enumerate(itertools.pairwise(found), 1))
    save_checkpoint(path, small(call + 1))
    assert len(os.listdir(path)) == 5, "what the killed ones had moved is gone"
    assert verify_checkpoint(path, deep=True) == []


def test_what_an_earlier_version_moved_aside_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    without_exchange(monkeypatch)
    save_checkpoint(path, small(1))
    save_checkpoint(path, small(2))
    assert differences(loaded(path), small(2)) == [] and temporaries(tmp_path) == []
    # A crash of an earlier version between two renames: the path is empty, the old checkpoint stands beside it.
    path.rename(tmp_path / f".prev-last.ckpt-{local_folder.new_save_id()}")
    assert differences(loaded(path), small(2)) == []
    save_checkpoint(path, small(3))
    assert differences(loaded(path), small(3)) == [] and temporaries(tmp_path) == []


def overwrite_without_exchange(path: str) -> Any:
    import smp_core.checkpoint.file_system as file_system

    original, file_system.rename_exchange = file_system.rename_exchange, lambda first, second: False
    try:
        for seed in (1, 2):
            save_checkpoint(path, sharded_state(2, seed=seed))
    finally:
        file_system.rename_exchange = original
    state = sharded_state(2, seed=-1)
    load_checkpoint(path, state, verify="digests")
    return differences(gathered(state), gathered(sharded_state(2, seed=2)))


def test_all_ranks_name_their_files_alike_without_exchange(tmp_path: Path) -> None:
    assert run_ranks(overwrite_without_exchange, 4, str(tmp_path / "last.ckpt")) == [[]] * 4
    assert len(list((tmp_path / "last.ckpt").glob("tensors-*-of-00004-*"))) == 4


def lose(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def exchange_content(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("harm", [lose, cut, exchange_content])
def test_a_file_that_is_not_what_was_written_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None]
) -> None:
    path = tmp_path / "last.ckpt"
    save_checkpoint(path, small(1))
    create = local_folder.LocalTransaction.create

    def creating(self: Any, name: str, algorithm: str) -> Any:
        if name == "index.json":
            harm(Path(self.temporary, "tensors-00000-of-00001.safetensors"))
        return create(self, name, algorithm)

    monkeypatch.setattr(local_folder.LocalTransaction, "create", creating)
    with pytest.raises(CheckpointError, match=r"was not saved.*tensors-00000-of-00001\.safetensors"):
        save_checkpoint(path, small(2))
    monkeypatch.undo()
    assert differences(loaded(path), small(1)) == [] and temporaries(tmp_path) == []


def broken(path: Path) -> None:
    (path / "tensors-00000-of-00001.safetensors").unlink()


def test_rotation_counts_whole_checkpoints_only(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_step(tmp_path, step, small(step))
    broken(tmp_path / "step-00000003")
    broken(tmp_path / "step-00000004")
    save_step(tmp_path, 5, small(5), keep_last=2)
    assert sorted(os.listdir(tmp_path)) == ["LATEST", *(f"step-0000000{step}" for step in (2, 3, 4, 5))]


def test_rotation_removes_nothing_when_the_newest_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save_step(tmp_path, step, small(step))
    tidy = root.tidy
    monkeypatch.setattr(root, "tidy", lambda *arguments: (broken(tmp_path / "step-00000003"), tidy(*arguments)))
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


def test_the_newest_is_found_and_kept_when_clocks_run_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "datetime", SimpleNamespace(datetime=Clock, timezone=datetime.timezone))
    monkeypatch.setattr(Clock, "looks", 0)
    for step in (5, 6, 7, 3, 4):  # set back to an earlier step in between
        save_step(tmp_path, step, small(step), keep_last=3)
        assert newest_checkpoint(tmp_path) == str(tmp_path / f"step-{step:08d}")
    assert find_checkpoints(tmp_path) == ["step-00000007", "step-00000003", "step-00000004"]
    assert Clock.looks == 5


def test_a_checkpoint_of_version_1_is_older_than_any_of_this_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step, small(step))
    for step, created in ((1, "2099-01-02"), (2, "2099-01-01")):
        file = tmp_path / f"step-0000000{step}" / "manifest.json"
        manifest = json.loads(file.read_bytes())
        del manifest["sequence"]
        rewrite_manifest(file.parent, {**manifest, "version": 1, "created": created})
    assert find_checkpoints(tmp_path) == ["step-00000002", "step-00000001", "step-00000003"]


def save_as_two_jobs(root: str) -> str:
    """Ranks 0,1 and ranks 2,3 are two jobs that know nothing of each other and save into one root at the same time."""
    job = dist.get_rank() // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for number in range(4):
        save_checkpoint(f"{root}/last.ckpt", small(10 * job + number), process_group=groups[job])
        save_step(root, 2 * number + job, small(10 * job + number), process_group=groups[job])
    return "done"


def test_two_jobs_in_one_root_do_not_break_each_other(tmp_path: Path) -> None:
    assert run_ranks(save_as_two_jobs, 4, str(tmp_path)) == ["done"] * 4
    for step in range(8):
        job, number = step % 2, step // 2
        assert differences(loaded(tmp_path / f"step-{step:08d}"), small(10 * job + number)) == []
    assert any(differences(loaded(tmp_path / "last.ckpt"), small(last)) == [] for last in (3, 13))
    assert temporaries(tmp_path) == []


def test_what_a_live_save_is_writing_is_not_swept(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    live = local_folder.LocalTransaction(str(path))
    live.begin(local_folder.new_save_id(), overwrite=True)
    save_checkpoint(path, small(1))
    assert os.path.isdir(live.temporary)
    live.abort()
    # What a dead process left is removed, of any checkpoint in the folder: nobody holds its lock.
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
    made = [tmp_path / f".new-{local_folder.new_save_id()}", tmp_path / f".partial-out.pt-{local_folder.new_save_id()}"]
    made[0].mkdir()
    made[1].write_bytes(b"half")
    (tmp_path / ".partial-of-my-own").write_text("not ours")
    save_checkpoint(tmp_path / "a", small(1))
    assert sorted(temporaries(tmp_path)) == sorted([".partial-of-my-own", *(path.name for path in made)])
    for path in (*made, tmp_path / ".partial-of-my-own"):
        os.utime(path, (0, 0))
    save_checkpoint(tmp_path / "a", small(2))
    assert temporaries(tmp_path) == [".partial-of-my-own"]


def test_a_directory_that_cannot_be_made_durable_after_the_rename_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint is in its place, so the save has succeeded; what it replaced stays until one works."""
    path = tmp_path / "last.ckpt"
    save_checkpoint(path, small(1))
    with monkeypatch.context() as patch:
        fsync_directory = local_folder.fsync_directory

        def failing(directory: Any) -> None:
            if Path(directory) == tmp_path:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            fsync_directory(directory)

        patch.setattr(local_folder, "fsync_directory", failing)
        save_checkpoint(path, small(2))
    assert differences(loaded(path), small(2)) == []
    (kept,) = temporaries(tmp_path)
    assert differences(loaded(tmp_path / kept), small(1)) == []
    assert kept in caplog.text and "could not be made durable" in caplog.text
    save_checkpoint(path, small(3))
    assert temporaries(tmp_path) == []


def test_half_a_checkpoint_of_ours_is_replaced_by_a_whole_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", small(1))
    (tmp_path / "a" / "manifest.json").unlink()
    save_checkpoint(tmp_path / "a", small(2))
    assert differences(loaded(tmp_path / "a"), small(2)) == []


def test_something_foreign_at_the_path_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="not a torch-smp checkpoint; it is not overwritten"):
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


def test_a_path_that_nodes_do_not_share_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "private").mkdir()
    for message in run_ranks(save_where_one_rank_sees_nothing, 2, str(tmp_path / "shared" / "a")):
        assert "rank 1:" in message and "save to a path on a file system that all nodes share" in message
    assert os.listdir(tmp_path / "shared") == []

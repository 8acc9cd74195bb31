"""Disks that fill, power that fails, jobs that share a folder: no save is half done,
and an error reaches all ranks."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import smp_core.checkpoint.folders.file_system as file_system
import smp_core.checkpoint.folders.local_folder as local_folder
import smp_core.checkpoint.folders.storage as storage
from smp_core.checkpoint import (
    AsyncCheckpointer,
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
    save_step,
    verify_checkpoint,
)
from tests.core.checkpoint.fault_runs import attempt, loaded, small, temporaries
from tests.core.checkpoint.states import differences, gathered, sharded_state
from tests.harness import run_ranks


def save_with_full_disk(
    path: str, broken_rank: int, bytes_left: int, async_save: bool
) -> tuple[str, Any]:
    """Save step 2 while the disk of one rank fills up; the message and what loads
    afterwards."""
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
@pytest.mark.parametrize(
    ("rank", "bytes_left"),
    [(3, 100), pytest.param(0, 1500, marks=pytest.mark.slow)],
    ids=["tensors of rank 3", "index of rank 0"],
)
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_costs_nothing(
    tmp_path: Path, rank: int, bytes_left: int, async_save: bool
) -> None:
    results = run_ranks(
        save_with_full_disk,
        4,
        str(tmp_path / "last.ckpt"),
        rank,
        bytes_left,
        async_save,
    )
    for message, wrong in results:
        assert f"rank {rank}: OSError: [Errno 28] No space left on device" in message
        assert wrong == []
    assert temporaries(tmp_path) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MB; skipped where mounting is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True
    )
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
    """Raised in place of everything that would come after the instant at which the
    power fails."""


class Disk:
    """Forgets, at a power cut, whatever was not fsynced: contents of files and entries
    of directories."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, cut_before_rename: bool
    ) -> None:
        self.synced: set[tuple[int, int]] = set()
        self.cut_before_rename = cut_before_rename
        fsync, rename_new, exchange = (
            os.fsync,
            local_folder.rename_new,
            local_folder.rename_exchange,
        )

        def recording_fsync(descriptor: int) -> None:
            fsync(descriptor)
            status = os.fstat(descriptor)
            self.synced.add((status.st_dev, status.st_ino))

        def cut(rename: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
            def renamed(source: str, target: str) -> Any:
                if not self.cut_before_rename:
                    # Where the target exists, this raises and the exchange is tried.
                    rename(source, target)
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


def after_power_cut(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cut_before_rename: bool
) -> str:
    """Save step 2 over step 1, lose the power at the rename; which step loads
    afterwards, or the error."""
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


def test_power_loss_at_the_rename_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    assert (
        after_power_cut(tmp_path / "before", monkeypatch, cut_before_rename=True) == "1"
    )
    assert (
        after_power_cut(tmp_path / "after", monkeypatch, cut_before_rename=False) == "2"
    )


@pytest.mark.parametrize("left_out", ["files", "directories"])
def test_without_fsync_before_the_rename_power_loss_would_break_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: str
) -> None:
    """The test above bites: a writer that renames before its files or directories are
    durable loses the checkpoint."""
    if left_out == "files":
        original = storage.Sink.__init__

        def unsynced(
            self: storage.Sink, raw: Any, name: str, algorithm: str, sync: bool = True
        ) -> None:
            original(self, raw, name, algorithm, sync=False)

        monkeypatch.setattr(storage.Sink, "__init__", unsynced)
    else:
        monkeypatch.setattr(local_folder, "fsync_directory", lambda path: None)
    assert after_power_cut(tmp_path, monkeypatch, cut_before_rename=False) not in (
        "1",
        "2",
    )


def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without RENAME_EXCHANGE, as NFS is."""
    monkeypatch.setattr(file_system, "rename_exchange", lambda first, second: False)
    monkeypatch.setattr(local_folder, "rename_exchange", lambda first, second: False)


class Killed(BaseException):
    """The process is gone: nothing runs after it."""


def save_killed_at(
    path: Path, step: int, call: int, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Overwrite a checkpoint without exchange, killed before the n-th change of a name;
    whether it came that far."""
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
        # As the system does.
        patch.setattr(
            local_folder.LocalTransaction, "abort", lambda self: self._unlock()
        )
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
    assert all(
        now in (before, number)
        for number, (before, now) in enumerate(itertools.pairwise(found), 1)
    )
    save_checkpoint(path, small(call + 1))
    assert len(os.listdir(path)) == 5, "what the killed ones had moved is gone"
    assert verify_checkpoint(path, deep=True) == []


def test_without_exchange_a_link_gives_way_to_what_is_saved_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_exchange(monkeypatch)
    save_checkpoint(tmp_path / "step-1", small(1))
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "step-1")
    save_checkpoint(tmp_path / "last.ckpt", small(2))
    assert differences(loaded(tmp_path / "last.ckpt"), small(2)) == []
    assert differences(loaded(tmp_path / "step-1"), small(1)) == []
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step-1"]


def overwrite_without_exchange(path: str) -> Any:
    import smp_core.checkpoint.folders.file_system as file_system

    original, file_system.rename_exchange = (
        file_system.rename_exchange,
        lambda first, second: False,
    )
    try:
        for seed in (1, 2):
            save_checkpoint(path, sharded_state(2, seed=seed))
    finally:
        file_system.rename_exchange = original
    state = sharded_state(2, seed=-1)
    load_checkpoint(path, state, verify="digests")
    return differences(gathered(state), gathered(sharded_state(2, seed=2)))


def test_all_ranks_name_their_files_alike_without_exchange(tmp_path: Path) -> None:
    assert (
        run_ranks(overwrite_without_exchange, 4, str(tmp_path / "last.ckpt"))
        == [[]] * 4
    )
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
    with pytest.raises(
        CheckpointError, match=r"was not saved.*tensors-00000-of-00001\.safetensors"
    ):
        save_checkpoint(path, small(2))
    monkeypatch.undo()
    assert differences(loaded(path), small(1)) == [] and temporaries(tmp_path) == []


def test_a_directory_that_cannot_be_made_durable_after_the_rename_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint is in its place, so the save has succeeded; what it replaced stays
    until one works."""
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


def test_rotation_makes_room_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not even LATEST can be written, older checkpoints go all the same."""
    save_step(tmp_path, 1, small(1))
    original = os.fsync

    def fsync(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if ".LATEST-" in name and (tmp_path / "step-00000001").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    # Without a number of checkpoints to keep nothing is removed, and nothing is left.
    with pytest.raises(CheckpointError, match=r"was saved, but .* No space left"):
        save_step(tmp_path, 2, small(2))
    steps = ["step-00000001", "step-00000002"]
    assert sorted(os.listdir(tmp_path)) == ["LATEST", *steps]
    save_step(tmp_path, 3, small(3), keep_last=1)
    assert sorted(os.listdir(tmp_path)) == ["LATEST", "step-00000003"]
    assert (tmp_path / "LATEST").read_text() == "step-00000003\n"

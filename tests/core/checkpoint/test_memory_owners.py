"""One job at a time has a name in shared memory, and what ended jobs leave there is
found and freed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smp_core.checkpoint import CheckpointError
from smp_core.checkpoint.folders.file_system import remove_tree
from smp_core.checkpoint.memory import tier as memory_tier
from smp_core.checkpoint.memory.folder import NodeMemory, left_by_ended_jobs
from smp_core.cli import doctor
from tests.core.checkpoint.kill_trials import fork
from tests.core.checkpoint.memory_states import (
    files,
    found_in,
    kept_until,
    state_of,
    tier,
)
from tests.harness import run_ranks


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SMP_MEMORY_FOLDER", str(tmp_path))
    return tmp_path


@contextlib.contextmanager
def another_process(work: Callable[[], None]) -> Iterator[int]:
    """A child that has done some work, and lives until the end of the block or its
    kill; its id."""
    ready, done = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            work()
            os.write(done, b"x")
            time.sleep(600)
        finally:
            os._exit(1)
    os.close(done)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def begin_anew(folder: str) -> str:
    try:
        tier(folder, by="loop").leave()
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_second_job_of_a_name_is_refused_on_all_ranks_and_the_first_one_is_left_alone(
    alone: Path,
) -> None:
    kept = kept_until(alone, 3, by="loop")
    before = {path: path.stat().st_mtime_ns for path in files(alone, "**/*")}
    for said in run_ranks(begin_anew, 2, str(alone)):
        assert (
            f"another job keeps its states in {kept.folder.path}: process {os.getpid()} "
            in said
        )
        assert (
            "call accelerator.load_newest_state(...) with another folder, or leave memory_every_n_steps out"
            in said
        )
    assert {path: path.stat().st_mtime_ns for path in files(alone, "**/*")} == before
    kept.save(state_of(4), 4, {}, 4)
    kept._saver.wait()
    kept.close(ended_well=False)
    assert found_in(alone, by="loop") == 4


def test_a_job_whose_process_is_killed_is_gone_on_from(alone: Path) -> None:
    """Also while a worker of its data loader lives on, which has its descriptors."""
    workers: list[int] = []

    def keep_and_fork() -> None:
        kept_until(alone, 3)
        worker = os.fork()
        if not worker:
            time.sleep(600)
        (alone / "worker").write_text(str(worker))

    with another_process(keep_and_fork) as pid:
        workers.append(int((alone / "worker").read_text()))
        assert "process" in begin_refused(alone)
        kill(pid)
    assert found_in(alone) == 3
    os.kill(workers[0], signal.SIGKILL)


def begin_refused(folder: Path) -> str:
    with pytest.raises(
        CheckpointError, match="another job keeps its states"
    ) as refused:
        tier(str(folder))
    return str(refused.value)


def test_ranks_that_outlive_their_first_one_are_waited_for(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have noticed its death, and end; one that hangs is named."""

    def share() -> None:
        NodeMemory(name).take(False, "")

    kept = kept_until(alone, 3)
    name = os.path.basename(kept.folder.path)
    kept.close(ended_well=False)
    with another_process(lambda: kept.folder.take(True, "")) as first:
        with another_process(share) as second:
            kill(first)
            with monkeypatch.context() as patched:
                patched.setattr(memory_tier, "_PATIENCE", 0.5)
                begin_refused(alone)
            threading.Timer(0.5, kill, [second]).start()
            assert found_in(alone) == 3


def test_a_folder_that_another_working_directory_would_not_find_is_refused(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(alone)
    monkeypatch.setenv("SMP_MEMORY_FOLDER", "mem")
    with pytest.raises(CheckpointError, match=f"SMP_MEMORY_FOLDER={alone}/mem"):
        NodeMemory("run")


def test_of_jobs_that_begin_at_the_same_instant_one_has_the_name(alone: Path) -> None:
    """Some end well at once, and remove the folder that others are about to lock."""

    def begin_often() -> None:
        for number in range(60):
            folder = NodeMemory("run")
            try:
                folder.take(True, "")
            except CheckpointError:
                continue
            # An error where another one has it.
            os.close(os.open(alone / "held", os.O_CREAT | os.O_EXCL))
            os.unlink(alone / "held")
            if number % 3 == 0:
                remove_tree(folder.path)
            folder.give_back()

    children = [fork(begin_often) for _ in range(4)]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4


def test_what_ended_jobs_left_is_removed_where_its_memory_is_needed(
    alone: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The oldest first; never what belongs to a job that runs."""
    for by in ("old", "older", "alive"):
        kept = kept_until(alone, 2, by=by)
        if by != "alive":
            kept.close(ended_well=False)
    (oldest,) = alone.glob("torch-smp-*/disk-older-*")
    os.utime(oldest, (1, 1))
    reserve = os.posix_fallocate

    def full(*arguments: Any) -> None:
        if oldest.exists():
            raise OSError(28, "No space left on device")
        reserve(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", full)
    new = kept_until(alone, 1)
    assert (
        f"{oldest}: its job has ended, and its 0.0 MiB of memory are needed: removed"
        in caplog.text
    )
    assert found_in(alone, by="old") == 2 and found_in(alone, by="alive") == 2
    new.close(ended_well=True)


def test_a_job_that_ends_at_this_instant_hinders_no_other(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for by in ("ends", "stays"):
        kept_until(alone, 1, by=by).close(ended_well=False)
    (ends,) = alone.glob("torch-smp-*/disk-ends-*")
    (stays,) = alone.glob("torch-smp-*/disk-stays-*")
    scandir = os.scandir

    def listed_and_removed(path: Any) -> Any:
        entries = list(scandir(path))
        if Path(path) == ends.parent:
            monkeypatch.setattr(os, "scandir", scandir)
            remove_tree(str(ends))
        return entries

    monkeypatch.setattr(os, "scandir", listed_and_removed)
    assert [path for path, _ in left_by_ended_jobs()] == [str(stays)]


def test_the_doctor_names_what_ended_jobs_left(alone: Path) -> None:
    kept = kept_until(alone, 1)
    assert list(doctor.states_in_memory()) == [], "it lives"
    kept.close(ended_well=False)
    (found,) = doctor.states_in_memory()
    assert found.found == f"0.0 MiB of a job that has ended, in {kept.folder.path}"
    assert f"rm -r {kept.folder.path}" in found.fix

"""What others do to a checkpoint while it is saved or loaded, at each call by number:
they overwrite it, remove it, or take files away; clocks jump; an object store fails. A
whole save loads, exact, or a CheckpointError says why not.

Quick: a sample that a seed draws. Slow: all of them.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

import smp_core.checkpoint.folders.local_folder as local_folder
import smp_core.checkpoint.writer as writer
from smp_core.checkpoint import (
    CheckpointError,
    newest_checkpoint,
    save_checkpoint,
    save_step,
    verify_checkpoint,
)
from smp_core.checkpoint.folders.file_system import try_lock
from tests.core.checkpoint.injection import (
    ERRORS,
    SEED,
    Fault,
    Injector,
    in_a_child,
    loads,
    save,
    state,
)
from tests.core.checkpoint.store_on_disk import PREFIX, StoreOnDisk
from tests.harness import run_ranks

QUICK = {"load": 10, "save": 10, "clock": 3, "store": 10, "store load": 5}
Deed = Callable[[Path], object]


def drawn(cases: list[Any], what: str) -> list[Any]:
    return random.Random(SEED).sample(cases, QUICK[what])


def judged(cases: list[Any], judge: Callable[[Any], str]) -> Counter[str]:
    """How all cases ended; a failure names its case."""
    ended: Counter[str] = Counter()
    for case in cases:
        try:
            ended[judge(case)] += 1
        except BaseException as error:
            raise AssertionError(f"{case}: {type(error).__name__} {error}") from error
    print(len(cases), dict(ended))
    return ended


# Deeds of others.


def overwrite(path: Path) -> None:
    save(path, 2)


def overwrite_without_exchange(path: Path) -> None:
    with mock.patch.object(local_folder, "can_exchange", lambda parent: False):
        save(path, 2)


def replace_by_hand(path: Path) -> None:
    shutil.rmtree(path)
    save(path, 2)


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def move_away(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def lose(pattern: str) -> Deed:
    def lose_one(path: Path) -> None:
        for file in sorted(path.glob(pattern))[:1]:
            file.unlink()

    return lose_one


WHILE_LOADING: dict[str, tuple[Deed, tuple[int | None, ...]]] = {
    "overwritten": (overwrite, (1, 2, None)),
    "overwritten without exchange": (overwrite_without_exchange, (1, 2, None)),
    "replaced": (replace_by_hand, (1, 2, None)),
    "removed": (remove, (1, None)),
    "moved": (move_away, (1, None)),
    **{
        f"{name} lost": (lose(name), (1, None))
        for name in ("manifest.json", "index*", "rest*.json", "rest*.pt")
    },
    "tensors lost": (lose("tensors*"), (1, None)),
}


def calls_of_a_load(folder: Path) -> int:
    save(folder / "counted", 1)
    injector = Injector()
    with injector.active():
        assert loads(folder / "counted") == 1
    return injector.calls


def load_meanwhile(folder: Path, case: tuple[int, str]) -> str:
    """A load of step 1, during which somebody does something."""
    at, what = case
    path = folder / "last.ckpt"
    deed, allowed = WHILE_LOADING[what]
    save(path, 1)
    with Injector(Fault(at, lambda: deed(path))).active():
        found = loads(path)
    assert found in allowed, f"{found} loads"
    after = loads(path)
    assert after in (allowed if "over" in what or "replaced" in what else (None, 1))
    if 2 in allowed:
        assert after == 2, "the other save was whole"
    remove(path)
    remove(folder / "elsewhere")
    return str(found)


def load_cases(folder: Path) -> list[tuple[int, str]]:
    return list(itertools.product(range(calls_of_a_load(folder)), WHILE_LOADING))


def test_others_at_calls_of_a_load(tmp_path: Path) -> None:
    judged(
        drawn(load_cases(tmp_path), "load"), lambda case: load_meanwhile(tmp_path, case)
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_others_at_every_call_of_a_load(tmp_path: Path) -> None:
    cases = load_cases(tmp_path)
    assert len(cases) >= 400
    judged(cases, lambda case: load_meanwhile(tmp_path, case))


# A save over step 1.


def temporary(deed: Deed) -> Deed:
    """A deed to the folder that is being written."""

    def to_temporary(path: Path) -> None:
        for found in path.parent.glob(".tmp-*"):
            deed(found)

    return to_temporary


def save_five(path: Path) -> None:
    try:
        save(path, 5)
    except CheckpointError as error:
        # At the instant at which the other is moved into place.
        if "another job has held the lock of" not in str(error):
            raise


WHILE_SAVING: dict[str, tuple[Deed, tuple[int | None, ...]]] = {
    "what is written is removed": (temporary(remove), (1, 2)),
    "a written file is lost": (temporary(lose("tensors*")), (1, 2)),
    "the old one is removed": (remove, (2, None)),
    "the old one loses a file": (lose("tensors*"), (1, 2, None)),
    "another job saves there": (save_five, (5, 2)),
}


def save_meanwhile(folder: Path, case: tuple[int, str, bool]) -> str:
    at, what, exchange = case
    path = folder / "last.ckpt"
    save(path, 1)
    deed, allowed = WHILE_SAVING[what]
    ended = "saved"
    injector = Injector(Fault(at, lambda: deed(path)))
    try:
        waits = mock.patch.object(local_folder, "_OTHERS_SECONDS", 0.0)
        with waits, injector.active(exchange):
            save(path, 2)
    except CheckpointError:
        ended = "refused"
        # What was taken away was this save, renamed into place already: the one before
        # is back.
        allowed = (*allowed, 1) if what == "the old one is removed" else allowed
    found = loads(path)
    whole = {None} if verify_checkpoint(path, deep=True) else {found}
    after_commit = (
        what == "the old one loses a file" or what == "the old one is removed"
    )
    if ended == "saved" and not after_commit:
        assert found in (2, 5), f"the save returned, and {found} loads"
    assert found in (*allowed, None if after_commit else 2), (
        f"{ended}, and {found} loads"
    )
    save(path, 3)
    assert loads(path) == 3
    assert whole
    for name in os.listdir(folder):
        remove(folder / name)
    return f"{ended} {found}"


def save_cases(folder: Path) -> list[tuple[int, str, bool]]:
    cases: list[tuple[int, str, bool]] = []
    for exchange in (True, False):
        path = folder / "counted"
        save(path, 1)
        injector = Injector()
        with injector.active(exchange):
            save(path, 2)
        cases += itertools.product(range(injector.calls), WHILE_SAVING, (exchange,))
    return cases


def test_others_at_calls_of_a_save(tmp_path: Path) -> None:
    judged(
        drawn(save_cases(tmp_path), "save"), lambda case: save_meanwhile(tmp_path, case)
    )


def test_a_job_that_was_stopped_while_it_moved_its_save_into_place_holds_nobody_up(
    tmp_path: Path,
) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1)
    lock = try_lock(str(path))
    assert lock is not None
    without_exchange = mock.patch.object(
        local_folder, "can_exchange", lambda parent: False
    )
    with without_exchange, mock.patch.object(local_folder, "_OTHERS_SECONDS", 0.2):
        with pytest.raises(CheckpointError, match="another job has held the lock of"):
            save(path, 2)
        assert loads(path) == 1
        os.close(lock)
        save(path, 2)
    assert loads(path) == 2


def test_a_process_that_was_forked_during_a_save_holds_nobody_up(
    tmp_path: Path,
) -> None:
    """A data loader's worker has the descriptors of all locks."""
    path = tmp_path / "last.ckpt"
    save(path, 1)
    workers: list[int] = []
    rename = os.rename

    def forking(source: Any, to: Any) -> None:
        if str(to).endswith("manifest.json"):
            workers.append(os.fork())
            if not workers[-1]:
                time.sleep(60)
                os._exit(0)
        rename(source, to)

    without_exchange = mock.patch.object(
        local_folder, "can_exchange", lambda parent: False
    )
    try:
        with without_exchange, mock.patch.object(local_folder, "_OTHERS_SECONDS", 0.2):
            with mock.patch.object(os, "rename", forking):
                save(path, 2)
            save(path, 3)
        assert loads(path) == 3 and len(workers) == 1
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_others_at_every_call_of_a_save(tmp_path: Path) -> None:
    cases = save_cases(tmp_path)
    assert len(cases) >= 400
    assert judged(cases, lambda case: save_meanwhile(tmp_path, case))["saved 5"], (
        "the other job has saved, too"
    )


# A file that vanishes inside the commit.

FILES = ("manifest.json", "index*", "rest*", "tensors*", "extra/*")


@contextlib.contextmanager
def losing_in_the_commit(pattern: str, exchange: bool = True) -> Iterator[None]:
    """Remove a file of the save in the instant before the rename that commits it."""
    lost: list[Path] = []

    def losing(call: Callable[..., Any], where: int) -> Callable[..., Any]:
        def called(*arguments: Any, **keywords: Any) -> Any:
            source, target = Path(arguments[0]), Path(arguments[-1])
            folder = target.parent if where else source
            is_commit = (
                target.name == "manifest.json"
                if where
                else source.name.startswith(".tmp-")
            )
            if is_commit and not lost:
                # A new one.
                lost.extend(sorted(folder.glob(pattern), key=os.path.getctime)[-1:])
                lost[0].unlink()
            return call(*arguments, **keywords)

        return called

    with contextlib.ExitStack() as stack:
        for name in ("rename_new", "rename_exchange"):
            call = getattr(local_folder, name)
            stack.enter_context(mock.patch.object(local_folder, name, losing(call, 0)))
        stack.enter_context(mock.patch.object(os, "rename", losing(os.rename, 1)))
        stack.enter_context(
            mock.patch.object(local_folder, "can_exchange", lambda parent: exchange)
        )
        yield


@pytest.mark.parametrize("way", ["new", "exchanged", "moved in"])
def test_a_file_that_vanishes_inside_the_commit_is_an_error_and_the_old_one_stays(
    way: str, tmp_path: Path
) -> None:
    for pattern in FILES:
        path = tmp_path / pattern.strip("/*") / "last.ckpt"
        before = None
        if way != "new":
            save(path, 1)
            before = 1
        if way == "moved in" and pattern == "manifest.json":
            continue  # it is what the rename moves
        with (
            losing_in_the_commit(pattern, exchange=way != "moved in"),
            pytest.raises(CheckpointError, match="is gone"),
        ):
            save(path, 2)
        assert loads(path) == before, pattern
        assert path.exists() == (before is not None)
        save(path, 3)
        assert loads(path) == 3
        assert os.listdir(path.parent) == ["last.ckpt"]


def test_an_object_that_vanishes_inside_the_commit_is_an_error_and_the_old_one_stays() -> (
    None
):
    fs = fsspec.filesystem("memory")
    put = MemoryFileSystem.pipe_file

    for before in (None, 1):
        if before:
            save(STORE, before)
        old = set(fs.find(STORE)) if before else set()

        def lose_new(
            own: Any,
            path: str,
            value: bytes,
            *arguments: Any,
            old: set[str] = old,
            **keywords: Any,
        ) -> Any:
            if path.endswith("manifest.json"):
                for name in [
                    name
                    for name in fs.find(STORE)
                    if "tensors" in name and name not in old
                ]:
                    fs.rm_file(name)
            return put(own, path, value, *arguments, **keywords)

        with (
            mock.patch.object(MemoryFileSystem, "pipe_file", lose_new),
            pytest.raises(CheckpointError, match="is gone"),
        ):
            save(STORE, 2)
        assert loads(STORE) == before
        save(STORE, 3)
        assert loads(STORE) == 3
        fs.rm(STORE, recursive=True)


def saved_by_ranks(path: str) -> str:
    with (
        losing_in_the_commit("index*")
        if dist.get_rank() == 0
        else contextlib.nullcontext()
    ):
        try:
            save_checkpoint(path, state(2))
        except CheckpointError as error:
            return str(error)
    return ""


def test_all_ranks_hear_of_a_file_that_vanished(tmp_path: Path) -> None:
    for said in run_ranks(saved_by_ranks, 2, str(tmp_path / "last.ckpt")):
        assert "index.json is gone" in said


# Clocks.

JUMPS = (-3600.0, -365 * 86400.0, 365 * 86400.0, 5.0, -1e9)


@contextlib.contextmanager
def jumping(offset: float) -> Iterator[None]:
    now, date = time.time, datetime.datetime

    class Jumped(datetime.datetime):
        """The clock that manifests are dated by."""

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return date.now(tz) + datetime.timedelta(seconds=offset)

    dates = SimpleNamespace(datetime=Jumped, timezone=datetime.timezone)
    with (
        mock.patch.object(time, "time", lambda: now() + offset),
        mock.patch.object(writer, "datetime", dates),
    ):
        yield


def touch_all(folder: Path, offset: float) -> None:
    """Let files have the times that the jumped clock would have given them."""
    for path in [folder, *folder.rglob("*")]:
        then = max(0.0, time.time() + offset)
        os.utime(path, (then, then))


def save_while_clocks_jump(folder: Path, seed: int) -> str:
    """Six saves, some of an earlier step again, with another time each; another job
    writes all the while."""
    draw = random.Random(seed)
    root, step, saved = folder / str(seed), 0, []
    root.mkdir()
    alive = root / ".tmp-other-00000000-000000000000"
    alive.mkdir()
    lock = try_lock(str(alive))
    assert lock is not None
    for _ in range(6):
        step = max(0, step + draw.choice((10, 10, -10)))
        offset = draw.choice(JUMPS)
        with jumping(offset):
            path = save_step(root, step, state(step), keep_last=2, overwrite=True)
            saved = [each for each in saved if each != step] + [step]
            touch_all(Path(path), offset)
            assert newest_checkpoint(root) == path
        assert loads(path) == step
        kept = {
            int(name.removeprefix("step-"))
            for name in os.listdir(root)
            if name.startswith("step-")
        }
        assert kept == set(saved[-2:]), f"{kept} are kept of {saved}"
        saved = saved[-2:]
        assert alive.exists(), "what another job is writing was removed"
    os.close(lock)
    return "as saved"


def test_clocks_that_jump_between_saves(tmp_path: Path) -> None:
    judged(
        list(range(QUICK["clock"])), lambda seed: save_while_clocks_jump(tmp_path, seed)
    )


@pytest.mark.slow
def test_clocks_that_jump_a_hundred_times(tmp_path: Path) -> None:
    judged(list(range(100)), lambda seed: save_while_clocks_jump(tmp_path, seed))


# Object stores.


class StoreError(Exception):
    """A store's own, which is no OSError."""


STORE = "memory://bucket/run/last"
STORE_ERRORS: tuple[Exception, ...] = (
    *(OSError(code, os.strerror(code)) for code in ERRORS[:2]),
    *(
        PermissionError("403"),
        ConnectionError("reset"),
        TimeoutError("late"),
        FileNotFoundError("404"),
    ),
    StoreError("500: slow down"),
)


@pytest.fixture(autouse=True)
def empty_store() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()


def calls_in_store(action: Callable[[], object]) -> int:
    injector = Injector()
    with injector.active_in_store(MemoryFileSystem):
        action()
    return injector.calls


def store_cases() -> list[tuple[int, Exception, bool]]:
    save(STORE, 1)
    calls = calls_in_store(lambda: save(STORE, 2))
    return list(itertools.product(range(calls), STORE_ERRORS, (False, True)))


def save_in_a_failing_store(case: tuple[int, Exception, bool]) -> str:
    at, error, stays = case
    fsspec.filesystem("memory").store.clear()
    save(STORE, 1)
    ended = "saved"
    try:
        with Injector(Fault(at, error, stays)).active_in_store(MemoryFileSystem):
            save(STORE, 2)
    except CheckpointError:
        ended = "refused"
    found = loads(STORE)
    assert found == 2 if ended == "saved" else found in (1, 2), (
        f"{ended}, and {found} loads"
    )
    save(STORE, 3)
    assert loads(STORE) == 3
    return ended


def load_in_a_failing_store(case: tuple[int, Exception, bool]) -> str:
    with Injector(Fault(*case)).active_in_store(MemoryFileSystem):
        found = loads(STORE)
    assert found in (None, 1)
    return str(found)


def store_load_cases() -> list[tuple[int, Exception, bool]]:
    save(STORE, 1)
    calls = calls_in_store(lambda: loads(STORE))
    return list(itertools.product(range(calls), STORE_ERRORS, (False, True)))


def killed_in_a_store(folder: Path, case: tuple[int, str]) -> str:
    """In a store on disk: what a killed process has written is there."""
    at, when = case
    address = f"{PREFIX}{folder}/last"
    save(address, 1)

    def attempt() -> None:
        with Injector(Fault(at, when)).active_in_store(StoreOnDisk):
            save(address, 2)

    status = in_a_child(attempt)
    assert os.WIFSIGNALED(status) or status == 0
    found = loads(address)
    assert found in ((1, 2) if status else (2,)), f"{found} loads"
    save(address, 3)
    assert loads(address) == 3
    shutil.rmtree(folder / "last")
    return "killed" if status else "saved"


def kill_cases(folder: Path) -> list[tuple[int, str]]:
    address = f"{PREFIX}{folder}/counted"
    save(address, 1)
    injector = Injector()
    with injector.active_in_store(StoreOnDisk):
        save(address, 2)
    return list(itertools.product(range(injector.calls), ("before", "after")))


def test_errors_and_kills_at_calls_to_an_object_store(tmp_path: Path) -> None:
    judged(drawn(store_cases(), "store"), save_in_a_failing_store)
    fsspec.filesystem("memory").store.clear()
    judged(drawn(store_load_cases(), "store load"), load_in_a_failing_store)
    judged(
        random.Random(SEED).sample(kill_cases(tmp_path), 3),
        lambda case: killed_in_a_store(tmp_path, case),
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_error_and_kill_at_every_call_to_an_object_store(tmp_path: Path) -> None:
    cases = store_cases()
    assert judged(cases, save_in_a_failing_store).total() >= 200
    fsspec.filesystem("memory").store.clear()
    judged(store_load_cases(), load_in_a_failing_store)
    assert (
        judged(kill_cases(tmp_path), lambda case: killed_in_a_store(tmp_path, case))[
            "killed"
        ]
        >= 20
    )

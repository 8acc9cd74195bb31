"""Checkpoints under fsspec addresses: the manifest is the commit, nothing is written
over, the old one stays valid."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import smp_core.checkpoint.folders.object_folder as object_folder
import smp_core.checkpoint.sequence as sequence
from smp_core.checkpoint import (
    CheckpointError,
    consolidate,
    find_checkpoints,
    is_checkpoint,
    load_checkpoint,
    newest_checkpoint,
    read_rest,
    remove_checkpoint,
    save_checkpoint,
    save_step,
    verify_checkpoint,
)
from tests.core.checkpoint.states import (
    differences,
    gathered,
    rest,
    sharded_state,
    values,
)
from tests.core.checkpoint.store_on_disk import PREFIX
from tests.harness import run_ranks

ROOT = "memory://bucket/run"


@pytest.fixture(autouse=True)
def empty_store() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()


def files() -> list[str]:
    return sorted(fsspec.filesystem("memory").find("/bucket"))


def state(seed: int) -> dict[str, Any]:
    return {"state_dict": values(seed), "rest": rest(seed)}


def loaded(address: str) -> Any:
    return read_rest(address, tensors=["*"])


def test_a_checkpoint_comes_back_and_is_replaced_without_leftovers() -> None:
    save_checkpoint(f"{ROOT}/last", state(1), extra_files={"config.json": "{}"})
    save_checkpoint(f"{ROOT}/last", state(2))
    assert differences(loaded(f"{ROOT}/last"), state(2)) == []
    assert verify_checkpoint(f"{ROOT}/last", deep=True) == []
    assert len(files()) == 5, files()
    target = {
        "state_dict": {name: torch.zeros_like(t) for name, t in values(2).items()}
    }
    load_checkpoint(f"{ROOT}/last", target, verify="digests")
    assert differences(target["state_dict"], values(2)) == []


def test_a_save_that_fails_leaves_the_old_one_and_no_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_checkpoint(f"{ROOT}/last", state(1))
    before = files()
    with monkeypatch.context() as patch:

        def fail(self: Any, manifest: bytes) -> None:
            raise OSError("no connection")

        patch.setattr(object_folder.ObjectTransaction, "commit", fail)
        with pytest.raises(CheckpointError, match="no connection"):
            save_checkpoint(f"{ROOT}/last", state(2))
    assert files() == before
    assert differences(loaded(f"{ROOT}/last"), state(1)) == []


def test_a_crash_before_the_manifest_leaves_the_old_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_checkpoint(f"{ROOT}/last", state(1))
    monkeypatch.setattr(object_folder.ObjectTransaction, "abort", lambda self: None)
    with monkeypatch.context() as patch:

        def crash(self: Any, manifest: bytes) -> None:
            raise KeyboardInterrupt

        patch.setattr(object_folder.ObjectTransaction, "commit", crash)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(f"{ROOT}/last", state(2))
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(f"{ROOT}/fresh", state(2))
    assert differences(loaded(f"{ROOT}/last"), state(1)) == []
    assert not is_checkpoint(f"{ROOT}/fresh")
    with pytest.raises(CheckpointError, match="half a checkpoint"):
        read_rest(f"{ROOT}/fresh")
    assert find_checkpoints(ROOT) == ["last"]


def test_leftovers_that_cannot_be_removed_cost_no_save(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = fsspec.filesystem("memory")
    store.pipe_file(
        "/bucket/run/last/tensors-00000-of-00001-0123456789ab.safetensors", b"half"
    )
    monkeypatch.setattr(object_folder, "_STALE_SECONDS", -1.0)

    def refused(self: Any, path: str) -> None:
        raise PermissionError("deleting is not allowed")

    monkeypatch.setattr(type(store), "rm_file", refused)
    for seed in (1, 2):
        save_checkpoint(f"{ROOT}/last", state(seed))
        assert differences(loaded(f"{ROOT}/last"), state(seed)) == []
    assert (
        "tensors-00000-of-00001-0123456789ab.safetensors could not be removed: deleting"
        in caplog.text
    )


def test_a_root_of_steps_works_like_a_local_one(tmp_path: Path) -> None:
    for step in range(4):
        save_step(ROOT, step, state(step), keep_last=2)
    assert find_checkpoints(ROOT) == ["step-00000002", "step-00000003"]
    assert fsspec.filesystem("memory").cat("/bucket/run/LATEST") == b"step-00000003\n"
    with pytest.raises(CheckpointError, match="exists already"):
        save_step(ROOT, 3, state(3))
    newest = newest_checkpoint(ROOT)
    assert newest == f"{ROOT}/step-00000003"
    consolidate(newest, tmp_path / "out.pt")
    assert torch.equal(torch.load(tmp_path / "out.pt")["half"], values(3)["half"])
    remove_checkpoint(newest)
    assert newest_checkpoint(ROOT) == f"{ROOT}/step-00000002"


def test_damage_is_found_there_too() -> None:
    save_checkpoint(f"{ROOT}/a", state(1))
    store = fsspec.filesystem("memory")
    file = next(name for name in files() if "tensors-" in name)
    content = bytearray(store.cat(file))
    content[-1] ^= 1
    store.pipe(file, bytes(content))
    assert "tensors-" in verify_checkpoint(f"{ROOT}/a", deep=True)[0]
    store.pipe(file, bytes(content[:-1]))
    assert "the manifest says" in verify_checkpoint(f"{ROOT}/a")[0]
    store.rm(file)
    assert "is missing" in verify_checkpoint(f"{ROOT}/a")[0]


def test_something_foreign_there_is_not_overwritten() -> None:
    fsspec.filesystem("memory").pipe("/bucket/run/thesis.tex", b"x")
    with pytest.raises(CheckpointError, match="not overwritten"):
        save_checkpoint(ROOT, state(1))
    with pytest.raises(CheckpointError, match="nothing exists"):
        read_rest("memory://bucket/nothing")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        read_rest("nosuchprotocol://bucket/nothing")


def test_notes_beside_a_checkpoint_stay_when_it_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a local folder; however old they are, and whatever they are called."""
    save_checkpoint(f"{ROOT}/last", state(1))
    store = fsspec.filesystem("memory")
    notes = [f"/bucket/run/last/{name}" for name in ("notes.md", "index-of-runs.txt")]
    for path in notes:
        store.pipe(path, b"x")
    monkeypatch.setattr(object_folder, "_STALE_SECONDS", -1.0)
    save_checkpoint(f"{ROOT}/last", state(2))
    assert differences(loaded(f"{ROOT}/last"), state(2)) == []
    assert set(notes) <= set(files()) and len(files()) == 7, files()


def test_a_folder_that_a_stores_console_made_is_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = fsspec.filesystem("memory")
    find = type(store).find

    def with_marker(self: Any, path: str, **options: Any) -> Any:
        found = find(self, path, **options)
        return found if options else [f"{path}/", *found]

    monkeypatch.setattr(type(store), "find", with_marker)
    save_checkpoint(f"{ROOT}/last", state(1))
    assert differences(loaded(f"{ROOT}/last"), state(1)) == []


def save_by_four(path: str) -> Any:
    """A store that all ranks share."""
    state = sharded_state(2, seed=1)
    save_checkpoint(path, state)
    save_checkpoint(path, state)
    target = sharded_state(2, seed=-1)
    load_checkpoint(path, target, verify="digests")
    return gathered(target), gathered(state)


def test_ranks_save_and_load_together_through_fsspec(tmp_path: Path) -> None:
    for found, expected in run_ranks(save_by_four, 4, f"{PREFIX}{tmp_path}/a"):
        assert differences(found, expected) == []
    assert len(list((tmp_path / "a").glob("tensors-*"))) == 4


def test_a_save_is_not_numbered_by_a_store_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A number below those of earlier saves would make the newest one the oldest."""
    save_step(ROOT, 1, state(1))
    monkeypatch.setattr(sequence, "_given", {})
    with monkeypatch.context() as patch:

        def fail(*_: Any, **__: Any) -> None:
            raise TimeoutError("late")

        patch.setattr(type(fsspec.filesystem("memory")), "cat_file", fail)
        with pytest.raises(CheckpointError, match="late"):
            save_step(ROOT, 2, state(2))
    save_step(ROOT, 3, state(3))
    assert newest_checkpoint(ROOT) == f"{ROOT}/step-00000003"


class OwnError(Exception):
    """A store's own, which is no OSError."""


@pytest.mark.parametrize(
    "error", [PermissionError("403"), TimeoutError("late"), OwnError("500: slow down")]
)
def test_what_a_store_raises_is_told_as_ours_by_every_reader(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is never taken for a folder without checkpoints: a run would begin anew and
    write over them."""
    save_step(ROOT, 1, state(1))
    folder = object_folder.ObjectFolder(f"{ROOT}/step-00000001")
    file = folder.open("manifest.json")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    for method in ("exists", "find", "info", "cat_file", "ls"):
        monkeypatch.setattr(type(folder.fs), method, fail)
    readers = {
        "exists": folder.exists,
        "names": folder.names,
        "listing": folder.listing,
        "size": lambda: folder.size("manifest.json"),
        "read": lambda: folder.read("manifest.json", 1 << 20),
        "open": lambda: folder.open("manifest.json"),
        "read_into": lambda: file.read_into(0, memoryview(bytearray(4))),
        "rest": lambda: loaded(f"{ROOT}/step-00000001"),
        "find": lambda: find_checkpoints(ROOT),
        "newest": lambda: newest_checkpoint(ROOT),
        "remove": lambda: remove_checkpoint(f"{ROOT}/step-00000001"),
    }
    for name, reader in readers.items():
        with pytest.raises(CheckpointError, match=str(error)):
            pytest.fail(f"{name} returned {reader()}")

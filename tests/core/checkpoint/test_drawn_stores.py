"""Random lives of a folder of checkpoints on an object store whose every request may
fail, before or after it has had its effect: what was committed stays, exact, the user's
files stay, and nothing else is left for long."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
import torch

import smp_core.checkpoint.folders.object_folder as object_folder
import smp_core.checkpoint.sequence as sequence
from smp_core.checkpoint import (
    CheckpointError,
    newest_checkpoint,
    open_checkpoint,
    read_rest,
    remove_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from smp_core.checkpoint.folders.storage import is_own
from smp_core.checkpoint.layout import MANIFEST

ROOT = "memory://bucket/run"
REQUESTS = (
    "find",
    "info",
    "cat_file",
    "pipe_file",
    "open",
    "rm_file",
    "rm",
    "makedirs",
    "exists",
    "modified",
    "ls",
)
PLACES = ("last", "step-00000001", "step-00000002")
FOREIGN = ("notes.md", "index-of-runs.txt", "tensors", "rest", "more/x.json")


class Refused(Exception):
    """A store's own error."""


class Faults:
    """Requests of the memory store: the one of a number fails."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = 0  # requests until one fails; 0: none will
        self.has_effect = self.has_failed = False
        self._inside = False
        kind = type(fsspec.filesystem("memory"))
        for name in REQUESTS:
            patch.setattr(kind, name, self._failing(getattr(kind, name)))

    def _failing(self, method: Any) -> Any:
        @functools.wraps(method)
        def request(fs: Any, *arguments: Any, **options: Any) -> Any:
            # What the store's own methods call is part of one request.
            if self._inside:
                return method(fs, *arguments, **options)
            fails = self.left == 1
            self.left = max(0, self.left - 1)
            self.has_failed |= fails
            if fails and not self.has_effect:
                raise Refused("503")
            self._inside = True
            try:
                result = method(fs, *arguments, **options)
            finally:
                self._inside = False
            if fails:
                raise Refused("late")
            return result

        return request


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    monkeypatch.setattr(sequence, "_given", {})
    with monkeypatch.context() as patch:
        yield Faults(patch)
    fsspec.filesystem("memory").store.clear()


def state(number: int) -> dict[str, Any]:
    return {
        "w": torch.full((3,), float(number)),
        "number": number,
        "plain": {number},
    }


class Life:
    """What has to be in the store: by place the number of the last commit, and the
    user's files."""

    def __init__(self, rng: random.Random, faults: Faults) -> None:
        self.rng, self.faults = rng, faults
        self.store = fsspec.filesystem("memory")
        self.committed: dict[str, int] = {}
        self.newest: list[str] = []
        self.foreign: set[str] = set()
        self.number = 0
        self.did: list[str] = []

    def act(self) -> None:
        place = self.rng.choice(PLACES)
        what = self.rng.choice(("save", "save", "save", "remove", "foreign", "forget"))
        self.faults.has_effect = self.rng.random() < 0.5
        self.faults.left = self.rng.choice((0, self.rng.randint(1, 30)))
        self.did.append(f"{what} {place} {self.faults.left} {self.faults.has_effect}")
        self.faults.has_failed = False
        getattr(self, f"_{what}")(place)
        self.faults.left = 0

    def _save(self, place: str) -> None:
        self.number += 1
        extra = {"config.json": "{}"} if self.rng.random() < 0.5 else {}
        refused = any(path.startswith(f"{place}/") for path in self.foreign)
        try:
            save_checkpoint(
                f"{ROOT}/{place}",
                state(self.number),
                extra_files=extra,
                metadata={"step": self.number},
            )
        except CheckpointError as error:
            self.faults.left = 0
            if "not overwritten" in str(error):
                assert refused and place not in self.committed, error
            elif self.value(place) == self.number:
                # It arrived, and the store said it had not.
                self.commit(place)
            return
        self.faults.left = 0
        self.commit(place)
        if not self.faults.has_failed:
            self.require_tidy(place)

    def commit(self, place: str) -> None:
        self.committed[place] = self.number
        self.newest = [each for each in self.newest if each != place] + [place]

    def _remove(self, place: str) -> None:
        with contextlib.suppress(Exception):
            remove_checkpoint(f"{ROOT}/{place}")
        self.faults.left = 0
        # Its manifest goes first: either all of it is there, or it is none.
        if not self.store.exists(f"/bucket/run/{place}/{MANIFEST}"):
            self.committed.pop(place, None)
            self.newest = [each for each in self.newest if each != place]
            self.foreign = {
                path
                for path in self.foreign
                if self.store.exists(f"/bucket/run/{path}")
            }

    def _foreign(self, place: str) -> None:
        self.faults.left = 0
        path = f"{place}/{self.rng.choice(FOREIGN)}"
        self.store.pipe_file(f"/bucket/run/{path}", b"mine")
        self.foreign.add(path)

    def _forget(self, place: str) -> None:
        """Go on as another process."""
        sequence._given.clear()

    def value(self, place: str) -> int | None:
        try:
            return int(read_rest(f"{ROOT}/{place}")["number"])
        except CheckpointError:
            return None

    def require_tidy(self, place: str) -> None:
        """Nothing but what the manifest names is left of earlier saves."""
        manifest = open_checkpoint(f"{ROOT}/{place}").manifest
        names = {
            name.removeprefix(f"/bucket/run/{place}/")
            for name in self.store.find(f"/bucket/run/{place}")
        }
        left = names - {MANIFEST, *manifest.files}
        assert not {name for name in left if is_own(name)}, left

    def check(self) -> None:
        for place in PLACES:
            assert self.value(place) == self.committed.get(place), place
            if place in self.committed:
                address = f"{ROOT}/{place}"
                assert verify_checkpoint(address, deep=True) == []
                whole = read_rest(address, tensors=["*"], allow_pickle=True)
                assert whole["w"].eq(self.committed[place]).all()
        newest = newest_checkpoint(ROOT) if self.store.exists("/bucket/run") else None
        assert newest == (f"{ROOT}/{self.newest[-1]}" if self.newest else None)
        for path in self.foreign:
            assert self.store.cat(f"/bucket/run/{path}") == b"mine", path


def live(seed: int, faults: Faults, patch: pytest.MonkeyPatch, actions: int) -> None:
    patch.setattr(object_folder, "_STALE_SECONDS", -1.0)
    life = Life(random.Random(seed), faults)
    for _ in range(actions):
        life.act()
        try:
            life.check()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {life.did}: {error}") from error
    fsspec.filesystem("memory").store.clear()
    sequence._given.clear()


def test_a_store_that_fails_loses_nothing(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of this run of the tests; the error names it.
    seed = random.SystemRandom().randrange(1 << 30)
    live(seed, faults, monkeypatch, 30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_a_store_that_fails_loses_nothing_in_many_lives(
    seed: int, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(seed, faults, monkeypatch, 60)

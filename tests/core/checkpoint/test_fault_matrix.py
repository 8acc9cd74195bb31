"""Hundreds of faults, each by number: after every one of them a whole checkpoint loads,
exact, or a CheckpointError says why not; nothing else is raised, and the next save
succeeds and tidies up.

Quick: a sample that a seed draws. Slow: all of them.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from smp_core.checkpoint import CheckpointError
from tests.core.checkpoint.injection import (
    DAMAGES,
    ERRORS,
    SEED,
    Fault,
    Injector,
    harm,
    in_a_child,
    loads,
    save,
)

QUICK = {"kill": 14, "errno": 12, "load": 6, "damage": 10}


def calls_of(folder: Path, fresh: bool, exchange: bool) -> int:
    """The number of calls of a save."""
    path = folder / "counted"
    if not fresh:
        save(path, 1)
    injector = Injector()
    with injector.active(exchange):
        save(path, 2)
    shutil.rmtree(path)
    return injector.calls


def save_with_fault(path: Path, injector: Injector, exchange: bool) -> str:
    """Save step 2 in this process or, where it is killed, in a child; return how that
    ended."""

    def attempt() -> str:
        try:
            with injector.active(exchange):
                save(path, 2)
        except CheckpointError:
            return "refused"
        return "saved"

    assert injector.fault is not None
    if isinstance(injector.fault.kind, int):
        return attempt()
    status = in_a_child(attempt)
    assert os.WIFSIGNALED(status) or status == 0, f"the child failed: {status}"
    return "killed" if status else "saved"  # saves differ by a call or two


def check_save(folder: Path, fault: Fault, fresh: bool, exchange: bool) -> str:
    """One fault in a save, judged."""
    path = folder / "last.ckpt"
    if not fresh:
        save(path, 1)
    injector = Injector(fault)
    ended = save_with_fault(path, injector, exchange)
    found = loads(path)
    if ended == "saved":
        assert found == 2, f"the save returned, and {found} loads"
    else:
        assert found in ((None, 2) if fresh else (1, 2)), f"{ended}, and {found} loads"
    save(path, 3)
    assert loads(path) == 3
    left = [name for name in os.listdir(folder) if name != "last.ckpt"]
    # Made before it had a name and a lock: empty, and swept when it is old.
    for name in left:
        could_not_remove = (
            ended == "killed" or fault.stays or injector.struck == "rmdir"
        )
        assert name.startswith(".new-") and could_not_remove, (
            f"the next save leaves {name}"
        )
        os.rmdir(folder / name)
    shutil.rmtree(path)
    return ended


def faults(
    folder: Path, kinds: list[tuple[int | str, bool]]
) -> list[tuple[Fault, bool, bool]]:
    """All faults of these kinds at all calls: over a checkpoint and at a fresh path,
    with and without exchange."""
    cases = []
    for fresh, exchange in ((False, True), (False, False), (True, True)):
        calls = calls_of(folder, fresh, exchange)
        cases += [
            (Fault(at, *kind), fresh, exchange)
            for at, kind in itertools.product(range(calls), kinds)
        ]
    return cases


KILLS: list[tuple[int | str, bool]] = [("before", False), ("after", False)]
ERRNOS: list[tuple[int | str, bool]] = [
    *((code, False) for code in ERRORS),
    (ERRORS[0], True),
]


def run(folder: Path, cases: list[tuple[Fault, bool, bool]]) -> Counter[str]:
    ended: Counter[str] = Counter()
    for fault, fresh, exchange in cases:
        try:
            ended[check_save(folder, fault, fresh, exchange)] += 1
        except BaseException as error:
            raise AssertionError(
                f"{fault}, fresh={fresh}, exchange={exchange}: {type(error).__name__} {error}"
            ) from error
    print(dict(ended))
    return ended


def drawn(cases: list[Any], what: str) -> list[Any]:
    return random.Random(SEED).sample(cases, QUICK[what])


def test_kills_at_calls_of_a_save(tmp_path: Path) -> None:
    run(tmp_path, drawn(faults(tmp_path, KILLS), "kill"))


def test_errors_at_calls_of_a_save(tmp_path: Path) -> None:
    run(tmp_path, drawn(faults(tmp_path, ERRNOS), "errno"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_kill_before_and_after_every_call_of_a_save(tmp_path: Path) -> None:
    assert run(tmp_path, faults(tmp_path, KILLS))["killed"] >= 200


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_error_at_every_call_of_a_save(tmp_path: Path) -> None:
    assert run(tmp_path, faults(tmp_path, ERRNOS)).total() >= 300


def check_loads(folder: Path, cases: list[Fault]) -> None:
    """Errors while loading: the step that is there, or a CheckpointError."""
    for fault in cases:
        try:
            with Injector(fault).active():
                found = loads(folder / "last.ckpt")
        except BaseException as error:
            raise AssertionError(f"{fault}: {type(error).__name__} {error}") from error
        assert found in (None, 1), fault


def load_faults(folder: Path) -> list[Fault]:
    save(folder / "last.ckpt", 1)
    injector = Injector()
    with injector.active():
        assert loads(folder / "last.ckpt") == 1
    return [
        Fault(at, code) for at, code in itertools.product(range(injector.calls), ERRORS)
    ]


def test_errors_at_calls_of_a_load(tmp_path: Path) -> None:
    check_loads(tmp_path, drawn(load_faults(tmp_path), "load"))


@pytest.mark.slow
def test_every_error_at_every_call_of_a_load(tmp_path: Path) -> None:
    cases = load_faults(tmp_path)
    print(len(cases))
    check_loads(tmp_path, cases)


def damages(folder: Path) -> list[tuple[str, str, str]]:
    """(file, its neighbour, damage) for all files of a checkpoint."""
    path = folder / "original"
    save(path, 1)
    files = sorted(
        str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()
    )
    neighbours = zip(files, [*files[1:], files[0]], strict=True)
    return [
        (file, other, kind)
        for (file, other), kind in itertools.product(neighbours, DAMAGES)
    ]


def check_damages(folder: Path, cases: list[tuple[str, str, str]]) -> None:
    """A damaged file is never loaded from; extra files, which a load does not read,
    leave step 1 as it was."""
    for number, (file, other, kind) in enumerate(cases):
        copy = Path(shutil.copytree(folder / "original", folder / "copy"))
        changed = harm(copy / file, copy / other, kind, SEED + number)
        found = loads(copy)
        untouched = file.startswith("extra/") or not changed
        assert found in ((None, 1) if untouched else (None,)), (file, kind, found)
        shutil.rmtree(copy)


def test_damaged_files(tmp_path: Path) -> None:
    check_damages(tmp_path, drawn(damages(tmp_path), "damage"))


@pytest.mark.slow
def test_every_damage_of_every_file(tmp_path: Path) -> None:
    cases = damages(tmp_path)
    print(len(cases))
    assert len(DAMAGES) == 17 and len(cases) >= 17 * 5
    check_damages(tmp_path, cases)

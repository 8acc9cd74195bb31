"""Pytest configuration of the whole suite."""

from __future__ import annotations

import gc
import os
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.harness import close_pools
from tests.rank_worker import YOUNG_OBJECTS, seed_all

# The same examples every time, however long a busy machine takes over one: a change is
# judged by what it changes.
settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("steady")

# Ranks have one thread, and so has what they are compared with: some kernels add up in
# another order with more.
torch.set_num_threads(1)

# Typer asks them for colours when it is imported.
for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS"):
    os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def same_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the files that a worker has run before nor the terminal decide over a
    test: what it draws without a seed is always the same, and what it prints has the
    width and the colours that it asks for."""
    seed_all()
    # As where there is no terminal; unset, a terminal of 40 would have its say.
    monkeypatch.setenv("COLUMNS", "80")
    for variable in (
        "LINES",
        "FORCE_COLOR",
        "NO_COLOR",
        "CLICOLOR_FORCE",
        "TTY_COMPATIBLE",
    ):
        monkeypatch.delenv(variable, raising=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of few tests first: these tests take long, and a long file that is the last
    to begin leaves the other workers with nothing to do (with `--no-loadscope-reorder`,
    for xdist would do the opposite)."""
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: tests[item.path])


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported by now stays: the garbage collector need not walk over it again
    and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_pools()
    gc.unfreeze()  # libraries complain about what is left when the interpreter ends

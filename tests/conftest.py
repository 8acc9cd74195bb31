"""Pytest configuration of the whole suite."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.harness import close_pools
from tests.rank_worker import seed_all

# The same examples every time, however long a busy machine takes over one: a change is judged by what it changes.
settings.register_profile(
    "steady", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def same_numbers_in_any_order() -> None:
    """Which files a worker has run before decides over no test: what it draws without a seed is always the same."""
    seed_all()


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_pools()

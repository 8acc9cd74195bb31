"""Pytest configuration of the whole suite."""

from __future__ import annotations

import pytest

from tests.harness import close_pools


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_pools()

"""A question that a child process answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from smp_core.outside import ask_child

PLUS_ONE = """
from smp_core.outside import answer_parent

answer_parent(lambda number: number + 1)
"""


def test_a_child_imports_what_its_parent_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plus_one.py").write_text(PLUS_ONE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ask_child("plus_one", 1, "no answer") == 2

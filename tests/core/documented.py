"""What docstrings say about knobs, and the texts of the code, for the pages that are
made of them."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

from smp_core.config import SmpConfig
from tests.harness import ROOT


def as_word(count: int) -> str:
    """A small number as pages write it, so that it can be compared with what it
    counts."""
    words = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    return words.split()[count]


def documented(of: type) -> dict[str, str]:
    """Knob, or field of a recipe -> what the docstring says, on one line."""
    arguments = (
        inspect.cleandoc(of.__doc__ or "")
        .split("\nArgs:\n", 1)[1]
        .split("\nRaises:\n", 1)[0]
    )
    found: dict[str, str] = {}
    for line in arguments.splitlines():
        if named := re.match(r" {4}(\w+): (.*)", line):
            name, found[named[1]] = named[1], named[2]
        elif line.strip():
            found[name] += f" {line.strip()}"
    return found


def documented_knobs() -> dict[str, str]:
    return documented(SmpConfig)


def texts() -> Iterator[str]:
    """Every piece of text in the code, as it is written at run time."""
    for package in ("smp_core", "lightning_smp", "accelerate_smp"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value

"""What docstrings say about knobs, for the pages that are made of them."""

from __future__ import annotations

import inspect
import re

from smp_core.config import SmpConfig


def as_word(count: int) -> str:
    """A small number as pages write it, so that it can be compared with what it counts."""
    words = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    return words.split()[count]


def documented(of: type) -> dict[str, str]:
    """Knob, or field of a recipe -> what the docstring says, on one line."""
    arguments = inspect.cleandoc(of.__doc__ or "").split("\nArgs:\n", 1)[1].split("\nRaises:\n", 1)[0]
    found: dict[str, str] = {}
    for line in arguments.splitlines():
        if named := re.match(r" {4}(\w+): (.*)", line):
            name, found[named[1]] = named[1], named[2]
        elif line.strip():
            found[name] += f" {line.strip()}"
    return found


def documented_knobs() -> dict[str, str]:
    return documented(SmpConfig)

"""Docstrings of functions say what the function does: they begin with a verb (a
property's may be a noun phrase). Those of classes say what the thing is: they begin
with a noun phrase."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("smp_core", "lightning_smp", "accelerate_smp", "benchmarks")
# A docstring that begins so ("Whether it is open.", "Of one call.", "From here on.") is
# understood only together with the function's name. Begin with the verb: "Tell whether
# ...", "Return the seconds of ...", "Wait until ...".
HEADLESS = {
    *(
        "What",
        "Whether",
        "Which",
        "Who",
        "Whoever",
        "Whose",
        "How",
        "Where",
        "When",
        "Why",
        "Because",
    ),
    *(
        "Of",
        "As",
        "From",
        "With",
        "Without",
        "At",
        "In",
        "Inside",
        "Outside",
        "On",
        "Around",
        "Against",
        "Between",
    ),
    *(
        "Before",
        "After",
        "Behind",
        "Until",
        "Since",
        "Per",
        "By",
        "For",
        "To",
        "Instead",
    ),
    *(
        "Also",
        "Nobody",
        "Nothing",
        "None",
        "Those",
        "These",
        "This",
        "That",
        "It",
        "Its",
        "They",
        "Their",
    ),
    *("Is", "Are", "Has", "Does"),
}


def docstrings(source: str) -> Iterator[tuple[str, int, str]]:
    """(name, line, docstring) of every function and class in ``source`` that has a
    docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.name, node.lineno, text


def is_headless(text: str) -> bool:
    words = text.split()
    if not words or not words[0][0].isalpha():
        return True  # code or a number: "``flat`` on the device."
    return words[0].rstrip(",.:;") in HEADLESS


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_begin_with_a_verb_or_a_noun(room: str) -> None:
    headless = [
        f"{path.relative_to(ROOT)}:{line} {name}: {text.splitlines()[0]}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for name, line, text in docstrings(path.read_text(encoding="utf-8"))
        if is_headless(text)
    ]
    assert headless == []


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_hold_no_comments(room: str) -> None:
    """A comment that slipped into the text above it is printed by help()."""
    mixed = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for name, line, text in docstrings(path.read_text(encoding="utf-8"))
        if "\n# " in text
    ]
    assert mixed == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Whether it is open.", True),
        ("As in training.", True),
        ("``flat`` on the device.", True),
        ("", True),
        ("Tell whether it is open.", False),
        ("Ask the launcher.", False),
    ],
)
def test_headless_docstrings_are_recognised(text: str, expected: bool) -> None:
    assert is_headless(text) is expected

"""docs/configuration.md lists the knobs as SmpConfig has them.

`python -m tests.core.test_configuration_page` writes the table anew.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from smp_core.config import SmpConfig
from smp_core.knob_rules import NOT_BUILT

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
BEGIN, END = "<!-- the knobs, from SmpConfig's docstring -->\n", "<!-- end of the knobs -->"


def documented_knobs() -> dict[str, str]:
    """Knob -> what the docstring says, on one line."""
    arguments = inspect.cleandoc(SmpConfig.__doc__ or "").split("\nArgs:\n", 1)[1].split("\nRaises:\n", 1)[0]
    found: dict[str, str] = {}
    for line in arguments.splitlines():
        if named := re.match(r" {4}(\w+): (.*)", line):
            name, found[named[1]] = named[1], named[2]
        elif line.strip():
            found[name] += f" {line.strip()}"
    return found


def table() -> str:
    config = SmpConfig()
    rows = ["| knob | default | what it is |", "|---|---|---|"]
    for knob, text in documented_knobs().items():
        default = "none" if (value := getattr(config, knob)) in (None, ()) else f"`{str(value).lower()}`"
        in_code = re.sub(r'(?:\w+=)?\[?"[^"]*"(?:, "[^"]*")*\]?', lambda quoted: f"`{quoted[0]}`", text)
        rows.append(f"| `{knob}` | {default} | {in_code} |")
    return "\n".join(["", *rows, "", ""])


def test_the_docstring_describes_every_knob_in_order() -> None:
    assert tuple(documented_knobs()) == SmpConfig.knobs()


def test_knobs_that_are_not_built_say_so() -> None:
    said = {knob for knob, text in documented_knobs().items() if "not built yet" in text.lower()}
    assert said == NOT_BUILT.keys()


def test_the_page_shows_the_knobs_as_they_are() -> None:
    shown = PAGE.read_text(encoding="utf-8").split(BEGIN, 1)[1].split(END, 1)[0]
    assert shown == table(), "run: python -m tests.core.test_configuration_page"


if __name__ == "__main__":
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN, 1)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END, 1)[1], encoding="utf-8")

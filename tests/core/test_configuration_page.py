"""docs/configuration.md lists the knobs as SmpConfig has them.

`python -m tests.core.test_configuration_page` writes the tables anew.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from smp_core.config import SmpConfig
from smp_core.config.recipes import RECIPES, Compile, DelayedInit
from tests.core.documented import documented, documented_knobs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
BEGIN, END = (
    "<!-- the knobs, from SmpConfig's docstring -->\n",
    "<!-- end of the knobs -->",
)


def rows(of: type, defaults: object) -> list[str]:
    found = []
    for name, text in documented(of).items():
        value = getattr(defaults, name)
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        default = "none" if value in (None, ()) else f"`{shown}`"
        in_code = re.sub(
            r'(?:\w+=)?\[?"[^"]*"(?:, "[^"]*")*\]?',
            lambda quoted: f"`{quoted[0]}`",
            text,
        )
        in_code = re.sub(
            r"\{[^{}]*\}", lambda fields: f"`{fields[0].replace('`', '')}`", in_code
        )
        found.append(f"| `{name}` | {default} | {in_code} |")
    return found


def tables() -> str:
    """The knobs, and below them the fields of each that has a recipe."""
    lines = [
        "",
        "| knob | default | what it is |",
        "|---|---|---|",
        *rows(SmpConfig, SmpConfig()),
    ]
    for recipe in (*RECIPES.values(), DelayedInit, Compile):
        about = " ".join((inspect.getdoc(recipe) or "").split("\n\n")[0].split())
        lines += ["", f"### `{recipe.KNOB}`", "", about, ""]
        lines += [
            "| field | default | what it is |",
            "|---|---|---|",
            *rows(recipe, recipe()),
        ]
    return "\n".join([*lines, "", ""])


def test_the_docstring_describes_every_knob_in_order() -> None:
    assert tuple(documented_knobs()) == SmpConfig.knobs()


def test_the_page_shows_the_knobs_and_their_fields_as_they_are() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written_anew(page), (
        "run: python -m tests.core.test_configuration_page"
    )


def written_anew(page: str) -> str:
    before, rest = page.split(BEGIN, 1)
    return before + BEGIN + tables() + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(written_anew(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

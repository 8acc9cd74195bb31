"""AGENTS.md says what is there: its generated parts are those of the code, its knobs
are accepted, its errors exist.

`python -m tests.core.test_agents_page` writes the generated parts anew.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import typer

import accelerate_smp.cli
import smp_core.cli
from smp_core.config import SmpConfig
from tests.core.documented import documented_knobs, texts
from tests.harness import ROOT

PAGE = ROOT / "smp_core" / "AGENTS.md"
# What a page that is read whole may take.
MOST_LINES = 160


def of_knobs() -> str:
    rows = [
        f"- `{name}`: {first_sentence(text)}"
        for name, text in documented_knobs().items()
    ]
    return "\n".join(rows)


def first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def commands_of(app: typer.Typer, name: str) -> Iterator[str]:
    for command in app.registered_commands:
        assert command.callback is not None
        called = command.name or command.callback.__name__
        yield f"- `{name} {called}`: {first_sentence(' '.join((command.callback.__doc__ or '').split()))}"
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from commands_of(group.typer_instance, f"{name} {group.name}")


def of_commands() -> str:
    return "\n".join(
        [
            *commands_of(smp_core.cli.app, "smp"),
            *commands_of(accelerate_smp.cli.app, "accelerate-smp"),
        ]
    )


PARTS = {"knobs": of_knobs, "commands": of_commands}


def written() -> str:
    text = PAGE.read_text(encoding="utf-8")
    for name, make in PARTS.items():
        begin, end = f"<!-- generated: {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}{make()}\n{end}{rest.split(end)[1]}"
    return text


def rows_of(title: str) -> list[tuple[str, str]]:
    """The cells of a section's table."""
    section = (
        PAGE.read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    )
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", section, flags=re.MULTILINE)
    return rows[1:]


def test_generated_parts_are_those_of_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == written(), (
        "python -m tests.core.test_agents_page"
    )
    assert len(written().splitlines()) <= MOST_LINES
    assert (ROOT / "AGENTS.md").resolve() == PAGE.resolve()


def test_knobs_by_intent_are_accepted() -> None:
    rows = rows_of("Knobs by intent")
    named = set()
    for _, code in rows:
        call = ast.parse(f"f({code.strip('`')})", mode="eval").body
        assert isinstance(call, ast.Call)
        knobs = {
            keyword.arg or "": ast.literal_eval(keyword.value)
            for keyword in call.keywords
        }
        SmpConfig(**knobs)
        named |= knobs.keys()
    assert len(rows) > 15 and named <= documented_knobs().keys()


def test_errors_are_those_of_the_code() -> None:
    said = "\n".join(texts())
    for error, _ in rows_of("Errors and lines, and what to do"):
        assert error.strip("`") in said, error


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")

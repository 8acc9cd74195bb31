"""Knobs for people and for files: their values as text, as JSON, and what was asked
beside what took effect."""

from __future__ import annotations

import io
from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

from smp_core.config.recipe import Recipe

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT = "default"
_LOG_WIDTH = 160


class Knobs(Protocol):
    """The part of a :class:`smp_core.config.SmpConfig` that is shown; its attributes
    are the values in effect."""

    def settings(self) -> tuple[str, ...]: ...

    def asked(self, knob: str) -> Any: ...

    def why(self, knob: str) -> str: ...


def effective_table(knobs: Knobs) -> Table:
    """Return a table for the terminal: knob (or field of one), asked, in effect, and
    why; below it what is at its default."""
    from rich.table import Table

    table = Table(title="torch-smp: knobs in effect", caption_justify="left")
    for column in ("knob", "asked", "in effect", "why"):
        table.add_column(column, overflow="fold", no_wrap=column == "knob")
    # Only what was asked for or resolved has a row.
    defaults = []
    for knob in knobs.settings():
        value, why = shown(attrgetter(knob)(knobs)), knobs.why(knob)
        if why == DEFAULT:
            defaults.append(f"{knob}={value}")
        else:
            table.add_row(knob, shown(knobs.asked(knob)), value, why)
    if defaults:
        table.caption = f"At their defaults: {', '.join(defaults)}"
    return table


def table_as_text(knobs: Knobs) -> str:
    """Return :func:`effective_table` as text, for logs."""
    from rich.console import Console

    # A fixed width: logs have no terminal.
    console = Console(width=_LOG_WIDTH, file=io.StringIO())
    with console.capture() as captured:
        console.print(effective_table(knobs))
    return captured.get()


def lines_about_asked(knobs: Knobs, defaults: Knobs) -> list[str]:
    """Return a line for each setting that was asked for: what takes effect, and why
    where that is something else."""
    lines = []
    for knob in knobs.settings():
        asked = knobs.asked(knob)
        # What is at its default was not asked for.
        if asked == attrgetter(knob)(defaults):
            continue
        value = attrgetter(knob)(knobs)
        why = knobs.why(knob)
        line = f"{knob}={shown(asked)}"
        # Compared as it is shown, since a resolved value may have another type.
        if shown(value) != shown(asked):
            line += f" is {shown(value)}"
        lines.append(line if why in ("as asked", DEFAULT) else f"{line} ({why})")
    return lines


def as_asked(value: Any) -> Any:
    """Return the value as it can be asked for again, in types that YAML has."""
    if isinstance(value, Recipe):
        return value.to_dict()
    # YAML has neither tuples nor frozen mappings.
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def plain(value: Any) -> Any:
    """Return the value in types that JSON has; a function or an object by its name."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return shown(value)


def shown(value: Any) -> str:
    """Return the value as text for people."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {item}" for name, item in value.items())
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    # The words that readers take, so that a line can be typed again.
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return getattr(value, "__qualname__", None) or str(value)

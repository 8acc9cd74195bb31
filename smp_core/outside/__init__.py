"""What comes from outside and goes there: files that others may have made, the terminal, other packages."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.outside.command_line import OneLineErrors, begin, console
    from smp_core.outside.floors import OLDEST, how_to_install, is_older, is_there, require
    from smp_core.outside.foreign_files import (
        lines_of_log,
        number,
        numbers,
        parse_yaml,
        printable,
        read_json,
        read_yaml,
        records_of_log,
        write_new,
    )

_PLACES = {
    "begin": "command_line",
    "console": "command_line",
    "how_to_install": "floors",
    "is_older": "floors",
    "is_there": "floors",
    "lines_of_log": "foreign_files",
    "number": "foreign_files",
    "numbers": "foreign_files",
    "OLDEST": "floors",
    "OneLineErrors": "command_line",
    "parse_yaml": "foreign_files",
    "printable": "foreign_files",
    "read_json": "foreign_files",
    "read_yaml": "foreign_files",
    "records_of_log": "foreign_files",
    "require": "floors",
    "write_new": "foreign_files",
}

__all__ = [
    "begin",
    "console",
    "how_to_install",
    "is_older",
    "is_there",
    "lines_of_log",
    "number",
    "numbers",
    "OLDEST",
    "OneLineErrors",
    "parse_yaml",
    "printable",
    "read_json",
    "read_yaml",
    "records_of_log",
    "require",
    "write_new",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

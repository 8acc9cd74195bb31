"""The `smp` command: its application, with all commands or the one that is going to run.

Groups of commands stand beside what they show, `smp doctor` and `smp topology` here. A command's module is imported
when the command is asked for: torch takes longer to import than `smp report` to draw a page.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from smp_core.cli.cli import application, main

if TYPE_CHECKING:
    from smp_core.cli.doctor import findings, table_of

__all__ = ["application", "findings", "main", "table_of"]


def __getattr__(name: str) -> Any:
    """Make ``app``, the application of all commands, or import what needs torch, when it is asked for."""
    if name in ("findings", "table_of"):
        return getattr(import_module("smp_core.cli.doctor"), name)
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["app"] = application()
    return globals()["app"]

"""The `smp` command: its application, with all commands or the one that is going to run."""

from __future__ import annotations

from typing import Any

from smp_core.cli.cli import application, main

__all__ = ["application", "main"]


def __getattr__(name: str) -> Any:
    """Make ``app``, the application of all commands, when it is asked for."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["app"] = application()
    return globals()["app"]

"""The `smp` command. Each group of commands is a typer application of its own; `main` is the entry point.

What a command needs is imported when it is asked for: torch takes longer to import than `smp report` to draw a page.
"""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from smp_core.outside import OneLineErrors, begin

_COMMANDS = {
    "checkpoint": "smp_core.checkpoint.commands",
    "plan": "smp_core.planner.commands",
    "topology": "smp_core.cli.topology_command",
    "doctor": "smp_core.cli.doctor",
    "report": "smp_core.report.commands",
    "fp8-report": "smp_core.fp8.monitoring",
    "memory-report": "smp_core.observe.memory_log",
    "verify": "smp_core.verify.commands",
}
"""The modules of the commands, each with a function of its command's name, or an application `app`."""


def application(only: str | None = None) -> typer.Typer:
    """Return the application of all commands.

    Args:
        only: the one command that is going to run, and the only one to be imported.
    """
    app = typer.Typer(
        name="smp",
        cls=OneLineErrors,
        help="torch-smp on the command line.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(begin)
    for name, module in _COMMANDS.items():
        if only is None or only == name:
            found = import_module(module)
            if name == "checkpoint":
                app.add_typer(found.app, name=name)
            else:
                app.command(name)(getattr(found, name.replace("-", "_")))
    return app


def main() -> None:
    """Run the `smp` command."""
    asked = sys.argv[1] if len(sys.argv) > 1 else None
    application(asked if asked in _COMMANDS else None)()

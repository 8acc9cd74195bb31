"""The terminal: tables as wide as they need, errors of one line, --version."""

from __future__ import annotations

import logging
import os
import sys
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from smp_core.outside.foreign_files import printable

# Columns of a table in a log; rich would fold it at 80.
_LOG_WIDTH = 160


def console(*, stderr: bool = False) -> Console:
    """Return where tables go: as wide as the terminal, or as ``COLUMNS`` says; in a
    file or a pipe, as wide as they need."""
    stream = sys.stderr if stderr else sys.stdout
    # rich folds tables at 80 columns where it knows no terminal.
    width = None if stream.isatty() or "COLUMNS" in os.environ else _LOG_WIDTH
    return Console(stderr=stderr, width=width)


class OneLineErrors(TyperGroup):
    """Commands whose refusals and unusable files are one line on stderr, without a
    traceback.

    Attributes:
        error_status: the exit status then.
    """

    error_status = 1

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was typed."""
        try:
            return super().invoke(ctx)
        # Refusals of users' input; anything else is a defect, and keeps its traceback.
        except (ValueError, OSError, ImportError) as error:
            typer.echo(f"error: {printable(str(error))}", err=True)
            raise typer.Exit(self.error_status) from None


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"torch-smp {metadata.version('torch-smp')}")
        raise typer.Exit


def begin(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Set up logging before every command: warnings go to stderr."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)


def without_commands(
    name: str, about: str, kind: type[OneLineErrors] = OneLineErrors
) -> typer.Typer:
    """Return an application without commands, which prints its help where none is
    typed."""
    app = typer.Typer(
        name=name,
        cls=kind,
        help=about,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(begin)
    return app

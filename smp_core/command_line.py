"""What the commands `smp` and `accelerate-smp` share: errors of one line, and --version."""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup


class OneLineErrors(TyperGroup):
    """Commands whose refusals and unusable files are one line on stderr, without a traceback.

    Attributes:
        error_status: the exit status then.
    """

    error_status = 1

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was typed."""
        try:
            return super().invoke(ctx)
        except (ValueError, OSError, ImportError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(self.error_status) from None


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"torch-smp {metadata.version('torch-smp')}")
        raise typer.Exit


def begin(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """What comes before every command: where warnings go."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)

"""The `smp` command. Each group of commands is a typer application of its own; `main` is the entry point."""

from __future__ import annotations

import logging

import typer

from smp_core.checkpoint.commands import app as checkpoint_app
from smp_core.comm.commands import topology
from smp_core.fp8.commands import fp8_report
from smp_core.memory_log import memory_report

app = typer.Typer(name="smp", help="torch-smp on the command line.", no_args_is_help=True, add_completion=False)
app.add_typer(checkpoint_app, name="checkpoint")
app.command("topology")(topology)
app.command("fp8-report")(fp8_report)
app.command("memory-report")(memory_report)


@app.callback()
def _logging() -> None:
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)


def main() -> None:
    """Run the `smp` command."""
    app()


if __name__ == "__main__":
    main()

"""The `smp` command. Each group of commands is a typer application of its own; `main` is the entry point."""

from __future__ import annotations

import typer

from smp_core.checkpoint.commands import app as checkpoint_app
from smp_core.comm.commands import topology
from smp_core.command_line import OneLineErrors, begin
from smp_core.doctor import doctor
from smp_core.fp8.commands import fp8_report
from smp_core.memory_log import memory_report
from smp_core.planning.commands import plan
from smp_core.report.commands import report

app = typer.Typer(
    name="smp",
    cls=OneLineErrors,
    help="torch-smp on the command line.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.callback()(begin)
app.add_typer(checkpoint_app, name="checkpoint")
app.command("plan")(plan)
app.command("topology")(topology)
app.command("doctor")(doctor)
app.command("report")(report)
app.command("fp8-report")(fp8_report)
app.command("memory-report")(memory_report)


def main() -> None:
    """Run the `smp` command."""
    app()


if __name__ == "__main__":
    main()

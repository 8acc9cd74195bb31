"""The `smp` command. Each group of commands is a typer application of its own; `main`
is the entry point.

What a command needs is imported when it is asked for: torch takes longer to import than
`smp report` to draw a page. The list of commands and the version import none of them.
"""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from smp_core.outside import without_commands

_SMP = ("smp", "torch-smp on the command line.")
_COMMANDS = {
    "plan": (
        "smp_core.planner.commands",
        "Choose the degrees, recomputation and micro-batch of a run, and say why.",
    ),
    "topology": (
        "smp_core.cli.topology_command",
        "Print ranks, nodes and groups; under torchrun or srun those of the processes started.",
    ),
    "doctor": (
        "smp_core.cli.doctor",
        "Look at devices, kernels, network, limits, storage and versions, and say what to change; exit status 1 if "
        "something has to be.",
    ),
    "report": (
        "smp_core.report.commands",
        "Make one HTML file about a run: what was asked and chosen, loss, throughput, time, bytes, memory, a verdict.",
    ),
    "fp8-report": (
        "smp_core.fp8.monitoring",
        "Draw scales, saturation and underflow over training, and list the modules that fit FP8 worst.",
    ),
    "memory-report": (
        "smp_core.observe.memory_log",
        "Show the parts of a step's peak memory: a table of the highest one, and a stacked bar for each step.",
    ),
    "verify": (
        "smp_core.verify.commands",
        "Run a training in one process and at layouts, and compare loss, gradients, weights, samples and activations.",
    ),
    "checkpoint": (
        "smp_core.checkpoint.commands",
        "Look at, check and convert checkpoint folders.",
    ),
}
"""For each command its module, which has a function of the command's name or an
application `app`, and its help."""


def application(only: str | None = None) -> typer.Typer:
    """Return the application of all commands.

    Args:
        only: the one command that is going to run, and the only one to be imported.
    """
    app = without_commands(*_SMP)
    for name, (module, _) in _COMMANDS.items():
        if only is None or only == name:
            found = import_module(module)
            # A group of commands is an application; a single one is a function.
            if name == "checkpoint":
                app.add_typer(found.app, name=name)
            else:
                app.command(name)(getattr(found, name.replace("-", "_")))
    return app


def outline() -> typer.Typer:
    """Return an application that lists the commands, refuses others and prints the
    version; it imports no command."""
    app = without_commands(*_SMP)
    for name, (_, text) in _COMMANDS.items():
        app.command(name, help=text)(_not_to_be_run)
    return app


def main() -> None:
    """Run the `smp` command."""
    # "--" ends options, so a command may follow it.
    first = next((word for word in sys.argv[1:] if word != "--"), "")
    app = application(first) if first in _COMMANDS else outline()
    app()


def _not_to_be_run() -> None:
    raise AssertionError("the outline of the smp command was asked to run one")

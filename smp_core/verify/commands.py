"""`smp verify`: whether a user's own training gives one process's numbers at every
layout."""

from __future__ import annotations

from typing import Annotated

import typer

from smp_core.outside import console
from smp_core.verify.verify import LIMIT, verify_command

PARTS = 2
"""The exit status where a layout differs from one process."""


def verify(
    script: Annotated[
        str, typer.Argument(help="the training script; its own arguments follow --")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="of the script, behind --")
    ] = None,
    layouts: Annotated[
        list[str] | None,
        typer.Option(
            "--layouts",
            "-l",
            help="knobs, as 'shard_degree=2 ranks=4'; may be repeated",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps")] = 3,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="of layouts that give none")
    ] = None,
    float64: Annotated[
        bool,
        typer.Option(
            "--float64", help="compute in float64: any difference is a defect"
        ),
    ] = False,
    keep_dropout: Annotated[
        bool, typer.Option("--keep-dropout", help="leave dropout on")
    ] = False,
    devices: Annotated[
        bool, typer.Option("--devices", help="one device a rank, in place of CPU ranks")
    ] = False,
    limit: Annotated[float, typer.Option(help="seconds for each run")] = LIMIT,
) -> None:
    """Run a training in one process and at layouts, and compare loss, gradients,
    weights, samples and activations."""

    def say(line: str) -> None:
        typer.echo(f"running: {line}", err=True)

    report = verify_command(
        [script, *(arguments or [])],
        layouts or [],
        steps=steps,
        ranks=ranks,
        float64=float64,
        keep_dropout=keep_dropout,
        devices=devices,
        limit=limit,
        say=say,
    )
    console().print(report.table())
    if not report.agrees:
        raise typer.Exit(PARTS)

"""The command `smp report`: one page about a run, or two runs beside one another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smp_core.outside import console, write_new
from smp_core.report.page import page
from smp_core.run_log import Run


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="the folder of a run, or its run.jsonl; two are compared"),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="the page; default: report.html in the first run's folder"),
    ] = None,
) -> None:
    """Make one HTML file about a run: what was asked and chosen, loss, throughput,
    time, bytes, memory, a verdict."""
    if len(runs) > 2:
        raise ValueError(
            f"{len(runs)} runs were given; allowed: one, or two to compare"
        )
    read = [Run.read(path) for path in runs]
    if len(read) == 2 and read[0].name == read[1].name:
        # Two runs of one name are told apart by their paths.
        for run, path in zip(read, runs, strict=True):
            run.name = str(path)
    folder = runs[0] if runs[0].is_dir() else runs[0].parent
    target = out or folder / "report.html"
    write_new(target, page(read).encode())
    console().print(f"{target}", soft_wrap=True)

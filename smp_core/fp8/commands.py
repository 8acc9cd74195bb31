"""The command `smp fp8-report`: Fp8Monitor's log as a table of the worst modules and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from smp_core.fp8.monitoring import Fp8Log, draw
from smp_core.outside import console, how_to_install


def fp8_report(
    log: Annotated[Path, typer.Argument(help="the file Fp8Monitor writes: fp8.jsonl")],
    out: Annotated[Path | None, typer.Option(help="the picture; default: the log's name with .png")] = None,
) -> None:
    """Draw scales, saturation and underflow over training, and list the modules that fit FP8 worst."""
    found = Fp8Log.read(log)
    table = Table(title=f"{len(found.steps)} probed steps, {found.steps[0]} to {found.steps[-1]}: worst modules")
    for column in ("share of elements", "module", "largest in any step"):
        table.add_column(column)
    for role in ("input", "gradient"):
        for kind in ("saturated", "flushed"):
            for module, value in found.worst(f"{role}_{kind}", 3):
                table.add_row(f"{role} {kind}", module, f"{value:.3%}")
    console().print(table)
    picture = out or log.with_suffix(".png")
    try:
        draw(found, picture)
    except ModuleNotFoundError:
        raise ValueError(f"matplotlib draws the picture and is not installed; {how_to_install('matplotlib')}") from None
    console().print(f"{picture}", soft_wrap=True)

"""Report: the comparisons of all layouts, as a table for people."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from smp_core.verify.compare import Comparison, Row

WIDTH = 140


@dataclass
class Report:
    """The result of a verification.

    Attributes:
        comparisons: one for each layout.
        notes: what holds for all of them.
        seconds: that it took.
    """

    comparisons: list[Comparison]
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        """The verdict: all layouts agree with one process."""
        return all(comparison.agrees for comparison in self.comparisons)

    def __str__(self) -> str:
        stream = io.StringIO()
        Console(file=stream, width=WIDTH).print(self.table())
        return stream.getvalue()

    def table(self) -> Group:
        """Return one table for each layout, with its verdict and its causes below, and
        the notes."""
        parts: list[Table | Text] = []
        for comparison in self.comparisons:
            parts += [_table(comparison), Text("\n".join(_verdict(comparison)))]
        parts.append(Text("\n".join([*self.notes, f"{self.seconds:.0f} s"])))
        return Group(*parts)


def _table(comparison: Comparison) -> Table:
    limits = comparison.tolerance
    # The tolerance in words stands under the table.
    table = Table(
        title=comparison.words,
        caption=f"one process: {comparison.reference}; {limits.dtype}",
    )
    for heading in ("", "", "difference", "allowed", ""):
        table.add_column(
            heading, justify="right" if heading else "left", overflow="fold"
        )
    for row in comparison.rows:
        table.add_row(
            row.what, row.found, _number(row.difference), _number(row.limit), _mark(row)
        )
    return table


def _mark(row: Row) -> str:
    if row.agrees is None:
        return "not compared"
    return "agrees" if row.agrees else "DIFFERS"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _verdict(comparison: Comparison) -> Sequence[str]:
    lines = []
    part = comparison.part
    if part is None:
        # Agreement needs no reasons; a difference has a place, causes and what was left
        # out.
        lines.append("agrees with one process")
    else:
        when = "before training" if part.step == 0 else f"in step {part.step}"
        where = f", at {part.where}" if part.where else ""
        lines.append(f"PARTS from one process {when}{where}: {part.words}")
        lines += [f"  likely: {cause}" for cause in comparison.causes]
    lines += [f"  not compared: {each}" for each in comparison.missing]
    return [*lines, ""]

"""The peaks of memory by kind: the record of a step, its log of JSON lines, the
picture, and `smp memory-report`."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from smp_core.outside import (
    console,
    matplotlibs_figure,
    number,
    numbers,
    records_of_log,
    write_new,
)
from smp_core.run_log import write as run_log

MIB = 2**20
_BARS = 200
KINDS = ("parameters", "gathered", "gradients", "optimizer", "activations", "other")


@dataclass(frozen=True)
class StepMemory:
    """The peak of one step on the device, and its host memory; bytes by kind."""

    device: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def total(self) -> int:
        """The peak on the device in bytes."""
        return sum(self.device.values())


def append_to_log(path: Path, step: int, memory: StepMemory) -> None:
    """Append one JSON line for a step."""
    run_log.append(
        path, "memory", step=step, device=dict(memory.device), host=dict(memory.host)
    )


def read_log(path: Path) -> dict[int, StepMemory]:
    """Read the steps in order; of a step that was logged twice (by a resumed run) the
    later line counts.

    Raises:
        ValueError: no such file, no log, or an empty one.
    """
    # A line that is none is refused; the last may be half of one.
    found = dict(records_of_log(path, _of_line, "SmpMonitor's memory log"))
    if not found:
        raise ValueError(
            f"{path} holds no step that was watched; SmpMonitor(memory_every_n_steps=...) writes such a log"
        )
    return dict(sorted(found.items()))


def _of_line(line: Mapping[str, Any]) -> tuple[int, StepMemory] | None:
    step = number(line.get("step"))
    # Every kind has to be a number of bytes.
    device = _by_kind(line.get("device"))
    host = _by_kind(line.get("host"))
    return (
        None
        if step is None or device is None or host is None
        else (int(step), StepMemory(device, host))
    )


def _by_kind(value: Any) -> dict[str, int] | None:
    found = numbers(value)
    if not isinstance(value, Mapping) or len(found) < len(value):
        return None
    return {kind: int(n_bytes) for kind, n_bytes in found.items()}


def draw(steps: Mapping[int, StepMemory], path: str | os.PathLike[str]) -> None:
    """Draw a stacked bar for each step, as a PNG (or in the format of the ending of
    ``path``). Of more steps than bars can be told apart, the highest of each stretch.

    Raises:
        ValueError: matplotlib is not installed.
    """
    # More bars than pixels would show nothing: each stretch keeps its highest.
    steps = _highest(steps)
    figure = matplotlibs_figure()(
        figsize=(min(max(4.0, 0.5 * len(steps) + 3), 24.0), 4.0), layout="constrained"
    )
    axes = figure.add_subplot()
    places, bottoms = range(len(steps)), [0.0] * len(steps)
    # In the order of the kinds, each on top of the one before.
    for kind in KINDS:
        heights = [memory.device.get(kind, 0) / MIB for memory in steps.values()]
        axes.bar(places, heights, bottom=bottoms, label=kind)
        bottoms = [
            bottom + height for bottom, height in zip(bottoms, heights, strict=True)
        ]
    shown = list(places)[:: max(1, len(steps) // 20)]
    axes.set_xticks(shown, [str(list(steps)[place]) for place in shown])
    axes.set_xlabel("step")
    axes.set_ylabel("MiB at the peak")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    content = io.BytesIO()
    figure.savefig(content, format=Path(path).suffix.removeprefix(".") or "png")
    write_new(path, content.getvalue())


def _highest(steps: Mapping[int, StepMemory]) -> dict[int, StepMemory]:
    # Stretches of equal length, each with at least one step.
    numbers = list(steps)
    stretch = -(-len(numbers) // _BARS)
    stretches = [
        numbers[begin : begin + stretch] for begin in range(0, len(numbers), stretch)
    ]
    highest = [max(part, key=lambda step: steps[step].total) for part in stretches]
    return {step: steps[step] for step in highest}


def memory_report(
    log: Annotated[
        Path,
        typer.Argument(
            help="the file SmpMonitor(memory_every_n_steps=...) writes: memory.jsonl"
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="the picture; default: the log's name with .png")
    ] = None,
) -> None:
    """Show the parts of a step's peak memory: a table of the highest one, and a stacked
    bar for each step."""
    # Beside the log, under its name.
    picture = out or log.with_suffix(".png")
    steps = read_log(log)
    console().print(_table(steps))
    draw(steps, picture)
    console().print(f"{picture}", soft_wrap=True)


def _table(steps: Mapping[int, StepMemory]) -> Table:
    highest = max(steps, key=lambda step: steps[step].total)
    numbers = list(steps)
    table = Table(
        title=f"{len(steps)} watched steps, {numbers[0]} to {numbers[-1]}; MiB, the highest of all ranks"
    )
    for heading in (
        "kind",
        f"at the highest peak (step {highest})",
        "most in any step",
        "in host memory",
    ):
        table.add_column(heading, justify="left" if heading == "kind" else "right")

    def mib(n_bytes: int) -> str:
        return f"{n_bytes / MIB:.2f}"

    for kind in KINDS:
        most = max(memory.device.get(kind, 0) for memory in steps.values())
        on_host = max(memory.host.get(kind, 0) for memory in steps.values())
        table.add_row(
            kind,
            mib(steps[highest].device.get(kind, 0)),
            mib(most),
            mib(on_host) if on_host else "",
        )
    table.add_section()
    table.add_row("together", mib(steps[highest].total), "", "")
    return table

"""The peaks of memory by kind: the record of a step, its log of JSON lines, the picture, and `smp memory-report`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from smp_core import run_log
from smp_core.command_line import console
from smp_core.floors import how_to_install

MIB = 2**20
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
    run_log.append(path, "memory", step=step, device=dict(memory.device), host=dict(memory.host))


def read_log(path: Path) -> dict[int, StepMemory]:
    """Read the steps in order; of a step that was logged twice (by a resumed run) the later line counts.

    Raises:
        ValueError: no such file, no log, or an empty one.
    """
    found = {step: memory for step, memory in _records(path)}
    if not found:
        raise ValueError(f"{path} holds no step that was watched")
    return dict(sorted(found.items()))


def _records(path: Path) -> Iterator[tuple[int, StepMemory]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ValueError(
            f"cannot read {path}: {error.strerror}; SmpMonitor(memory_every_n_steps=...) writes such a log"
        ) from None
    for number, line in enumerate(lines, 1):
        try:
            record: dict[str, Any] = json.loads(line)
            step, memory = int(record["step"]), StepMemory(record["device"], record["host"])
            memory.total  # noqa: B018  # numbers?
        except (ValueError, KeyError, TypeError, AttributeError):
            if number == len(lines):  # the end of a run that was killed
                return
            raise ValueError(f"{path}, line {number}: not a line of SmpMonitor's memory log") from None
        yield step, memory


def draw(steps: Mapping[int, StepMemory], path: str | os.PathLike[str]) -> None:
    """Draw a stacked bar for each step, as a PNG (or in the format of the ending of ``path``).

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"matplotlib draws the picture and is not installed; {how_to_install('matplotlib')}") from None
    figure = Figure(figsize=(min(max(4.0, 0.5 * len(steps) + 3), 24.0), 4.0), layout="constrained")
    axes = figure.add_subplot()
    places, bottoms = range(len(steps)), [0.0] * len(steps)
    for kind in KINDS:
        heights = [memory.device.get(kind, 0) / MIB for memory in steps.values()]
        axes.bar(places, heights, bottom=bottoms, label=kind)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    shown = list(places)[:: max(1, len(steps) // 20)]
    axes.set_xticks(shown, [str(list(steps)[place]) for place in shown])
    axes.set_xlabel("step")
    axes.set_ylabel("MiB at the peak")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path)


def memory_report(
    log: Annotated[Path, typer.Argument(help="the file SmpMonitor(memory_every_n_steps=...) writes: memory.jsonl")],
    out: Annotated[Path | None, typer.Option(help="the picture; default: the log's name with .png")] = None,
) -> None:
    """Show the parts of a step's peak memory: a table of the highest one, and a stacked bar for each step."""
    picture = out or log.with_suffix(".png")
    steps = read_log(log)
    console().print(_table(steps))
    draw(steps, picture)
    console().print(f"{picture}", soft_wrap=True)


def _table(steps: Mapping[int, StepMemory]) -> Table:
    highest = max(steps, key=lambda step: steps[step].total)
    numbers = list(steps)
    table = Table(title=f"{len(steps)} watched steps, {numbers[0]} to {numbers[-1]}; MiB, the highest of all ranks")
    for heading in ("kind", f"at the highest peak (step {highest})", "most in any step", "in host memory"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")

    def mib(n_bytes: int) -> str:
        return f"{n_bytes / MIB:.2f}"

    for kind in KINDS:
        most = max(memory.device.get(kind, 0) for memory in steps.values())
        on_host = max(memory.host.get(kind, 0) for memory in steps.values())
        table.add_row(kind, mib(steps[highest].device.get(kind, 0)), mib(most), mib(on_host) if on_host else "")
    table.add_section()
    table.add_row("together", mib(steps[highest].total), "", "")
    return table

"""docs/gpu.md and the README's sentence about GPUs, from the result files: what was
shown, on what, what was not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.items import ITEMS, NOT_SHOWN, PARTS, Item

ROOT = Path(__file__).resolve().parents[2]
PAGE, README = ROOT / "docs" / "gpu.md", ROOT / "README.md"
BEGIN, END = "<!-- from benchmarks/results/gpu -->\n", "<!-- end of GPU results -->"
_HOW = """\
`make gpu-check` runs the items below, each in a process and with a limit of its own, and writes a line for each to
`benchmarks/results/gpu/`. Parts 1 to 4 take the first CUDA device; `make gpu-check RANKS=8` runs parts 4 to 6 on eight
devices of a host. `python benchmarks/gpu/run.py --part 1` (2 to 6) runs a part, at most nine minutes; `--dry` rehearses
on a CPU, where figures mean nothing. Without a GPU, tests play streams and the caching allocator
(`tests/core/test_streams.py`), interpret and compile Triton's kernels, and check the shapes that flash attention and
FP8 products are called with."""
# Figures that are no result by themselves.
_ASIDE = ("row", "seconds", "ok", "met", "goal", "error", "not_run")


@dataclass(frozen=True)
class Results:
    """One result file: its machine (None: no device) and the newest line of every item
    that was run."""

    machine: Mapping[str, Any] | None
    items: Mapping[str, dict[str, Any]]


def read(path: Path) -> Results:
    first, *lines = (
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()
    )
    return Results(first["machine"], {line["item"]: line for line in lines})


def all_results(folder: Path) -> list[Results]:
    """Read the results of every device, in the order of file names; runs without a
    device say nothing."""
    found = map(read, sorted(folder.glob("*.jsonl")))
    return [each for each in found if each.machine is not None]


def is_wrong(line: Mapping[str, Any]) -> bool:
    """Return whether an item broke, or found something wrong."""
    broke = line["state"].startswith(("died", "out of time"))
    return broke or any(
        "error" in row or row.get("ok") is False for row in line["rows"]
    )


def in_short(lines: Sequence[Mapping[str, Any]]) -> str:
    """Write one line about items."""
    states = [line["state"] for line in lines]
    return (
        ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        or "nothing to run"
    )


def cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}" if 0.001 <= abs(value) < 1e5 else f"{value:.3g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {cell(each)}" for key, each in value.items())
    if isinstance(value, list):
        return "; ".join(map(cell, value))
    return str(value).replace("|", "\\|")


def result_of(line: Mapping[str, Any] | None) -> str:
    """Write what came out of an item, in one cell."""
    if line is None:
        return "not run"
    rows = line["rows"]
    checked = [row for row in rows if row.get("ok") is not None or "error" in row]
    parts = [] if line["state"] == "done" else [line["state"]]
    if checked:
        right = sum(row.get("ok") is True for row in checked)
        parts.append(f"{right} of {len(checked)} right")
    goals = [row for row in rows if row.get("met") is not None]
    if goals:
        parts.append(f"{sum(row['met'] for row in goals)} of {len(goals)} goals met")
    lacking = sum("not_run" in row for row in rows)
    if lacking:
        parts.append(f"{lacking} not run")
    return ", ".join(parts) or "measured"


def _row(row: Mapping[str, Any]) -> str:
    verdict = "wrong" if "error" in row or row.get("ok") is False else ""
    if row.get("met") is not None:
        verdict = f"{'met' if row['met'] else 'missed'}: {row.get('goal', '')}"
    elif "not_run" in row:
        verdict = f"not run: {row['not_run']}"
    figures = row.get("error") or ", ".join(
        f"{k} {cell(v)}" for k, v in row.items() if k not in _ASIDE
    )
    return f"| {cell(row['row'])} | {cell(figures)} | {verdict or ('right' if row.get('ok') else '')} |"


def _item(item: Item, line: Mapping[str, Any]) -> list[str]:
    return [
        f"#### {item.name}", "", "| | found | |", "|---|---|---|", *map(_row, line["rows"]), "",
    ]  # fmt: skip


def _machine(results: Results) -> list[str]:
    assert results.machine is not None
    lines = [
        f"## {results.machine['device']}",
        "",
        cell({k: v for k, v in results.machine.items() if k != "device"}),
    ]
    lines.append("")
    for part, title in PARTS.items():
        lines += [f"### {title}", ""]
        for item in ITEMS:
            line = results.items.get(item.name)
            if item.part == part and line is not None and line["rows"]:
                lines += _item(item, line)
    return lines


def text(found: Sequence[Results]) -> str:
    """Write the page."""
    names = [str(each.machine["device"]) for each in found if each.machine is not None]
    said = (
        f"Run on: {', '.join(names)}."
        if names
        else "Nothing has been run on a GPU yet: no item below is shown."
    )
    lines = [
        "# On a GPU", "", "<!-- made by: python benchmarks/gpu/run.py --page -->", "", said,
        _HOW, "",
        "## What is checked", "", f"| item | part | what it shows | {' | '.join(names) or 'result'} |",
        "|---|---|---|" + "---|" * max(1, len(names)),
    ]  # fmt: skip
    for item in ITEMS:
        seen = [result_of(each.items.get(item.name)) for each in found] or ["not run"]
        lines.append(
            f"| {item.name} | {item.part} | {item.shows} | {' | '.join(seen)} |"
        )
    lines += [
        "",
        "Not shown by one device:",
        "",
        *(f"- {each}" for each in NOT_SHOWN),
        "",
    ]
    for each in found:
        lines += _machine(each)
    return "\n".join(lines).rstrip() + "\n"


def sentence(found: Sequence[Results]) -> str:
    """Write what the README's status says."""
    if not found:
        return "**No CUDA path has run on a GPU yet** ([what would be checked](docs/gpu.md))."
    lines = [line for each in found for line in each.items.values()]
    wrong = sorted({line["item"] for line in lines if is_wrong(line)})
    done = {line["item"] for line in lines if line["state"] == "done"}
    names = ", ".join(
        str(each.machine["device"]) for each in found if each.machine is not None
    )
    outcome = (
        f"wrong or broken: {', '.join(wrong)}" if wrong else "nothing was found wrong"
    )
    return f"{len(done)} of {len(ITEMS)} checks have run on one {names}; {outcome} ([results](docs/gpu.md))."


def write(folder: Path) -> None:
    """Write the page, and the sentence between its marks in the README."""
    found = all_results(folder)
    PAGE.write_text(text(found), encoding="utf-8")
    before, rest = README.read_text(encoding="utf-8").split(BEGIN, 1)
    README.write_text(
        before + BEGIN + sentence(found) + "\n" + END + rest.split(END, 1)[1],
        encoding="utf-8",
    )

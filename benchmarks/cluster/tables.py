"""Tables, chart and sentences of what the cluster benchmark measured."""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from pathlib import Path
from typing import Any

from schemes import ALONE, OURS


def rates(text: str) -> float:
    """Turn ``"200mbit"`` into bytes per second."""
    number, unit = re.fullmatch(r"(\d+)(mbit|gbit)", text).groups()  # type: ignore[union-attr]
    return int(number) * {"mbit": 1e6, "gbit": 1e9}[unit] / 8


def seconds_of(row: dict[str, Any], scheme: str) -> float:
    """Return the median of a scheme's step in the row; nan if it was not measured."""
    return statistics.median(
        row["schemes"].get(scheme, {"seconds": [float("nan")]})["seconds"]
    )


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| nodes x ranks, link, micro-batches, dtype | scheme | s per step (min-max) | x HSDP two-hop | x floor "
        "| MB out of a node | lower bound MB | counters / meter | losses agree |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        where = f"{row['layout']}, {row['rate']}, {row['micro']}, {row['dtype']}"
        alone, hsdp = seconds_of(row, ALONE), seconds_of(row, "hsdp-two-hop")
        lines.append(f"| {where} | {ALONE} | {alone:.2f} | | | | | | |")
        for name, result in row["schemes"].items():
            if name == ALONE:
                continue
            seconds = seconds_of(row, name)
            out, bound = statistics.fmean(result["node_bytes"]), result["lower_bound"]
            metered, floor = (
                statistics.fmean(result["metered"]),
                bound / rates(row["rate"]) + alone,
            )
            sent_of_metered = f"{out / metered:.3f}" if metered else "-"
            agree = "yes" if result["losses_agree"] else "NO"
            lines.append(
                f"| {where} | {name} | {seconds:.2f} ({min(result['seconds']):.2f}-{max(result['seconds']):.2f}) "
                f"| {seconds / hsdp:.2f} | {seconds / floor:.2f} | {out / 1e6:.1f} | {bound / 1e6:.1f} "
                f"| {sent_of_metered} | {agree} |"
            )
        lines += [
            f"| {where} | {name} | {why} | | | | | | |"
            for name, why in row["missing"].items()
        ]
    return "\n".join(lines)


def summary(rows: list[dict[str, Any]]) -> str:
    """Show seconds per step, a line for each cluster; what each column is stands on the
    page."""
    columns = {
        "ZeRO-3": "ds3",
        "FSDP2": "fsdp",
        "FSDP2, ring": "fsdp-ring",
        "world": "ours-world",
        "world, once": "ours-world-once",
        "world, int8": "ours-world-int8-both",
        "MiCS": "mics",
        "HSDP": "hsdp-two-hop",
        "node": "ours-node",
        "node, once": "ours-node-once",
        "node, bf16": "ours-node-bf16",
        "node, int8": "ours-node-int8",
    }
    lines = [
        "| nodes x ranks | link | micro-batches | dtype | " + " | ".join(columns) + " |"
    ]
    lines.append("|---" * (len(columns) + 4) + "|")
    for row in rows:
        cells = []
        for name in columns.values():
            is_there = name in row["schemes"]
            cells.append(f"{seconds_of(row, name):.2f}" if is_there else "-")
        where = f"{row['layout']} | {row['rate']} | {row['micro']} | {row['dtype']}"
        lines.append(f"| {where} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def headline(machine: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Write README's number: two nodes of two ranks on the slow link, four
    micro-batches, float32, all exact."""
    where = {"layout": "2x2", "rate": "200mbit", "micro": 4, "dtype": "float32"}
    row = next(row for row in rows if where.items() <= row.items())
    seconds = {name: seconds_of(row, name) for name in ("ours-world", "fsdp-ring")}
    sent = {
        name: statistics.fmean(row["schemes"][name]["node_bytes"]) / 1e6
        for name in seconds
    }
    ours, theirs = seconds.values()
    text = (
        f"**{theirs / ours:.2f} times as fast as FSDP2** where a model has to be sharded over two nodes: {ours:.1f} s "
        f"a step instead of {theirs:.1f} s, because gathers and reductions in two stages send "
        f"{sent['ours-world']:.0f} MB over a node's link instead of {sent['fsdp-ring']:.0f} MB; losses agree. Measured "
        f"on {machine['cpus']} CPU cores with gloo: two emulated nodes of two ranks, joined by 200 Mbit/s, four "
        "micro-batches, 23 million float32 parameters; FSDP2 reduces by rings, as it does on NCCL."
    )
    return textwrap.fill(text, 120)


def ratios(rows: list[dict[str, Any]]) -> str:
    """Show step time of the other / step time of ours, a line for each cluster of
    float32 parameters."""
    columns = {
        "DeepSpeed ZeRO-3 : ours over all nodes": ("ds3", "ours-world"),
        "FSDP2 with a true ring : ours over all nodes": ("fsdp-ring", "ours-world"),
        "the same, ours with int8 both ways": ("fsdp-ring", "ours-world-int8-both"),
        "DeepSpeed MiCS : ours in the node": ("mics", "ours-node"),
        "FSDP2 HSDP, replicas reduced once : ours in the node": (
            "hsdp-two-hop",
            "ours-node",
        ),
        "the same, ours once in the node": ("hsdp-two-hop", "ours-node-once"),
        "the same, ours with bf16 replicas": ("hsdp-two-hop", "ours-node-bf16"),
    }
    lines = [
        "| link, nodes x ranks, micro-batches | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for row in rows:
        if row["dtype"] == "float32":
            found = [
                seconds_of(row, other) / seconds_of(row, ours)
                for other, ours in columns.values()
            ]
            where = f"{row['rate']}, {row['layout']}, {row['micro']}"
            cells = ["-" if math.isnan(ratio) else f"{ratio:.2f}" for ratio in found]
            lines.append(f"| {' | '.join([where, *cells])} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = sorted({row["layout"] for row in rows})
    lines = list(
        dict.fromkeys((row["rate"], row["micro"], row["dtype"]) for row in rows)
    )
    size = (5.2 * len(columns), 0.4 + 2.9 * len(lines))
    figure, axes = plt.subplots(len(lines), len(columns), figsize=size, squeeze=False)
    for axis in axes.flat:
        axis.set_visible(False)
    for row in rows:
        axis = axes[
            lines.index((row["rate"], row["micro"], row["dtype"])),
            columns.index(row["layout"]),
        ]
        axis.set_visible(True)
        names = list(row["schemes"])[::-1]
        seconds = [seconds_of(row, name) for name in names]
        colors = ["#2a6f97" if name in OURS else "#b0b0b0" for name in names]
        axis.barh(names, seconds, color=colors)
        axis.set_title(
            f"{row['layout']}, {row['rate']}, micro-batches: {row['micro']}, {row['dtype']}",
            fontsize=9,
        )
        axis.set_xlabel("seconds per optimizer step", fontsize=8)
        axis.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def in_order(row: dict[str, Any]) -> tuple[bool, float, int, str]:
    """Return a sort key: float32, the slow link and one micro-batch first."""
    return row["dtype"] != "float32", rates(row["rate"]), row["micro"], row["layout"]


def page(machine: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    busy = max((row["busy_before"] for row in rows), default=0.0)
    said = (
        f"Measured on {machine['cpus']} CPU cores, torch {machine['torch']}; "
        f"other programs took {busy:.0f} % of them before a row at most."
    )
    return f"{said}\n\n{summary(rows)}"


def every_row(rows: list[dict[str, Any]], scaling: list[dict[str, Any]]) -> str:
    """Make the file alongside the result: ratios, weak scaling and all that was
    measured of each scheme."""
    grown = [
        f"| {row['compute_ms']:.0f} | {row['nodes']} | {row['scheme']} "
        f"| {statistics.median(row['seconds']):.2f} | {row['efficiency']:.3f} |"
        for row in scaling
    ]
    return "\n".join(
        [
            "# Every row of the cluster benchmark",
            "",
            "Made from cluster.json by `benchmarks/cluster/bench.py --report`; schemes and columns are explained in",
            "[its README](../cluster/README.md#benchpy-and-schemespy), a summary is in",
            "[docs/performance.md](../../docs/performance.md).",
            "",
            "## Step time of the other / step time of ours",
            "",
            ratios(rows),
            "",
            "## Weak scaling, with emulated compute",
            "",
            "1 Gbit/s, four micro-batches.",
            "",
            "| ms of a block's forward | nodes | scheme | s per step | efficiency |",
            "|---|---|---|---|---|",
            *grown,
            "",
            "## All schemes",
            "",
            table(rows),
            "",
        ]
    )

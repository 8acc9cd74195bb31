#!/usr/bin/env python3
"""The cluster benchmark: ours and the peers on emulated clusters (netlab), side by
side.

    make bench-cluster                                        everything; hours
    python benchmarks/cluster/bench.py --table                the rows of docs/performance.md; about an hour
    python benchmarks/cluster/bench.py --layouts 2x2 --rates 200mbit --accumulation 1 --dtypes float32 --keep

Each row is written when it is measured. ``--keep`` keeps what the present result has
and this run does not measure, so that a long table can be made in pieces; every row
says how busy the cores were before it.

Nodes x ranks in 2x2, 2x4, 4x2; links of 200 Mbit/s and 1 Gbit/s with 1 ms; 1 and 4
micro-batches; float32 and bfloat16 parameters. Schemes take turns inside one run
(schemes.py), the median of the rounds counts, and times are compared only where losses
agree. ``--deepspeed PYTHON`` is the interpreter of an environment with DeepSpeed (<=
0.19.6); without it the table says so. A second part emulates compute by sleeping and
grows from one node to four.

Writes benchmarks/results/cluster.json, .png and .md (every row), the table of
docs/performance.md and the number in README.md. Needs Linux, root, iproute2, gcc.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from schemes import ALONE, DEEPSPEED, EXACT, OURS, PEERS, WIDTH
from tables import draw, every_row, headline, in_order, page, table

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "cluster.json"
ROOT = HERE.parents[1]
PAGE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
BEGIN, END = "<!-- from benchmarks/results/cluster.json -->\n", "<!-- end -->\n"
SCHEMES = (ALONE, *PEERS, *OURS, *DEEPSPEED)
SCALING_WIDTH, SCALING = 256, ("hsdp-two-hop", "ours-node")


def run_lab(
    python: str,
    names: list[str],
    layout: str,
    rate: str,
    micro: int,
    rounds: int,
    dtype: str,
    *,
    compute_ms: float = 0.0,
    width: int = WIDTH,
    limit: int = 7200,
) -> dict[str, Any] | str:
    """Return what schemes.py found on one emulated cluster, or why there is nothing."""
    nodes, ranks = layout.split("x")
    lab = [
        sys.executable,
        str(HERE / "netlab.py"),
        "run",
        "--quiet",
        "--nodes",
        nodes,
        "--ranks",
        ranks,
    ]
    lab += [
        "--rate",
        rate,
        "--delay",
        "1ms",
        "--timeout",
        str(limit),
        "--",
        python,
        str(HERE / "schemes.py"),
    ]
    program = [
        "--schemes",
        ",".join(names),
        "--micro",
        str(micro),
        "--rounds",
        str(rounds),
        "--param-dtype",
        dtype,
    ]
    environ = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    program += ["--compute-ms", str(compute_ms), "--width", str(width)]
    done = subprocess.run([*lab, *program], capture_output=True, text=True, env=environ)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 124:
        return f"did not end within {limit} s"
    if done.returncode or not lines:
        return (done.stderr.strip().splitlines() or ["no output"])[-1]
    return json.loads(lines[-1])


ROW = ("layout", "rate", "micro", "dtype")


def compare(
    asked: argparse.Namespace, rows: list[dict[str, Any]]
) -> Iterator[list[dict[str, Any]]]:
    """Yield ``rows`` with one more measured at a time; schemes measured before in the
    same place stay alongside the new ones."""
    for dtype in asked.dtypes:
        for layout in asked.layouts:
            for rate in asked.rates:
                for micro in asked.accumulation:
                    place = dict(zip(ROW, (layout, rate, micro, dtype), strict=True))
                    there = (old for old in rows if place.items() <= old.items())
                    row = next(there, None)
                    if row is None:
                        row = {
                            **place,
                            "busy_before": 0.0,
                            "missing": {},
                            "schemes": {},
                        }
                        rows.append(row)
                    measure(row, asked)
                    check_losses(row["schemes"])
                    print(table([row]), flush=True)
                    yield rows


def measure(row: dict[str, Any], asked: argparse.Namespace) -> None:
    """Run the schemes asked for on the row's cluster."""
    where = [row[key] for key in ("layout", "rate", "micro")]
    row["busy_before"] = max(row["busy_before"], psutil.cpu_percent(interval=2.0))
    names = [
        name
        for name in (ALONE, *PEERS, *OURS)
        if not asked.schemes or name in asked.schemes
    ]
    if row["micro"] == 1:
        # Nothing to hold.
        names = [name for name in names if not name.endswith("-once")]
    if names:
        found = run_lab(sys.executable, names, *where, asked.rounds, row["dtype"])
        if isinstance(found, str):
            raise SystemExit(f"{where}: {found}")
        row["schemes"].update(found)
    for name in DEEPSPEED:
        if asked.schemes and name not in asked.schemes:
            continue
        found = "DeepSpeed is not installed"
        if asked.deepspeed:
            found = run_lab(
                asked.deepspeed, [name], *where, asked.rounds, row["dtype"], limit=900
            )
        if isinstance(found, str):
            row["missing"][name] = found
        else:
            row["missing"].pop(name, None)
            row["schemes"].update(found)


def check_losses(found: dict[str, Any]) -> None:
    """Check that losses of exact schemes are within 0.5 % of one another (float32 sums
    in other orders, bfloat16 gathers), those of compressed ones within 5 %."""
    names = [name for name in found if name in EXACT]
    by_turn = zip(*(found[name]["losses"] for name in names), strict=True)
    expected = [statistics.median(losses) for losses in by_turn]
    for name, result in found.items():
        if name == ALONE:
            continue
        bound = 5e-3 if name in EXACT else 5e-2
        result["losses_agree"] = all(
            abs(ours - theirs) <= bound * abs(theirs)
            for ours, theirs in zip(result["losses"], expected, strict=True)
        )


def scale(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure weak scaling with emulated compute: 1 -> 2 -> 4 nodes of two ranks, four
    micro-batches, sharded in the node.

    A small model with long sleeps: eight ranks' real arithmetic on the machine's cores
    would be measured otherwise.
    """
    rows = []
    for nodes in (1, 2, 4):
        found = run_lab(
            sys.executable,
            list(SCALING),
            f"{nodes}x2",
            "1gbit",
            4,
            asked.rounds,
            "float32",
            compute_ms=asked.compute_ms,
            width=SCALING_WIDTH,
        )
        if isinstance(found, str):
            raise SystemExit(f"scaling, {nodes} nodes: {found}")
        rows += [
            {
                "compute_ms": asked.compute_ms,
                "nodes": nodes,
                "scheme": name,
                "seconds": found[name]["seconds"],
            }
            for name in SCALING
        ]
        for row in rows[-len(SCALING) :]:
            alone = next(one for one in rows if one["scheme"] == row["scheme"])
            row["efficiency"] = statistics.median(alone["seconds"]) / statistics.median(
                row["seconds"]
            )
            print(
                f"{nodes} nodes, {row['scheme']}: {row['seconds']}, efficiency {row['efficiency']:.3f}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", default=["2x2", "2x4", "4x2"])
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit"])
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--schemes", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deepspeed", help="python of an environment with DeepSpeed")
    parser.add_argument(
        "--table", action="store_true", help="only the rows of docs/performance.md"
    )
    parser.add_argument("--no-scaling", action="store_true")
    parser.add_argument("--only-scaling", action="store_true")
    parser.add_argument(
        "--compute-ms",
        type=float,
        default=300.0,
        help="emulated: of a block's forward, half of backward",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep what the result has and this run does not measure",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="measure nothing: chart and page from the result",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if platform.system() != "Linux" or os.geteuid():
        raise SystemExit(
            "the cluster is made of network namespaces: run this on Linux as root"
        )
    if asked.table:
        asked.rates, asked.dtypes = ["200mbit"], ["float32"]
    kept = (
        json.loads(asked.out.read_text())
        if (asked.keep or asked.report) and asked.out.exists()
        else {"rows": [], "scaling": []}
    )
    if asked.report:
        return write(asked.out, kept)
    kept["machine"] = {
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }
    for rows in () if asked.only_scaling else compare(asked, kept["rows"]):
        kept["rows"] = rows
        write(asked.out, kept)
    if not asked.no_scaling:
        kept["scaling"] = [
            row for row in kept["scaling"] if row["compute_ms"] != asked.compute_ms
        ] + scale(asked)
        write(asked.out, kept)


def write(path: Path, result: dict[str, Any]) -> None:
    """Write the result, its chart and, for the committed one, what pages show of it."""
    rows, scaling = result["rows"], result["scaling"]
    rows.sort(key=in_order)
    for row in rows:
        row["schemes"] = {
            name: row["schemes"][name] for name in SCHEMES if name in row["schemes"]
        }
    path.write_text(json.dumps(result, indent=1) + "\n")
    draw(rows, path.with_suffix(".png"))
    if path == RESULTS:
        path.with_suffix(".md").write_text(every_row(rows, scaling), encoding="utf-8")
        between_marks(PAGE, page(result["machine"], rows))
        between_marks(README, headline(result["machine"], rows))


def between_marks(path: Path, text: str) -> None:
    before, rest = path.read_text(encoding="utf-8").split(BEGIN, 1)
    path.write_text(
        f"{before}{BEGIN}\n{text}\n\n{END}{rest.split(END, 1)[1]}", encoding="utf-8"
    )


if __name__ == "__main__":
    main()

"""Seconds and size of the page that `smp report` makes of a log of 10,000 reports on
eight ranks (docs/monitoring.md).

    python benchmarks/report.py [--runs 5] [--out benchmarks/results/report.json]

Each run is the whole command in a process of its own, imports included. Reported are
the medians of its wall time and of its processor time, which other programs on the
machine take less part in.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from smp_core.observe.step_times import PARTS
from smp_core.run_log import write as run_log

REPORTS, RANKS, SAVES = 10_000, 8, 100


def write_log(folder: Path) -> None:
    """Write the log of a run that has a report after every step."""
    drawn = random.Random(0)
    log = run_log.start(folder / run_log.FILE, 0)
    axes = {
        "pipeline": 1,
        "replicate": 2,
        "shard": RANKS // 2,
        "context": 1,
        "tensor": 1,
    }
    log.append(
        "run",
        nodes=["node0", "node1"],
        ranks_per_node=RANKS // 2,
        layout=axes,
        plan=["2 x 4"],
    )
    for step in range(1, REPORTS + 1):
        seconds = 0.2 + 0.02 * drawn.random()
        figures = {f"seconds_{part}": 0.04 + 0.002 * drawn.random() for part in PARTS}
        figures |= {
            "loss": 2 + 6 * math.exp(-step / 3000) + 0.1 * drawn.random(),
            "seconds_step": seconds,
        }
        figures |= {
            "seconds_waiting": seconds / 10,
            "tokens_per_second": 16384 / seconds,
            "peak_host_rss_gib": 0.5,
        }
        by_rank = {
            str(rank): [0.04 + 0.002 * drawn.random() for _ in PARTS]
            for rank in range(RANKS)
        }
        sent = {
            f"{kind}/inter_bytes": 1e6
            for kind in ("all_gather", "reduce_scatter", "all_reduce")
        }
        log.append("step", step=step, **figures, seconds_by_rank=by_rank, sent=sent)
        if step % (REPORTS // SAVES) == 0:
            log.append(
                "checkpoint",
                step=step,
                path=f"step-{step}",
                stall_seconds=0.3,
                behind=True,
            )
            log.append(
                "memory",
                step=step,
                device={"parameters": 1e9, "activations": 1e9 * drawn.random()},
                host={},
            )
    log.append("end", step=REPORTS, how="completed")
    run_log.close(log)


def timed(command: list[str]) -> tuple[float, float]:
    """Return the wall time and the processor time of a command, in seconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, after = (
        time.perf_counter() - began,
        resource.getrusage(resource.RUSAGE_CHILDREN),
    )
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print the figures, and store them where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_log(folder)
        command = [sys.executable, "-m", "smp_core.cli", "report", str(folder)]
        times = [timed(command) for _ in range(flags.runs)]
        found = {
            "reports": REPORTS,
            "log_bytes": (folder / run_log.FILE).stat().st_size,
            "page_bytes": (folder / "report.html").stat().st_size,
            "wall_seconds": round(statistics.median(wall for wall, _ in times), 2),
            "processor_seconds": round(statistics.median(cpu for _, cpu in times), 2),
            "runs": flags.runs,
            "machine": platform.machine(),
        }
    print(json.dumps(found, indent=2))
    if flags.out:
        flags.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

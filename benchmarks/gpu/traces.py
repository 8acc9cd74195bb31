"""What a profiler's trace says: copies behind computation, and times in which the
device did nothing.

Events are of the trace viewers' format: "cat" is "kernel" or "gpu_memcpy" for what ran
on the device (annotations there are no work), "ts" and "dur" are microseconds.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

SMALLEST_COPY = 2**16
SMALLEST_GAP = 20.0
Event = Mapping[str, Any]


def traced(
    work: Callable[[], object], activities: list[ProfilerActivity]
) -> list[dict[str, Any]]:
    with profile(activities=activities) as trace:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))[
            "traceEvents"
        ]
        return events


def beside_compute(events: Iterable[Event]) -> dict[str, float | None]:
    """Return the milliseconds of copies to and from the host, and the share of each
    during which a kernel ran (None: there was no copy). Kernels of communication are no
    compute, and copies of less than 64 KiB (a loss) no offloading."""
    kernels: list[tuple[float, float]] = []
    copies: dict[str, list[tuple[float, float]]] = {"out": [], "in": []}
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in ("kernel", "gpu_memcpy"):
            continue
        name, span = str(event["name"]).lower(), _span(event)
        if event["cat"] == "kernel":
            if "nccl" not in name:
                kernels.append(span)
        elif event.get("args", {}).get("bytes", SMALLEST_COPY) >= SMALLEST_COPY:
            for direction, mark in (("out", "dtoh"), ("in", "htod")):
                if mark in name:
                    copies[direction].append(span)
    busy = merged(kernels)
    found: dict[str, float | None] = {}
    for direction, spans in copies.items():
        total = sum(end - start for start, end in spans)
        hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans for c, d in busy)
        found[f"copies_{direction}_ms"] = total / 1000
        found[f"copies_{direction}_beside_compute"] = hidden / total if total else None
    return found


def gaps(events: Iterable[Event], longest: int = 8) -> dict[str, Any]:
    """Describe the times between two kernels or copies in which nothing ran on the
    device: how many, how long, and what came before and after the longest."""
    work = sorted(
        (
            event
            for event in events
            if event.get("ph") == "X" and event.get("cat") in _WORK
        ),
        key=_span,
    )
    found, until, last = [], None, ""
    for event in work:
        start, end = _span(event)
        if until is not None and start - until >= SMALLEST_GAP:
            found.append((start - until, f"{last[:60]} .. {str(event['name'])[:60]}"))
        if until is None or end > until:
            until, last = end, str(event["name"])
    span = _span(work[-1])[1] - _span(work[0])[0] if work else 0.0
    idle = sum(length for length, _ in found)
    between = [
        f"{length:.0f} us: {names}"
        for length, names in sorted(found, reverse=True)[:longest]
    ]
    return {
        "step_ms": span / 1000,
        "gaps": len(found),
        "idle_share": idle / span if span else None,
        "longest": between,
    }


_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def _span(event: Event) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined

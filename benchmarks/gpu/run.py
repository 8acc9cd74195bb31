"""Check the CUDA paths on one GPU: right, fast, and in how much memory. `make
gpu-check` runs everything.

    python benchmarks/gpu/run.py [--part 1|2|3|4|5|6] [--only ITEM ...] [--again] [--out FILE]
    python benchmarks/gpu/run.py --ranks 8 # what takes several devices: parts 4 to 6
    python benchmarks/gpu/run.py --dry     # a rehearsal on the CPU: everything is imported, built and run, tiny
    python benchmarks/gpu/run.py --page    # write docs/gpu.md from the results

Every item (items.py) runs in a process of its own with a limit of its own, and what it
found is appended to the result file (JSON lines) when it ends; a part takes at most
nine minutes. A further run goes on with what has not been done on this machine. An
exception loses its row only, a crash or a limit the rows that were to come. Without a
device every item is marked "not run: no device". The status is 1 if something is wrong
or broke; a goal that is missed is no error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu import page
from benchmarks.gpu.items import ITEMS, PARTS, Item

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
THIS = str(Path(__file__).resolve())
NO_DEVICE = "not run: no device"
MARK = "ROW "


# In an item's process


def measured(item: Item, on: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of an item; one that raises says what."""
    from benchmarks.gpu.device import NotHere

    def attempt(name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            found = work()
        except NotHere as lacking:
            return {"row": name, "not_run": str(lacking)}
        except Exception as error:
            text = " ".join(str(error).split())
            return {"row": name, "error": f"{type(error).__name__}: {text}"[:400]}
        return {"row": name, **found, "seconds": round(time.perf_counter() - began, 2)}

    rows = item.rows(on)
    while True:
        try:
            name, work = next(rows)
        except StopIteration:
            return
        except Exception as error:  # between rows: nothing can follow
            yield {
                "row": "what came next",
                "error": f"{type(error).__name__}: {error}"[:400],
            }
            return
        yield attempt(name, work)


def run_item(name: str, kind: str) -> None:
    from benchmarks.gpu.device import Device

    [item] = (each for each in ITEMS if each.name == name)
    for row in measured(item, Device(kind)):
        print(MARK + json.dumps(row), flush=True)


# In the first process


def in_a_process(
    arguments: list[str], limit: float
) -> tuple[list[dict[str, Any]], str]:
    """Return the rows that a Python program printed, and how it ended: "done", "out of
    time" or "died: ..."."""
    rows: list[dict[str, Any]] = []
    command = [sys.executable, *arguments]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        late = threading.Event()

        def end() -> None:
            late.set()
            os.killpg(child.pid, signal.SIGKILL)

        timer = threading.Timer(limit, end)
        timer.start()
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(MARK):
                rows.append(json.loads(line.removeprefix(MARK)))
                print("   ", _short(rows[-1]), flush=True)
        status = child.wait()
        timer.cancel()
        with contextlib.suppress(ProcessLookupError):  # ranks that it left
            os.killpg(child.pid, signal.SIGKILL)
        errors.seek(0)
        said = errors.read().strip().splitlines()
    if late.is_set():
        return rows, "out of time"
    return (
        rows,
        "done"
        if status == 0
        else f"died: status {status}: {said[-1] if said else ''}"[:400],
    )


def _short(row: dict[str, Any]) -> str:
    text = ", ".join(
        f"{key} {page.cell(value)}"
        for key, value in row.items()
        if key not in ("row", "seconds")
    )
    return f"{row['row']}: {text}"


def run(
    items: list[Item], out: Path | None, *, dry: bool, again: bool
) -> list[dict[str, Any]]:
    """Run items that have not been done yet; what all of them gave, these among
    them."""
    here: Any = None
    if not dry:
        looked, state = in_a_process([THIS, "--machine"], 120)
        if not looked:
            raise SystemExit(f"gpu-check could not look at the device: {state}")
        here = looked[0]["machine"]
    if out is None and not dry:
        out = RESULTS / f"{_slug(here)}.jsonl"
    known = (
        page.read(out) if out is not None and out.exists() else page.Results(None, {})
    )
    if known.items and known.machine != here:
        raise SystemExit(
            f"{out} is of another machine ({known.machine}); name another file with --out"
        )
    if out is not None and not known.items:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"machine": here}) + "\n", encoding="utf-8")
    found = []
    for item in items:
        before = known.items.get(item.name)
        if before is not None and _is_done(before) and not again:
            found.append(before)
            print(f"{item.name}: done before")
            continue
        print(f"{item.name} (part {item.part}, at most {item.limit} s)", flush=True)
        began, rows, state = time.perf_counter(), [], NO_DEVICE
        if dry or here is not None:
            limit = 10 * item.limit if dry else item.limit  # a busy CPU is no device
            rows, state = in_a_process(
                [THIS, "--item", item.name, "--device", "cpu" if dry else "cuda"], limit
            )
        if dry and state == "done":
            state = "rehearsed"
        line = {"item": item.name, "part": item.part, "state": state}
        found.append(
            {**line, "seconds": round(time.perf_counter() - began, 1), "rows": rows}
        )
        print(f"    {state}", flush=True)
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found[-1]) + "\n")
    return found


def _is_done(line: dict[str, Any]) -> bool:
    """Return whether an item found something before: where no row could be run, another
    machine may."""
    return line["state"] == "done" and any("not_run" not in row for row in line["rows"])


def _slug(here: dict[str, Any] | None) -> str:
    if here is None:
        return "no-device"
    count = f"{here['devices']} " if "devices" in here else ""
    return re.sub(
        r"[^a-z0-9.]+", "-", f"{count}{here['device']} torch {here['torch']}".lower()
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part",
        type=int,
        choices=PARTS,
        help="a part of it, at most nine minutes; default all",
    )
    parser.add_argument(
        "--ranks", type=int, help="parts 4 to 6 only, with so many devices of this host"
    )
    parser.add_argument(
        "--only", nargs="+", choices=[item.name for item in ITEMS], metavar="ITEM"
    )
    parser.add_argument(
        "--dry",
        action="store_true",
        help="a rehearsal on the CPU; figures mean nothing",
    )
    parser.add_argument(
        "--again", action="store_true", help="also what has been done before"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="result file; default one for each device and torch version",
    )
    parser.add_argument(
        "--page",
        action="store_true",
        help="write docs/gpu.md from the committed results, run nothing",
    )
    parser.add_argument("--item", help=argparse.SUPPRESS)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS
    )
    parser.add_argument("--machine", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.page:
        page.write(RESULTS)
        return 0
    if flags.machine:
        from benchmarks.gpu.device import machine

        print(MARK + json.dumps({"row": "machine", "machine": machine()}))
        return 0
    if flags.item:
        run_item(flags.item, flags.device)
        return 0
    parts = tuple(PARTS) if flags.part is None else (flags.part,)
    if flags.ranks is not None:
        os.environ["RANKS"] = str(flags.ranks)  # for the items' processes
        parts = (4, 5, 6)
    chosen = [
        item
        for item in ITEMS
        if item.part in parts and (flags.only is None or item.name in flags.only)
    ]
    found = run(chosen, flags.out, dry=flags.dry, again=flags.again)
    wrong = [line["item"] for line in found if page.is_wrong(line)]
    print(f"wrong or broken: {', '.join(wrong)}" if wrong else page.in_short(found))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

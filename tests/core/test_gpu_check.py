"""benchmarks/gpu without a GPU: how it runs its items, what it reads from traces, the
page, and a rehearsal."""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import nccl_ranks, one_process, page, ranks, run, steps
from benchmarks.gpu.device import Device, NotHere
from benchmarks.gpu.items import ITEMS, PART_SECONDS, PARTS, Item, Rows
from benchmarks.gpu.traces import beside_compute, gaps
from smp_core.config import SmpConfig
from smp_core.torch_facts import kernels
from tests.harness import run_script

HERE = {"device": "GPU A", "torch": "2.11.0"}


# Running items


def test_parts_end_within_nine_minutes_and_items_are_told_apart() -> None:
    for part in PARTS:
        assert (
            0 < sum(item.limit for item in ITEMS if item.part == part) <= PART_SECONDS
        )
    assert len({item.name for item in ITEMS}) == len(ITEMS)


def test_every_item_has_rows_and_every_row_knobs_that_there_are() -> None:
    for item in ITEMS:
        module, function = item.where.split(":")
        assert callable(
            getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
        ), item.name
    for knobs in (
        *one_process.KNOBS.values(),
        *nccl_ranks.SHARDED.values(),
        *steps.MODES.values(),
        steps.LONG,
    ):
        SmpConfig(**{"shard_degree": 1, **knobs})
    here = ranks.Here(0, 8, torch.device("cpu"))
    for knobs in (*ranks.MEMORY.values(), *ranks.HOPS.values()):
        SmpConfig(**here.knobs(knobs))
    for count in range(1, 9):
        topology = ranks.Here(0, count, torch.device("cpu")).topology()
        assert topology.world_size == count and (count == 1 or topology.num_nodes > 1)


class Broken(Item):
    def rows(self, on: Any) -> Rows:
        def fails() -> dict[str, Any]:
            raise ZeroDivisionError("of all things")

        def lacks() -> dict[str, Any]:
            raise NotHere("FA3")

        yield "one", lambda: {"ok": True}
        yield "two", fails
        yield "three", lacks
        yield "four", lambda: {"ok": False}
        raise KeyError("five")


def test_an_exception_loses_its_row_only() -> None:
    item = Broken("broken", 1, "", 1, "")
    rows = list(run.measured(item, None))
    assert [row["row"] for row in rows] == [
        "one",
        "two",
        "three",
        "four",
        "what came next",
    ]
    assert rows[0]["ok"] and not rows[3]["ok"] and rows[2]["not_run"] == "FA3"
    assert (
        rows[1]["error"] == "ZeroDivisionError: of all things"
        and "five" in rows[4]["error"]
    )
    assert page.is_wrong({"state": "done", "rows": rows[1:2]}) and page.is_wrong(
        {"state": "done", "rows": rows[3:4]}
    )
    assert not page.is_wrong({"state": "done", "rows": [rows[0], rows[2]]})


ROW = 'print(\'ROW {"row": "one"}\', flush=True); '


@pytest.mark.parametrize(
    ("program", "limit", "state"),
    [
        (ROW, 600.0, "done"),
        (
            ROW + "print('noise'); raise SystemExit('no such kernel')",
            600.0,
            "died: status 1: no such kernel",
        ),
        (ROW + "import os; os.abort()", 600.0, "died: status -6: "),
        ("import time; time.sleep(3600)", 0.2, "out of time"),
    ],
)
def test_rows_before_a_crash_count(program: str, limit: float, state: str) -> None:
    rows, seen = run.in_a_process(["-c", program], limit)
    assert seen == state and rows == ([{"row": "one"}] if ROW in program else [])


def test_a_crash_leaves_no_ranks_behind() -> None:
    program = """if True:
        import os, subprocess
        child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
        print('ROW {"row": %d}' % child.pid, flush=True)
        os.abort()"""
    [row], state = run.in_a_process(["-c", program], 600.0)
    assert state.startswith("died"), state
    stat = Path("/proc", str(row["row"]), "stat")
    for _ in range(100):  # a process that is killed takes a moment to end
        if not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    os.kill(row["row"], signal.SIGKILL)
    pytest.fail("a rank that holds a device is left")


def answers(machine: dict[str, Any] | None, asked: list[str]) -> Callable[..., Any]:
    def in_a_process(arguments: list[str], limit: float) -> Any:
        if "--machine" in arguments:
            return [{"row": "machine", "machine": machine}], "done"
        asked.append(arguments[2])
        row = (
            {"row": "r", "not_run": "a second device"}
            if arguments[2] == "flash"
            else {"row": "r", "ok": True}
        )
        return [row], "out of time" if arguments[2] == "casts" else "done"

    return in_a_process


def test_without_a_device_every_item_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "in_a_process", answers(None, asked := []))
    assert run.main(["--out", str(tmp_path / "none.jsonl")]) == 0 and asked == []
    found = page.read(tmp_path / "none.jsonl")
    assert found.machine is None and [*found.items] == [item.name for item in ITEMS]
    assert {line["state"] for line in found.items.values()} == {"not run: no device"}
    assert page.all_results(tmp_path) == [], "which proves nothing"


def test_a_further_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was done is not done again, what ran out of time or found nothing to run on
    is; a file belongs to one machine."""
    monkeypatch.setattr(run, "in_a_process", answers(HERE, asked := []))
    arguments = [
        "--part",
        "1",
        "--only",
        "kernels",
        "casts",
        "--out",
        str(tmp_path / "a.jsonl"),
    ]
    assert run.main(arguments) == 1 and asked == ["kernels", "casts"]
    assert run.main([*arguments[2:], "--only", "kernels", "casts", "codecs"]) == 1
    assert asked[2:] == ["casts", "codecs"]
    run.main([*arguments, "--again"])
    assert asked[4:] == ["kernels", "casts"]
    for _ in range(2):
        run.main([*arguments[2:], "--only", "flash"])
    assert asked[6:] == ["flash", "flash"]
    states = {
        name: line["state"]
        for name, line in page.read(tmp_path / "a.jsonl").items.items()
    }
    assert states == {
        "kernels": "done",
        "casts": "out of time",
        "codecs": "done",
        "flash": "done",
    }
    monkeypatch.setattr(
        run, "in_a_process", answers({**HERE, "device": "GPU B"}, asked)
    )
    with pytest.raises(SystemExit, match="another machine"):
        run.main(arguments)


def test_results_have_files_by_device_and_torch() -> None:
    assert (
        run._slug({"device": "NVIDIA H100 80GB", "torch": "2.11.0+cu130"})
        == "nvidia-h100-80gb-torch-2.11.0-cu130"
    )
    assert (
        run._slug({"devices": 8, "device": "NVIDIA H100", "torch": "2.11.0"})
        == "8-nvidia-h100-torch-2.11.0"
    )


# The page


def test_the_page_and_the_readme_are_those_of_the_results() -> None:
    found = page.all_results(run.RESULTS)
    report = "run: python benchmarks/gpu/run.py --page"
    assert page.PAGE.read_text(encoding="utf-8") == page.text(found), report
    shown = (
        page.README.read_text(encoding="utf-8")
        .split(page.BEGIN, 1)[1]
        .split(page.END, 1)[0]
    )
    assert shown.strip() == page.sentence(found), report


def test_the_page_says_what_was_shown_and_what_was_not() -> None:
    rows = [
        {"row": "a|b", "ok": True, "off": 0.25},
        {"row": "c", "error": "KeyError: 5"},
        {"row": "d", "not_run": "FA3"},
    ]
    lines = {
        "casts": {"item": "casts", "state": "done", "rows": rows},
        "codecs": {
            "item": "codecs",
            "state": "out of time",
            "rows": [{"row": "int8", "GB/s": 5.0, "met": False}],
        },
    }
    found = [page.Results(HERE, lines)]
    text = page.text(found)
    assert "Run on: GPU A." in text and "| 1 of 2 right, 1 not run |" in text
    assert (
        "| out of time, 0 of 1 goals met |" in text
        and "against bfloat16 | not run |" in text
    )
    assert (
        "| a\\|b | off 0.250 | right |" in text
        and "| c | KeyError: 5 | wrong |" in text
    )
    assert (
        "| d |  | not run: FA3 |" in text and "| int8 | GB/s 5.000 | missed:  |" in text
    )
    assert "wrong or broken: casts, codecs" in page.sentence(found)
    assert "nothing was found wrong" in page.sentence([page.Results(HERE, {})])


# A rehearsal


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A CPU that poses as a device, for as long as the test lasts."""
    monkeypatch.setattr(kernels, "_CAPABLE", {})
    monkeypatch.setattr(kernels, "_TRITON", kernels._TRITON)
    return Device("cpu")


# In this process, those that start no ranks: rows each.
AT_THE_DESK = {"casts": 29, "products": 9, "flash": 13, "codecs": 17}


@pytest.mark.parametrize("name", AT_THE_DESK)
def test_an_item_is_rehearsed(name: str, on: Device) -> None:
    [item] = (each for each in ITEMS if each.name == name)
    rows = list(run.measured(item, on))
    assert len(rows) == AT_THE_DESK[name]
    assert not page.is_wrong({"state": "rehearsed", "rows": rows}), rows


# In the normal run: items at the desk, and what endings make of worlds that say
# nothing.
@pytest.mark.slow
def test_ranks_of_several_devices_are_rehearsed(on: Device) -> None:
    """Ranks of their own, of which one goes another way: all end, and it is named."""
    [(name, work), *_] = ranks.endings(on)
    assert name == "apart"
    found = work()
    assert found["ok"] and found["statuses"] == [1, 1], found


def test_a_world_that_says_nothing_is_no_result(
    on: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken ranks raise what they said, and an ending without a word is wrong."""
    ended = ranks.Ended(None, [1, 0], "Traceback\nKeyError: 5", 1.0)
    monkeypatch.setattr(ranks, "_started", lambda *_: ended)
    [(_, work), *_] = ranks.memory(on)
    with pytest.raises(
        RuntimeError, match=r"statuses \[1, 0\] after 1 s: Traceback \| KeyError: 5"
    ):
        work()
    assert [work()["ok"] for _, work in ranks.endings(on)] == [False] * 3


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_everything_is_rehearsed(part: int, tmp_path: Path) -> None:
    """What is kept changes no loss, in whatever mode; nothing else is known about a
    CPU."""
    out = tmp_path / "rehearsal.jsonl"
    ran = run_script(
        ["benchmarks/gpu/run.py", "--dry", "--part", str(part), "--out", str(out)],
        timeout=3600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = page.read(out).items
    assert {line["state"] for line in found.values()} == {"rehearsed"}
    assert [*found] == [item.name for item in ITEMS if item.part == part]
    if part == 3:
        for length in (64, 96):
            losses = {
                row["loss"]
                for row in found["activations"]["rows"]
                if row["row"].endswith(f", {length} tokens") and "loss" in row
            }
            assert len(losses) == 1
    assert json.loads(out.read_text().splitlines()[0]) == {"machine": None}


# Traces


def event(
    category: str, name: str, start: float, duration: float, **more: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": duration,
        "args": more,
    }


OUT, IN = "Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)"
LARGE = {"bytes": 2**20}


def test_copies_beside_compute_are_read_from_the_trace() -> None:
    """Microseconds: kernels run in [0, 150) and [200, 300); copies out in [100, 300),
    in in [250, 350)."""
    events = [
        {"ph": "M", "name": "process_name"},
        event("kernel", "gemm", 0, 100),
        # On another stream: counted once where they overlap.
        event("kernel", "flash_fwd", 80, 70),
        event("kernel", "gemm", 200, 100),
        event("gpu_memcpy", OUT, 100, 200, **LARGE),
        event("gpu_memcpy", IN, 250, 100, **LARGE),
        # What is no compute: an annotation over everything, a launch on the CPU,
        # communication, a fill.
        event("gpu_user_annotation", "Optimizer.step#AdamW.step", 0, 1000),
        event("cuda_runtime", "cudaLaunchKernel", 0, 1000),
        event("kernel", "ncclDevKernel_AllGather_RING_LL", 150, 500),
        event("gpu_memset", "Memset (Device)", 150, 50),
        # What is no offloading: the loss, and a copy on the device.
        event("gpu_memcpy", OUT, 160, 5, bytes=4),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 150, 50, **LARGE),
    ]
    found = beside_compute(events)
    assert found == {
        "copies_out_ms": 0.2,
        "copies_out_beside_compute": pytest.approx(150 / 200),
        "copies_in_ms": 0.1,
        "copies_in_beside_compute": pytest.approx(50 / 100),
    }


def test_serial_and_hidden_copies_are_told_apart() -> None:
    kernels = [event("kernel", "gemm", start, 90) for start in (0, 100, 200)]
    serial = [
        *kernels,
        event("gpu_memcpy", OUT, 90, 10, **LARGE),
        event("gpu_memcpy", IN, 190, 10, **LARGE),
    ]
    hidden = [
        *kernels,
        event("gpu_memcpy", OUT, 110, 60, **LARGE),
        event("gpu_memcpy", IN, 210, 60, **LARGE),
    ]
    for events, share in ((serial, 0.0), (hidden, 1.0)):
        found = beside_compute(events)
        assert (
            found["copies_out_beside_compute"]
            == found["copies_in_beside_compute"]
            == share
        )
    assert beside_compute(kernels)["copies_in_beside_compute"] is None, "there was none"


def test_times_in_which_the_device_did_nothing_are_read_from_the_trace() -> None:
    """Microseconds: nothing runs in [150, 200), [300, 400), and in [420, 430), which is
    too short to count."""
    events = [
        event("kernel", "gemm", 0, 100),
        event("kernel", "flash_fwd", 80, 70),
        event("kernel", "short", 110, 5),  # ends before the one that began before it
        event("kernel", "gemm", 200, 100),
        event("cuda_runtime", "cudaLaunchKernel", 300, 100),
        event("gpu_memcpy", OUT, 400, 20, **LARGE),
        event("kernel", "last", 430, 70),
    ]
    found = gaps(events)
    assert (
        found["gaps"] == 2
        and found["step_ms"] == 0.5
        and found["idle_share"] == pytest.approx(150 / 500)
    )
    assert [text.split(" us")[0] for text in found["longest"]] == ["100", "50"]
    assert (
        "gemm .. Memcpy DtoH" in found["longest"][0]
        and "flash_fwd .. gemm" in found["longest"][1]
    )


@pytest.mark.parametrize(
    ("copy", "second", "expected"),
    [
        (1.0, {"step_seconds": 1.04}, True),
        (1.0, {"step_seconds": 1.06}, False),
        (3.0, {"step_seconds": 1.01}, None),  # no copy could hide
        (1.0, {"out of memory": True}, False),
    ],
)
def test_the_goal_of_offloading(
    copy: float, second: dict[str, Any], expected: bool | None
) -> None:
    shares = (
        {"copies_out_beside_compute": 0.98, "copies_in_beside_compute": 0.91}
        if "step_seconds" in second
        else {}
    )
    modes = {
        "full": {"step_seconds": 1.0},
        "full + offload, horizon 2": {**second, **shares},
    }
    found = steps.compared({"copy_ms": copy, "block_ms": 2.0}, modes)
    assert found["met"] is expected and found["copies_beside_compute"] == (
        0.91 if shares else None
    )

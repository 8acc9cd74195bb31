"""The log of a run and the page that `smp report` makes of it: the numbers are the
log's, and names in it are data."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from smp_core.cli import app
from smp_core.observe.step_times import PARTS
from smp_core.report.charts import Charts, thinned
from smp_core.run_log import write as run_log
from smp_core.run_log.read import Run

PLAN: dict[str, Any] = {
    "knobs": [
        {
            "knob": "shard_degree",
            "asked": "node",
            "value": "2",
            "why": "the ranks of a node",
        }
    ],
    "plan": ["2 nodes x 2 ranks"],
    "nodes": ["first", "second"],
    "ranks_per_node": 2,
    "layout": {"pipeline": 1, "replicate": 2, "shard": 2, "context": 1, "tensor": 1},
    "savings": [{"knob": "compression='bf16'", "kinds": ["all_reduce"], "share": 0.5}],
    "links": {
        "measured_with": "gloo",
        "inter": {"all_reduce": {"latency": 1e-3, "bandwidth": 1e8}},
        "intra": None,
    },
    "planned_memory": {
        "parameters": 3 * 2**20,
        "gathered": 2**20,
        "gradients": 2**20,
        "optimizer": 2**21,
    },
    "planned_optimizer": "found AdamW, 2 states for each trainable parameter",
    "planned_sent": {"all_gather/intra": 4e6, "all_reduce/inter": 8e6},
}
SENT = {
    "all_gather/intra_bytes": 4e6,
    "all_reduce/inter_bytes": 8e6,
    "all_reduce/calls": 3.0,
    "inter_bytes": 8e6,
}
MEMORY = {"parameters": 3 * 2**20, "gathered": 2**19, "activations": 2**22}
FP8 = {
    "head": {"input_saturated": 0.25, "input_flushed": 0.0},
    "body": {"input_saturated": 0.125},
}

ROUTERS = {
    f"layers.{layer}.gate": {"busiest": 1.5 + layer, "idle": layer / 8}
    for layer in range(7)
}


def written(folder: Path, steps: int = 6, slower: float = 1.0, **plan: Any) -> Path:
    """A log as a monitor writes it; no two numbers in it are equal by accident."""
    log = run_log.start(folder / run_log.FILE, 0)
    log.append("run", **{**PLAN, **plan})
    for step in range(1, steps + 1):
        seconds = slower * (0.2 + 0.001 * (step % 7))
        figures = {
            "loss": 4 / step,
            "tokens_per_second": 1000 / seconds,
            "seconds_step": seconds,
            "lr": 0.1 / step,
        }
        by_part = {
            f"seconds_{part}": 0.01 * (place + 1) for place, part in enumerate(PARTS)
        }
        figures |= {**by_part, "seconds_waiting": seconds - 0.1, "straggler_rank": 3.0}
        by_rank = {
            str(rank): [0.01, 0.02, 0.03, 0.04 + rank / 1000] for rank in range(4)
        }
        figures |= {
            "samples": 8.0 * step / slower,
            "tokens_seen": 800.0 * step / slower,
        }
        log.append(
            "step",
            step=step,
            **figures,
            seconds_by_rank=by_rank,
            sent=SENT,
            routers=ROUTERS,
        )
    for step in (3, steps):
        log.append(
            "metrics",
            step=step,
            values={"val/loss": 5 / step, "val/accuracy": step / 10},
        )
    log.append("memory", step=steps, device=MEMORY, host={})
    log.append("fp8", step=steps, modules=FP8)
    stalls = {
        "seconds_save_before": 0.03,
        "seconds_copying": 0.0055,
        "seconds_agreeing": 0.002,
    }
    run_log.note(
        "checkpoint",
        step=steps,
        path="/runs/last",
        stall_seconds=0.0375,
        **stalls,
        behind=True,
    )
    logging.getLogger("smp").warning("straggler: rank %d", 3)
    log.append("end", step=steps, how="completed")
    run_log.close(log)
    run_log.note("warning", text="nobody keeps it")
    return folder


class Page(HTMLParser):
    """Tables by class: (name of the row, numbers as the markup has them, or texts).
    Also all tags and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self._table = ""
        self._cell: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.add(tag)
        self.attributes |= set(values)
        if tag == "table":
            self._table = str(values["class"])
        elif tag == "tr":
            self.tables.setdefault(self._table, []).append([])
        elif tag in ("th", "td"):
            self._cell = [str(values["data-value"])] if "data-value" in values else []

    def handle_endtag(self, tag: str) -> None:
        if tag in ("th", "td") and self._cell is not None:
            self.tables[self._table][-1].append(self._cell[0] if self._cell else "")
            self._cell = None

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._cell is not None and not self._cell:
            self._cell.append(data)

    def row(self, table: str, name: str) -> list[str]:
        return next(row[1:] for row in self.tables[table] if row and row[0] == name)


def page_of(*folders: Path) -> tuple[Page, str]:
    out = folders[0] / "report.html"
    done = CliRunner().invoke(app, ["report", *map(str, folders), "--out", str(out)])
    assert done.exit_code == 0, done.output
    text = out.read_text(encoding="utf-8")
    return Page(text), text


def lines(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (folder / run_log.FILE).read_text().splitlines()
    ]


def test_numbers_on_the_page_are_the_logs(tmp_path: Path) -> None:
    page, _ = page_of(written(tmp_path))
    reports = [line for line in lines(tmp_path) if line["kind"] == "step"]
    for name, words in (
        ("loss", "loss"),
        ("tokens_per_second", "tokens/s"),
        ("lr", "lr"),
        ("seconds_step", "seconds"),
    ):
        values = [report[name] for report in reports]
        expected = [
            values[0],
            statistics.median(values),
            min(values),
            max(values),
            values[-1],
        ]
        words = "seconds of a step" if words == "seconds" else words
        assert list(map(float, page.row("figures", words))) == expected, name
    assert page.row("figures", "straggler_rank") == ["3.0", "", "", "", "3.0"]
    assert page.row("figures", "samples") == ["8.0", "", "", "", "48.0"]
    assert list(map(float, page.row("logged", "val/loss"))) == [
        5 / 3,
        (5 / 3 + 5 / 6) / 2,
        5 / 6,
        5 / 3,
        5 / 6,
    ]
    for rank, parts in reports[-1]["seconds_by_rank"].items():
        assert list(map(float, page.row("ranks", f"rank {rank}"))) == parts
    assert page.row("sent", "all_reduce/inter")[:2] == ["8000000.0", "8000000.0"]
    assert page.row("memory", "parameters") == ["3.0", "3.0"] and page.row(
        "memory", "activations"
    ) == ["4.0", ""]
    assert page.row("saves", "step 6") == [
        "0.0375",
        "0.03",
        "0.0055",
        "0.002",
        "behind training",
        "/runs/last",
    ]
    assert page.row("events", "step 0") == ["warning", "straggler: rank 3"]
    assert page.row("knobs", "shard_degree") == ["node", "2", "the ranks of a node"]
    assert ["input saturated", "head", "0.25"] in page.tables["fp8"]
    assert (
        page.tables["routers"][1] == ["layers.6.gate", "7.5", "0.75"]
        and len(page.tables["routers"]) == 6
    )
    assert (
        page.text.count("first") >= 1 and "one colour per partition group" in page.text
    )


def test_every_cell_has_its_columns_name_for_a_narrow_screen(tmp_path: Path) -> None:
    """Rows become paragraphs there; what would be beside the screen stands under one
    another."""
    _, text = page_of(written(tmp_path))
    cells = re.findall(r"<td[^>]*>", text)
    assert cells and all("data-head=" in cell for cell in cells)
    assert '<td class="number" data-head="last" data-value="48.0">' in text
    narrow = text[text.index("@media (max-width: 40rem)") :]
    assert (
        "display: block" in narrow
        and "pre-wrap" in narrow
        and "attr(data-head)" in narrow
    )


def test_the_verdict_says_what_waits_and_what_would_help(tmp_path: Path) -> None:
    page, _ = page_of(written(tmp_path))
    step = statistics.median(
        line["seconds_step"] for line in lines(tmp_path) if line["kind"] == "step"
    )
    busy = 3 * 2 * 1e-3 + 8e6 / 1e8  # calls x rounds x latency + bytes / bandwidth
    assert (
        f"the link between nodes is busy for {busy / step:.0%} of a step" in page.text
    )
    assert (
        f"compression='bf16' would save up to {8e6 / 1e8 / 2 / step:.0%} of a step"
        in page.text
    )
    assert "The run was completed after 6 optimizer steps" in page.text
    assert "The others waited for rank 3 in 6 of 6 reports" in page.text
    causes = "0.03 s for the save before, 0.0055 s copying, 0.002 s agreeing that a save had ended"
    assert f": {causes}." in page.text
    assert (
        "data 5%, forward 10%, backward 15%, optimizer 20%, waiting for other ranks 5"
        in page.text
    )


def test_two_runs_beside_one_another(tmp_path: Path) -> None:
    knobs = [{"knob": "shard_degree", "asked": "4", "value": "4", "why": "as asked"}]
    page, text = page_of(
        written(tmp_path / "a"), written(tmp_path / "b", slower=1.25, knobs=knobs)
    )
    assert page.row("differ", "shard_degree") == ["2", "4"]
    first, second, difference = page.row("figures", "seconds of a step")
    assert (
        float(second) == pytest.approx(1.25 * float(first)) and difference == "+25.0%"
    )
    assert text.count("A step takes") == 2
    for name in ("samples", "tokens_seen"):
        first, second, difference = page.row("figures", f"{name}, last")
        assert float(first) == 1.25 * float(second) > 0 and difference == "-20.0%"
    assert page.row("figures", "straggler_rank, most frequent") == ["3", "3", ""]


def test_a_run_goes_on_in_its_log_after_it_was_killed(tmp_path: Path) -> None:
    """Steps that were trained again are shown once; a run that begins anew is another
    one."""
    file = tmp_path / run_log.FILE
    run_log.append(file, "run", step=0)
    for step in (1, 2, 3):
        run_log.append(file, "step", step=step, loss=float(step))
    with file.open("a") as half:
        half.write('{"kind": "st')
    run_log.append(file, "run", step=1)
    run_log.append(file, "step", step=2, loss=math.nan)
    run = Run.read(tmp_path)
    assert (
        list(run.steps) == [1, 2]
        and run.starts == 2
        and run.unreadable == 1
        and run.end is None
    )
    page, _ = page_of(tmp_path)
    assert (
        "resumed 1 times" in page.text
        and "inf or nan in 1 reports, first at step 2" in page.text
    )
    assert "1 lines of the log could not be read" in page.text
    run_log.append(file, "run", step=0)
    anew = Run.read(tmp_path)
    assert not anew.steps and anew.earlier == 2


def test_a_log_that_cannot_be_written_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    log = run_log.start(tmp_path / "file" / run_log.FILE, 0)
    log.append("run")
    run_log.note("warning", text="lost")
    assert [record.getMessage().split(" any more")[0] for record in caplog.records] == [
        f"{log.path} is not written"
    ]


EVIL = (
    "<script>alert(1)</script></svg></title>\"' onload=alert(2) $\\frac{x}$ "
    "{{ 7*7 }} \x00\x1b[31m #010203 url(#a)"
)
# Whatever the page is made of.
TAGS = (
    "html head meta title style body h1 h2 div strong span ul li pre "
    "table thead tbody tr th td p svg defs g path use"
)
SHAPES = "clippath rect text circle polyline"


def hostile(folder: Path) -> Path:
    """Texts that are code elsewhere, in every place, and values of every other type."""
    huge: list[Any] = [1e308, -1e308, 10**400, True, None, [], {}, EVIL, [[1]], 0]
    records: list[dict[str, Any]] = [{"kind": "run", "step": 0, "time": 1e300}]
    records += [
        {"kind": "run", "step": 0, **{name: value for name in PLAN}} for value in huge
    ]
    records += [
        {"kind": kind, "step": 2, "time": value, EVIL: value}
        for kind in ("step", "memory")
        for value in huge
    ]
    knobs = [dict.fromkeys(("knob", "asked", "value", "why"), EVIL)]
    savings = [{"knob": EVIL, "kinds": ["all_reduce"], "share": 0.5}]
    lists = {
        "plan": [EVIL],
        "nodes": [EVIL, EVIL],
        "knobs": knobs,
        "savings": savings,
        "planned_optimizer": EVIL,
    }
    records.append(
        {
            **PLAN,
            "kind": "run",
            "step": 0,
            "time": 1e9,
            **lists,
            "planned_sent": {EVIL: 1, "a/b": 1e308},
        }
    )
    for step in (1, 2, 3):
        figures = {
            "loss": 10.0**step,
            EVIL: step * 1e307,
            "tokens_per_second": -1e308,
            "seconds_step": 1e-300,
        }
        by_rank = {EVIL: [1, 2, 3, 1e308], "1": EVIL, "2": [1]}
        sent = {**SENT, f"{EVIL}/inter_bytes": 5, "seconds": EVIL}
        records.append(
            {
                "kind": "step",
                "step": step,
                **figures,
                "seconds_by_rank": by_rank,
                "sent": sent,
            }
        )
        records[-1]["routers"] = (
            {EVIL: {"busiest": EVIL, "idle": 1e308}, "x": 7} if step > 1 else EVIL
        )
    records.append(
        {
            "kind": "memory",
            "step": 1,
            "device": {EVIL: 1e308, "parameters": 1e308, "x": EVIL},
        }
    )
    records.append(
        {"kind": "fp8", "step": 1, "modules": {EVIL: {"input_saturated": 0.5}, "x": 7}}
    )
    records.append(
        {"kind": "checkpoint", "step": 1, "path": EVIL, "stall_seconds": 1e308}
    )
    records += [
        {"kind": kind, "step": 1, "text": text}
        for kind in ("warning", "waiting")
        for text in (EVIL, 7)
    ]
    records.append({"kind": "end", "step": 1e300, "how": EVIL})
    texts = [json.dumps(record) for record in records]
    texts += [
        "[" * 100_000,
        '"text"',
        "NaN",
        '{"kind": "step", "step": NaN}',
        '{"kind": ["step"], "step": 1}',
    ]
    folder.mkdir()
    (folder / run_log.FILE).write_text("\n".join(texts))
    return folder


def test_a_log_from_elsewhere_runs_nothing_in_the_page(tmp_path: Path) -> None:
    page, text = page_of(hostile(tmp_path / "a"))
    assert page.tags <= set(TAGS.split()) | set(SHAPES.split())
    assert not {name for name in page.attributes if name.startswith("on")}
    assert "default-src 'none'; style-src 'unsafe-inline'" in text
    assert page.row("events", "step 1") == [
        "warning",
        EVIL.replace("\x00", "\ufffd").replace("\x1b", "\ufffd"),
    ]
    assert not re.search(
        r"<(img|link|iframe|script)|javascript:|https?://(?!www\.w3\.org)",
        text.replace("&lt;", ""),
    )
    page_of(tmp_path / "a", written(tmp_path / "b"))


def test_fp8_over_time_is_the_worst_module_of_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = run_log.start(tmp_path / run_log.FILE, 0)
    log.append("run", **PLAN)
    for step, saturated in ((1, 0.5), (2, 0.0625)):
        log.append(
            "fp8", step=step, modules={**FP8, "tail": {"input_saturated": saturated}}
        )
    run_log.close(log)
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(
        Charts, "lines", lambda _, series, unit: drawn.update({unit: series}) or ""
    )
    page, _ = page_of(tmp_path)
    assert drawn["share, the worst module's"]["input saturated"] == [
        (1, 0.5),
        (2, 0.25),
    ]
    assert page.tables["fp8"][1:4] == [
        [name, *rest]
        for name, rest in zip(
            ["input saturated"] * 3,
            [["tail", "0.5"], ["head", "0.25"], ["body", "0.125"]],
            strict=True,
        )
    ]


def test_the_command_does_without_torch() -> None:
    program = "import sys; from smp_core.cli import application; application('report'); print('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True
        ).stdout.strip()
        == "False"
    )


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / run_log.FILE).write_text('{"kind": "step", "step": 1}\n')
    for path, said in ((tmp_path, "holds no run"), (tmp_path / "nowhere", "run_log=")):
        refused = CliRunner().invoke(app, ["report", str(path)])
        assert refused.exit_code == 1 and said in refused.output.replace("\n", " "), (
            refused.output
        )


def test_a_thinned_line_keeps_its_peaks() -> None:
    points = [(float(x), float(x % 1000 == 777)) for x in range(100_000)]
    kept = thinned(points, 1000)
    assert (
        len(kept) <= 1000
        and sum(y for _, y in kept) == 100
        and sorted(kept) == list(kept)
    )


CHROMIUM = (
    shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
# Without those that keep it quiet, it looks for its maker's hosts; it does so for a
# time all the same.
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
FLAGS += "--disable-component-update --disable-sync --enable-logging=stderr --dump-dom"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("make", [written, hostile])
def test_a_browser_shows_the_same_numbers_and_asks_nobody(
    make: Any, tmp_path: Path
) -> None:
    ours, _ = page_of(make(tmp_path / "run"))
    net, profile = tmp_path / "net.json", tmp_path / "profile"
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        *FLAGS.split(),
        f"--user-data-dir={profile}",
        f"--log-net-log={net}",
    ]
    page = (tmp_path / "run" / "report.html").as_uri()
    done = subprocess.run([*command, page], capture_output=True, text=True, timeout=300)
    shown = Page(done.stdout)
    assert shown.tables == ours.tables
    assert "CONSOLE" not in done.stderr, done.stderr
    hosts = set(
        re.findall(
            r'"(?:host|url)":"(?:\w+://)?([^"/]*)', net.read_text(errors="replace")
        )
    )
    assert not {host for host in hosts if not host.endswith("google.com")}


@pytest.mark.slow
def test_a_log_of_ten_thousand_steps_is_a_small_page(tmp_path: Path) -> None:
    _, text = page_of(written(tmp_path, steps=10_000))
    assert len(text) <= 5e6

"""The page about one run, or two beside one another: sections of tables and charts, put
into a template.

The template escapes whatever it is given (jinja2's autoescape) but for charts, which
escape by themselves, and the page forbids scripts and every request
(Content-Security-Policy).
"""

from __future__ import annotations

import datetime
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
from markupsafe import Markup

from smp_core.cluster import Layout
from smp_core.observe import PARTS
from smp_core.outside import number, numbers
from smp_core.plan import svg_picture
from smp_core.report.charts import Charts, Points
from smp_core.report.verdict import STALLS, verdict
from smp_core.run_log import Run, objects, texts
from smp_core.topology import Topology

_MIB = 2**20
# Ranks of a world whose picture is drawn, and rows of a table that are shown.
_LARGEST_PICTURE, _MOST_ROWS = 4096, 50
_MOST_ROUTERS, _MOST_DRAWN = 5, 8
# Numbers that count from the start of a run: ours, and those of Transformers' Trainer.
_COUNTS = ("samples", "epoch", "total_flos", "num_input_tokens_seen", "num_tokens")

FIGURES = {
    "loss": "loss",
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "tflops_per_device": "model TFLOPS per device",
    "mfu": "MFU (share of the peak)",
    "seconds_step": "seconds of a step",
    **{f"seconds_{part}": f"seconds of it: {part}" for part in PARTS},
    "seconds_waiting": "seconds of it: waiting for other ranks",
    "bytes_between_nodes": "bytes to other nodes, per step and node",
    "bytes_inside_nodes": "bytes inside nodes, per step and node",
    "peak_device_memory_gib": "peak device memory, GiB",
    "peak_host_rss_gib": "peak memory of a rank, GiB",
    "expert_load": "tokens of the busiest expert of any router, over the mean",
    "idle_experts": "share of experts without a token",
    "dropped_choices": "share of choices that experts left out, being full",
}
"""Figures of reports that have words; others are shown by their own names."""


@dataclass(frozen=True)
class Cell:
    """A number in a table: as the log has it, and for people."""

    value: float

    @property
    def text(self) -> str:
        """Return the number with four digits, or all of those before the point."""
        return f"{self.value:,.0f}" if abs(self.value) >= 1e4 else f"{self.value:.4g}"


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        heads: of the columns.
        rows: (name, cells); a cell is a Cell, a text or None.
        key: names the table in the page's markup.
    """

    key: str
    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Any]]]


@dataclass(frozen=True)
class Section:
    """A part of the page: a heading, then whatever of the rest there is. Charts are
    SVG, which goes into the page as it is."""

    heading: str
    tables: Sequence[Table] = ()
    charts: Sequence[str] = ()
    lines: Sequence[str] = ()
    note: str = ""

    @property
    def has_content(self) -> bool:
        """Return whether there is anything to show."""
        return bool(
            self.charts or self.lines or any(table.rows for table in self.tables)
        )


def page(runs: Sequence[Run]) -> str:
    """Return the page about one run, or about two beside one another, as HTML.

    Raises:
        ValueError: matplotlib is not installed.
    """
    # One object for all charts: their identifiers must not collide on one page.
    charts = Charts()

    def of_each(*makers: Callable[[Run, Charts], Section]) -> Iterator[Section]:
        for make in makers:
            for run in runs:
                section = make(run, charts)
                of_run = "" if len(runs) == 1 else f" ({run.name})"
                yield replace(section, heading=f"{section.heading}{of_run}")

    made = (
        _differing(runs),
        *of_each(_asked, _groups),
        _progress(runs, charts),
        _logged(runs, charts),
        *of_each(_parts, _bytes, _memory, _saves, _fp8, _routers, _events),
    )
    # A section that the log has nothing for is left out.
    sections = [section for section in made if section.has_content]
    # Autoescape on, undefined names an error: a log decides no markup.
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("smp_core.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_printable,
    )
    shown = [(run.name, _began(run), [*verdict(run), *_left_out(run)]) for run in runs]
    return environment.get_template("page.html").render(
        title=" against ".join(run.name for run in runs),
        runs=shown,
        sections=sections,
        is_number=lambda cell: isinstance(cell, Cell),
    )


def _printable(value: Any) -> Any:
    """Return a text without control characters, which pages may not have."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "\ufffd"
        for letter in value
    )


def _began(run: Run) -> str:
    # Times come from the log, and may be anything.
    began = number(run.asked.get("time"))
    try:
        moment = datetime.datetime.fromtimestamp(began or 0.0, datetime.timezone.utc)
    except (ValueError, OverflowError, OSError):
        return ""
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _left_out(run: Run) -> list[str]:
    found = (
        [f"{run.unreadable} lines of the log could not be read."]
        if run.unreadable
        else []
    )
    return (
        [*found, "The file begins with an earlier run, which is not shown."]
        if run.earlier
        else found
    )


def _differing(runs: Sequence[Run]) -> Section:
    """Return the knobs in which two runs differ."""
    sides = []
    for run in runs:
        sides.append(
            {str(row.get("knob")): row for row in objects(run.asked.get("knobs"))}
        )
    rows = []
    # Every knob of either run; one that is missing was at its default.
    for knob in dict.fromkeys(name for side in sides for name in side):
        values = [
            str(side[knob].get("value")) if knob in side else "default"
            for side in sides
        ]
        if len(set(values)) > 1:
            rows.append((knob, values))
    table = Table("differ", ["knob", *_names(runs)], rows)
    return Section("Knobs in which they differ", [table])


def _asked(run: Run, charts: Charts) -> Section:
    """Return what was asked, chosen and why."""
    rows = []
    for row in objects(run.asked.get("knobs")):
        cells = [str(row.get(name)) for name in ("asked", "value", "why")]
        rows.append((str(row.get("knob")), cells))
    table = Table("knobs", ["knob", "asked", "in effect", "why"], rows[:_MOST_ROWS])
    note = "Knobs that are not listed are at their defaults."
    return Section("What was asked, and chosen", [table], note=note)


def _groups(run: Run, charts: Charts) -> Section:
    """Return the nodes with their ranks and groups."""
    picture = _picture(run)
    drawn = [] if picture is None else [picture]
    lines = texts(run.asked.get("plan"))
    return Section("Nodes and groups", charts=drawn, lines=lines)


def _picture(run: Run) -> str | None:
    names = texts(run.asked.get("nodes"))
    per_node = number(run.asked.get("ranks_per_node"))
    degrees = numbers(run.asked.get("layout"))
    # The sizes come from the log: a picture of a million ranks would not be drawn in
    # time.
    if (
        not names
        or per_node is None
        or not 1 <= per_node <= _LARGEST_PICTURE / len(names)
    ):
        return None
    # Names of axes come from the log, too.
    try:
        layout = Layout(**{axis: int(degree) for axis, degree in degrees.items()})
    except (TypeError, ValueError):
        return None
    world, k = len(names) * int(per_node), int(per_node)
    if layout.world_size != world or min(vars(layout).values()) < 1:
        return None
    # Ranks are numbered node by node, as the topology has them.
    nodes = tuple(tuple(range(first, first + k)) for first in range(0, world, k))
    return svg_picture(Topology(nodes, tuple(names)), layout)


def _progress(runs: Sequence[Run], charts: Charts) -> Section:
    """Return loss, throughput, and all figures of the reports."""
    drawn = []
    for name in ("loss", "tokens_per_second", "samples_per_second", "seconds_step"):
        series = {
            run.name if len(runs) == 2 else name: run.figures.get(name, [])
            for run in runs
        }
        # Tokens per second tell the same better; samples are drawn where there are
        # none.
        is_second_rate = name == "samples_per_second" and any(
            "tokens_per_second" in run.figures for run in runs
        )
        if any(series.values()) and not is_second_rate:
            drawn.append(charts.lines(series, FIGURES[name]))
    table = _table("figures", [run.figures for run in runs], runs)
    return Section("Loss and throughput", [table], drawn)


def _logged(runs: Sequence[Run], charts: Charts) -> Section:
    """Return what the user's code logged: losses and metrics of validations, for
    example."""
    # In the order in which they first appear in either run.
    names = list(dict.fromkeys(name for run in runs for name in run.logged))
    drawn = []
    for name in names[:_MOST_DRAWN]:
        series = {
            run.name if len(runs) == 2 else name: run.logged.get(name, [])
            for run in runs
        }
        drawn.append(charts.lines(series, name))
    note = f"The first {_MOST_DRAWN} are drawn." if len(names) > _MOST_DRAWN else ""
    table = _table("logged", [run.logged for run in runs], runs)
    return Section("What the training code logged", [table], drawn, note=note)


def _table(
    key: str, series: Sequence[Mapping[str, Points]], runs: Sequence[Run]
) -> Table:
    """Return the table of numbers over the steps of one run, or of two beside one
    another."""
    there = dict.fromkeys(name for by_name in series for name in by_name)
    # Known figures in the order of the table above, then all others.
    ordered = [name for name in FIGURES if name in there]
    ordered += [name for name in there if name not in FIGURES]
    if len(runs) == 1:
        heads = ["figure", "first", "median", "lowest", "highest", "last"]
        rows = [
            (FIGURES.get(name, name), _summary(name, series[0][name]))
            for name in ordered
        ]
        return Table(key, heads, rows[:_MOST_ROWS])
    rows = []
    # Two runs: one number of each, and the difference between them.
    for name in ordered:
        word, sides = _compared(name, [by_name.get(name, ()) for by_name in series])
        difference = None
        both = [side.value for side in sides if isinstance(side, Cell)]
        # Nothing can be said about a difference to 0.
        if len(both) == 2 and both[0] != 0:
            difference = f"{both[1] / both[0] - 1:+.1%}"
        words = FIGURES.get(name, name)
        if word != "median":
            words = f"{words}, {word}"
        rows.append((words, [*sides, difference]))
    return Table(key, ["median of", *_names(runs), "difference"], rows[:_MOST_ROWS])


def _compared(name: str, sides: Sequence[Points]) -> tuple[str, list[Any]]:
    """Return which number of each run is compared, in a word, and the numbers."""
    values = []
    for side in sides:
        values.append([value for _, value in side])
    # A rank's number has no median; the most frequent one is the answer.
    if name.endswith("_rank"):
        return "most frequent", [
            f"{statistics.mode(each):.0f}" if each else None for each in values
        ]
    # A count since the start says nothing in its middle.
    if any(_grows_with_steps(name, side) for side in sides):
        return "last", [Cell(each[-1]) if each else None for each in values]
    return "median", [
        Cell(statistics.median(each)) if each else None for each in values
    ]


def _grows_with_steps(name: str, points: Points) -> bool:
    """Return whether numbers count from the start of the run, so that one in the middle
    says nothing about it."""
    if name in _COUNTS:
        return True
    values = [value for _, value in points]
    (first_step, first), (last_step, last) = (
        (points[0], points[-1]) if points else ((0, 0.0), (0, 0.0))
    )
    # Too few reports to tell a count from a figure that grows.
    if first_step <= 0 or first <= 0 or last_step < 2 * first_step:
        return False
    # It never falls, and grows about as the steps do.
    grows = all(before <= after for before, after in itertools.pairwise(values))
    return grows and 0.5 <= (last / first) / (last_step / first_step) <= 2


def _summary(name: str, points: Points) -> list[Any]:
    values = [value for _, value in points]
    # A count since the start, or a rank's number, has no median.
    between: list[Any] = [None, None, None]
    if not name.endswith("_rank") and not _grows_with_steps(name, points):
        between = [
            Cell(statistics.median(values)),
            Cell(min(values)),
            Cell(max(values)),
        ]
    return [Cell(values[0]), *between, Cell(values[-1])]


def _parts(run: Run, charts: Charts) -> Section:
    """Return the last measured steps of each rank, by part."""
    ranks: dict[str, dict[str, float]] = {}
    for rank, seconds in run.last("seconds_by_rank").items():
        # Every rank's seconds have to be numbers, one for each part.
        values = (
            [number(value) for value in seconds] if isinstance(seconds, list) else []
        )
        if len(values) == len(PARTS) and None not in values:
            ranks[f"rank {rank}"] = dict(zip(PARTS, values, strict=True))  # type: ignore[arg-type]
    steps = run.figures.get("seconds_step", [])
    for parts in ranks.values() if steps else ():
        # What is left of the step is waiting, and never below 0.
        parts["waiting"] = max(steps[-1][1] - sum(parts.values()), 0.0)
    rows = []
    for rank, parts in ranks.items():
        rows.append((rank, [Cell(parts[part]) for part in PARTS]))
    drawn = [charts.bars(ranks, "seconds of a step")] if ranks else []
    note = "Of the last report, on average over its steps; waiting is the rest of the step."
    table = Table("ranks", ["rank", *PARTS], rows)
    return Section("A step by part and rank", [table], drawn, note=note)


def _bytes(run: Run, charts: Charts) -> Section:
    """Return the bytes that rank 0 sent in the last step, and the formulas'."""
    sent = numbers(run.last("sent"))
    planned = numbers(run.asked.get("planned_sent"))
    # Bytes are stored under names with collective and link.
    kinds = [
        name.removesuffix("_bytes")
        for name in sent
        if "/" in name and name.endswith("_bytes")
    ]
    rows = []
    for kind in dict.fromkeys([*kinds, *planned]):
        counted = sent.get(f"{kind}_bytes")
        expected = planned.get(kind)
        seconds = sent.get(f"{kind}_seconds")
        # A collective that sent nothing and should not have is left out.
        if counted or expected:
            cells = [
                None if value is None else Cell(value)
                for value in (counted, expected, seconds)
            ]
            rows.append((kind, cells))
    heads = ["collective/link", "bytes sent", "by formula", "seconds in it"]
    note = (
        "Rank 0, the last step before the last report. intra: inside a node, inter: to another one. The formulas "
        "know no compression, tensor or context ranks; small sums of norms and flags have none."
    )
    table = Table("sent", heads, rows)
    return Section("Bytes by collective and link", [table], note=note)


def _memory(run: Run, charts: Charts) -> Section:
    """Return the parts of the peaks, beside the plan's."""
    planned = numbers(run.asked.get("planned_memory"))
    peaks = {step: numbers(line.get("device")) for step, line in run.memory.items()}
    # The step with the largest sum is the peak of the run.
    highest = max(peaks.values(), key=lambda kinds: sum(kinds.values()), default={})
    rows = []
    for kind in dict.fromkeys([*highest, *planned]):
        values = (highest.get(kind), planned.get(kind))
        cells = [None if value is None else Cell(value / _MIB) for value in values]
        rows.append((kind, cells))
    # One line for each kind, through all watched steps.
    kinds: dict[str, list[tuple[int, float]]] = {}
    for kind in highest:
        kinds[kind] = [
            (step, peak.get(kind, 0.0) / _MIB) for step, peak in peaks.items()
        ]
    drawn = [charts.lines(kinds, "MiB at the peak")] if kinds else []
    note = f"Of the watched step with the highest peak, the most of any rank. Planned: {_optimizer(run)}"
    if not peaks:
        note = f"SmpMonitor(memory_every_n_steps=...) measures it. Planned: {_optimizer(run)}"
    table = Table("memory", ["kind", "MiB at the highest peak", "planned"], rows)
    return Section("Memory by kind", [table], drawn, note=note)


def _optimizer(run: Run) -> str:
    return str(run.asked.get("planned_optimizer") or "not known") + "."


def _saves(run: Run, charts: Charts) -> Section:
    rows = []
    # The last saves: earlier ones are alike.
    for line in run.checkpoints[-_MOST_ROWS:]:
        stalls = [number(line.get(name)) for name in ("stall_seconds", *STALLS)]
        cells: list[Any] = [None if stall is None else Cell(stall) for stall in stalls]
        cells += [
            "behind training" if line.get("behind") else "waited for",
            str(line.get("path")),
        ]
        rows.append((f"step {number(line.get('step')) or 0:,.0f}", cells))
    waited = ("seconds that training waited", *STALLS.values())
    table = Table("saves", ["save", *waited, "written", "to"], rows)
    return Section("Checkpoints", [table])


def _fp8(run: Run, charts: Charts) -> Section:
    """Return the modules whose numbers fit FP8 worst."""
    rows: list[tuple[str, list[Any]]] = []
    over_time: dict[str, list[tuple[int, float]]] = {}
    for figure in (
        "input_saturated",
        "input_flushed",
        "gradient_saturated",
        "gradient_flushed",
    ):
        words = figure.replace("_", " ")
        # The worst module of each probed step, and each module's worst step.
        worst: dict[str, float] = {}
        points = over_time.setdefault(words, [])
        for step, line in run.fp8.items():
            modules = line.get("modules")
            of_step = {
                str(name): numbers(figures).get(figure, 0.0)
                for name, figures in _items(modules)
            }
            points.append((step, max(of_step.values(), default=0.0)))
            worst = {
                name: max(worst.get(name, 0.0), of_step.get(name, 0.0))
                for name in {**worst, **of_step}
            }
        # Three modules are enough to begin with.
        largest = sorted(worst.items(), key=lambda pair: -pair[1])[:3]
        rows += [(words, [module, Cell(value)]) for module, value in largest]
    heads = ["share of elements", "module", "largest in any probed step"]
    unit = "share, the worst module's"
    drawn = [charts.lines(over_time, unit)] if run.fp8 else []
    table = Table("fp8", heads, rows)
    return Section("FP8: the modules that fit worst", [table], drawn)


def _routers(run: Run, charts: Charts) -> Section:
    """Return the routers that use their experts least evenly."""
    last = {
        str(name): numbers(figures) for name, figures in _items(run.last("routers"))
    }
    # The busiest expert over the mean: 1 is even.
    uneven = sorted(last, key=lambda name: -last[name].get("busiest", 0.0))[
        :_MOST_ROUTERS
    ]
    rows = []
    for name in uneven:
        figures = [last[name].get(figure, 0.0) for figure in ("busiest", "idle")]
        rows.append((name, [*map(Cell, figures)]))
    heads = [
        "router",
        "busiest expert over the mean",
        "share of experts without a token",
    ]
    drawn = []
    for name in ("expert_load", "idle_experts") if rows else ():
        drawn.append(charts.lines({name: run.figures.get(name, [])}, FIGURES[name]))
    note = "Of the last report: tokens of all ranks. 1 over the mean is an even load."
    return Section(
        "Routers that use their experts least evenly",
        [Table("routers", heads, rows)],
        drawn,
        note=note,
    )


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, Mapping) else ()


def _events(run: Run, charts: Charts) -> Section:
    # The last events; earlier ones are counted in the note.
    shown = run.events[-_MOST_ROWS:]
    rows = [
        (
            f"step {number(line.get('step')) or 0:,.0f}",
            [str(line["kind"]), str(line.get("text"))],
        )
        for line in shown
    ]
    note = (
        f"The last {_MOST_ROWS} of {len(run.events)}."
        if len(run.events) > len(shown)
        else ""
    )
    table = Table("events", ["after", "", "what was said"], rows)
    return Section("Warnings, and ranks that waited", [table], note=note)


def _names(runs: Sequence[Run]) -> list[str]:
    return [run.name for run in runs]

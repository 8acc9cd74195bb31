"""Charts as SVG that stands in a page: drawn by matplotlib, in colours that the page
chooses for light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from smp_core.outside import how_to_install

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

# Points of a line that are drawn: more than a screen has columns.
_MOST_POINTS = 800
# Colours that stand for what the page's style sheet says.
_TEXT, _GRID = "#010203", "#010204"
_SERIES = tuple(f"#0102{number:02x}" for number in range(0x10, 0x18))
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "smp",
    "text.parse_math": False,  # names in a log are no formulas
    "font.size": 9,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _TEXT
    ),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), _GRID),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "axes.grid": True,
    "axes.axisbelow": True,
    "path.simplify_threshold": 0.5,
}
_WIDTH, _HEIGHT = 4.8, 2.5  # inches, which are wide enough for a phone


def thinned(points: Points, most: int = _MOST_POINTS) -> Points:
    """Return at most so many points, with the lowest and the highest of each stretch of
    those that were there."""
    # Fewer points than pixels: nothing is lost by drawing all.
    if len(points) <= most:
        return points
    stretches = most // 2
    kept: list[tuple[float, float]] = []
    # Of each stretch the two points that a line would reach furthest.
    for number in range(stretches):
        stretch = points[
            number * len(points) // stretches : (number + 1) * len(points) // stretches
        ]
        ends = {
            min(stretch, key=lambda point: point[1]),
            max(stretch, key=lambda point: point[1]),
        }
        # In order of their steps, so the line does not turn back.
        kept += sorted(ends)
    return kept


class Charts:
    """The charts of one page. Each is SVG that may stand in HTML as it is: matplotlib
    escapes all names.

    Raises:
        ValueError: matplotlib is not installed.
    """

    def __init__(self) -> None:
        try:
            import matplotlib
        except ImportError:
            raise ValueError(
                f"matplotlib draws the charts and is not installed; {how_to_install('matplotlib')}"
            ) from None
        self._matplotlib = matplotlib
        self._drawn = 0

    def lines(self, series: Mapping[str, Points], unit: str) -> str:
        """Draw a line over optimizer steps for each series."""
        with self._figure(_HEIGHT) as (figure, written):
            axes = figure.add_subplot()
            for colour, (label, points) in zip(_cycle(), series.items(), strict=False):
                shown = thinned(points)
                # One point needs a marker: a line through it would be invisible.
                marker = "o" if len(shown) == 1 else None
                x, y = zip(*shown, strict=True) if shown else ((), ())
                axes.plot(
                    x,
                    y,
                    label=_short(label),
                    color=colour,
                    linewidth=1.0,
                    marker=marker,
                )
            axes.set_xlabel("optimizer step")
            axes.set_ylabel(unit)
            # A single series is named by its axis.
            if len(series) > 1:
                figure.legend(loc="outside lower center", ncols=2)
        return written[0]

    def bars(self, rows: Mapping[str, Mapping[str, float]], unit: str) -> str:
        """Draw a bar for each row, made of parts that lie one behind the other."""
        with self._figure(0.9 + 0.24 * len(rows)) as (figure, written):
            axes = figure.add_subplot()
            places, begins = range(len(rows)), [0.0] * len(rows)
            parts = dict.fromkeys(part for row in rows.values() for part in row)
            # Parts lie behind each other: each begins where the one before ends.
            for colour, part in zip(_cycle(), parts, strict=False):
                widths = [row.get(part, 0.0) for row in rows.values()]
                axes.barh(
                    places,
                    widths,
                    left=begins,
                    label=_short(part),
                    color=colour,
                    height=0.7,
                )
                begins = [
                    begin + width for begin, width in zip(begins, widths, strict=True)
                ]
            axes.set_yticks(places, [_short(name) for name in rows])
            # The first row on top.
            axes.invert_yaxis()
            axes.grid(visible=False, axis="y")
            axes.set_xlabel(unit)
            figure.legend(loc="outside lower center", ncols=4)
        return written[0]

    @contextmanager
    def _figure(self, height: float) -> Iterator[tuple[Figure, list[str]]]:
        from matplotlib.figure import Figure

        written: list[str] = []
        # Settings for this picture alone: matplotlib has one set for the process.
        with self._matplotlib.rc_context(_STYLE):
            figure = Figure(
                figsize=(_WIDTH, height), layout="constrained", facecolor="none"
            )
            yield figure, written
            # The page's background shows through.
            for axes in figure.axes:
                axes.set_facecolor("none")
            file = io.StringIO()
            # No dates and no program's name: equal runs give equal pages.
            nothing: dict[str, Any] = dict.fromkeys(
                ("Date", "Creator", "Format", "Type")
            )
            figure.savefig(file, format="svg", metadata=nothing)
        self._drawn += 1
        written.append(_for_page(file.getvalue(), f"c{self._drawn}-"))


def _cycle() -> Iterator[str]:
    while True:
        yield from _SERIES


def _short(name: str) -> str:
    name = "".join(letter if letter.isprintable() else "?" for letter in name)
    return name if len(name) <= 40 else f"{name[:18]}...{name[-18:]}"


def _for_page(svg: str, prefix: str) -> str:
    """Return what stands in a page: without the file's head, with the page's colours
    and fonts, and with identifiers that no other chart has."""
    # From the tag on: the declaration has no place inside a page.
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Width and height come from the page, so that a chart fits a phone.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    # Identifiers are made unique, and references to them with them.
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r"(url\(#|href=\"#)", rf"\1{prefix}", svg)
    svg = re.sub(r"(font: [0-9.]+px)[^;\"]*", r"\1 system-ui, sans-serif", svg)
    # The page decides the colours, light or dark.
    svg = svg.replace(_TEXT, "currentColor").replace(_GRID, "var(--line)")
    for number, colour in enumerate(_SERIES):
        svg = svg.replace(colour, f"var(--series-{number})")
    return svg

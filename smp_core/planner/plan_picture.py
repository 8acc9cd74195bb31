"""A picture of a recommendation: memory by kind and step time by part, the chosen configuration and the next ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from smp_core.outside import how_to_install
from smp_core.plan import GIB
from smp_core.planner.candidate import Candidate
from smp_core.planner.explain import title
from smp_core.planner.planner import Recommendation, layout_words
from smp_core.planner.step_memory import MEMORY_KINDS
from smp_core.planner.time import TIME_PARTS


def draw_plans(found: Recommendation, path: str | os.PathLike[str]) -> None:
    """Draw two stacked bars for each configuration, as SVG, PNG or what else the ending of ``path`` says.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"matplotlib draws the picture and is not installed; {how_to_install('matplotlib')}") from None
    shown = [found.chosen, *found.alternatives]
    labels = [_label(each, place) for place, each in enumerate(shown)]
    figure = Figure(figsize=(11.0, 1.2 + 0.75 * len(shown)), layout="constrained")
    figure.suptitle(title(found), fontsize=9)
    memory, time = figure.subplots(1, 2, sharey=True)
    _bars(memory, labels, {kind: [getattr(each.memory, kind) / GIB for each in shown] for kind in MEMORY_KINDS})
    memory.axvline(found.chosen.memory.capacity / GIB, color="black", linestyle="--")
    memory.set_xlabel("GiB on each device; dashed: what it has")
    _bars(time, labels, {part: [getattr(each.time, part) for each in shown] for part in TIME_PARTS})
    time.set_xlabel("seconds of a step")
    figure.savefig(path)


def _bars(axes: Any, labels: Sequence[str], values: dict[str, list[float]]) -> None:
    places, begins = range(len(labels)), [0.0] * len(labels)
    for name, widths in values.items():
        if any(widths):
            axes.barh(places, widths, left=begins, label=name)
            begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    axes.set_yticks(places, labels, fontsize=7)
    axes.invert_yaxis()
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4)


def _label(candidate: Candidate, place: int) -> str:
    return (
        f"{'chosen' if place == 0 else place + 1}: {layout_words(candidate)}\n"
        f"micro-batch {candidate.micro_batch} x {candidate.count}, {candidate.recomputation}"
    )

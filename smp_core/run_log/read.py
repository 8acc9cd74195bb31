"""Run: the content of a run's log, read so that a log from elsewhere can choose what is
shown and nothing else.

A line that is no object, or of a kind that is not known, is counted and passed over; a
field of another type than the format's is taken as if it were not there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smp_core.outside import lines_of_log, number, numbers
from smp_core.run_log.write import FILE

KINDS = (
    "run",
    "step",
    "metrics",
    "memory",
    "fp8",
    "checkpoint",
    "warning",
    "waiting",
    "end",
)
# Fields of a line of kind "step" that are no figures.
_NO_FIGURES = ("kind", "time", "step", "seconds_by_rank", "sent", "routers")

Line = Mapping[str, Any]


@dataclass
class Run:
    """One run, through its restarts.

    Attributes:
        name: for people.
        asked: the line with the plan, of the last start.
        steps, memory, fp8: lines by optimizer step; where steps were trained again, the
            later line.
        metrics: what the user's code logged, numbers by name and optimizer step.
        checkpoints, events: lines in the order in which they were written; events are
            warnings, and lines about ranks that wait or were lost.
        end: the last line of the run; None: the run goes on, or was killed.
        starts: starts of the run, one more than resumptions.
        unreadable: lines that are not of this format.
    """

    name: str
    asked: Line = field(default_factory=dict)
    steps: dict[int, Line] = field(default_factory=dict)
    memory: dict[int, Line] = field(default_factory=dict)
    fp8: dict[int, Line] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    checkpoints: list[Line] = field(default_factory=list)
    events: list[Line] = field(default_factory=list)
    end: Line | None = None
    starts: int = 0
    unreadable: int = 0
    earlier: int = 0
    """Starts of other runs in the same file, before this one."""

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read the log of a run.

        Args:
            path: the file, or its folder.

        Raises:
            ValueError: no such file, or no run in it; says what to do.
        """
        # A folder of a run has its log under the usual name.
        file = path / FILE if path.is_dir() else path
        run = cls(name=path.name or str(path.resolve().name))
        writers = "SmpMonitor and SmpMonitorCallback write such a log where the Trainer logs, or where run_log= says"
        try:
            for line in lines_of_log(file):
                run._take(line)
        except ValueError as error:
            raise ValueError(f"{error}; {writers}") from None
        if not run.starts:
            raise ValueError(f"{file} holds no run; {writers}")
        run.steps = dict(sorted(run.steps.items()))
        run.memory = dict(sorted(run.memory.items()))
        run.fp8 = dict(sorted(run.fp8.items()))
        return run

    def _take(self, line: Line | None) -> None:
        step = None if line is None else number(line.get("step"))
        # Without a step, or of an unknown kind: counted, not guessed.
        if line is None or step is None or line.get("kind") not in KINDS:
            self.unreadable += 1
            return
        kind, step = line["kind"], int(step)
        if kind == "run":
            self._start(line, step)
        elif kind in ("warning", "waiting"):
            self.events.append(line)
        elif kind == "checkpoint":
            self.checkpoints.append(line)
        elif kind == "end":
            self.end = line
        elif kind == "metrics":
            # A step that was trained again after a restart replaces the earlier line.
            self.metrics.setdefault(step, {}).update(numbers(line.get("values")))
        else:
            by_step: dict[int, Line] = {
                "step": self.steps,
                "memory": self.memory,
                "fp8": self.fp8,
            }[kind]
            by_step[step] = line

    def _start(self, line: Line, step: int) -> None:
        # Step 0 is the beginning of another run in the same file: only the last one is
        # shown.
        if step == 0 and self.starts:
            unreadable, earlier = self.unreadable, self.earlier + self.starts
            self.__init__(self.name)  # type: ignore[misc]
            self.unreadable, self.earlier = unreadable, earlier
        # After a restart from a checkpoint, what lies behind it is lost and trained
        # again.
        kept: list[dict[int, Any]] = [self.steps, self.memory, self.fp8, self.metrics]
        for by_step in kept:
            for lost in [other for other in by_step if other > step]:
                del by_step[lost]
        self.asked, self.end, self.starts = line, None, self.starts + 1

    @functools.cached_property
    def figures(self) -> dict[str, list[tuple[int, float]]]:
        """The numbers of all reports by name: (step, value) in order, those that are
        not finite left out."""
        found: dict[str, list[tuple[int, float]]] = {}
        for step, line in self.steps.items():
            for name, value in line.items():
                if name not in _NO_FIGURES and (value := number(value)) is not None:
                    found.setdefault(str(name), []).append((step, value))
        return found

    @functools.cached_property
    def logged(self) -> dict[str, list[tuple[int, float]]]:
        """The numbers that the user's code logged, as :attr:`figures` has those of the
        reports."""
        found: dict[str, list[tuple[int, float]]] = {}
        for step, values in sorted(self.metrics.items()):
            for name, value in values.items():
                found.setdefault(name, []).append((step, value))
        return found

    def last(self, name: str) -> Mapping[str, Any]:
        """Return an object of the last report that has one under this name; empty if
        none has."""
        # From the last report back, since not every report has every object.
        found = (
            each[name]
            for each in reversed(self.steps.values())
            if isinstance(each.get(name), Mapping)
        )
        return next(found, {})

    @property
    def seconds(self) -> float:
        """The time from the first line of the run to its last one, in seconds."""
        lines = [
            self.asked,
            *self.steps.values(),
            *self.checkpoints,
            *self.events,
            *([self.end] if self.end else []),
        ]
        times = [
            # Lines may be out of order: the earliest and the latest time count.
            time
            for line in lines
            if (time := number(line.get("time"))) is not None
        ]
        return max(times) - min(times) if times else 0.0


def objects(value: Any) -> list[Line]:
    """Return the objects in a list; empty for anything else."""
    return (
        [item for item in value if isinstance(item, Mapping)]
        if isinstance(value, Sequence)
        else []
    )


def texts(value: Any) -> list[str]:
    """Return the texts in a list; empty for anything else."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return [item for item in value if isinstance(item, str)] if is_list else []

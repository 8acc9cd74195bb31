"""The log of a run: JSON lines in one format, which all monitors write and `smp report`
reads.

Every line is an object with ``kind`` and ``time`` (seconds since the epoch), and
``step`` where it belongs to an optimizer step; docs/monitoring.md lists the kinds and
their fields. inf and nan are null.

A monitor opens the log of its run on rank 0. Whatever has something to tell meanwhile
(a save, the watch over the ranks, warnings) calls :func:`note`, which does nothing
where no log is open.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "run.jsonl"
"""The name of a run's log in its folder."""


def append(path: Path, kind: str, /, **fields: Any) -> None:
    """Append one line to a log. A log that cannot be written ends no run: that is said
    once, and it gets no more.

    Args:
        path: the file; its folder is made where it is not there.
        kind: of the line.
        fields: in types that JSON has.
    """
    # A path that failed once would fail, and warn, at every line.
    if path in _given_up:
        return
    try:
        line = json.dumps(
            {"kind": kind, "time": round(time.time(), 3), **_finite(fields)},
            allow_nan=False,
        )
        # Lines come from several threads, and each has to stay whole.
        with _lock:
            _append_line(path, line.encode())
    except (OSError, TypeError, ValueError) as error:
        _given_up.add(path)
        logging.getLogger("smp").warning("%s is not written any more: %s", path, error)


def _append_line(path: Path, line: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        # A run that was killed, or met a full disk, may have left a part of a line.
        # Then the half line is closed, and counts as one that cannot be read.
        begun = False
        if file.seek(0, os.SEEK_END) > 0:
            file.seek(-1, os.SEEK_END)
            begun = file.read(1) != b"\n"
        file.write((b"\n" if begun else b"") + line + b"\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return (
        [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
    )


class RunLog(logging.Handler):
    """The log of one run on rank 0, and of the warnings of torch-smp while it is open.

    Attributes:
        path: the file.
        step: optimizer steps that were taken; goes with lines that have no step of
            their own.
    """

    def __init__(self, path: Path, step: int) -> None:
        super().__init__(logging.WARNING)
        self.path, self.step = path, step

    def emit(self, record: logging.LogRecord) -> None:
        """Append a warning."""
        self.append("warning", text=record.getMessage())

    def append(self, kind: str, /, **fields: Any) -> None:
        """Append a line."""
        append(self.path, kind, **{"step": self.step, **fields})


_lock = threading.Lock()
_given_up: set[Path] = set()
_open: RunLog | None = None


def start(path: Path, step: int) -> RunLog:
    """Open the log of a run, in the place of one that an earlier run may have left
    open."""
    global _open
    # Warnings go to the newest log only.
    close(_open)
    _given_up.discard(path)
    _open = RunLog(path, step)
    logging.getLogger("smp").addHandler(_open)
    return _open


def close(log: RunLog | None) -> None:
    """Close a log; nothing happens if it is not open."""
    global _open
    if log is not None and log is _open:
        logging.getLogger("smp").removeHandler(log)
        _open = None


def note(kind: str, /, **fields: Any) -> None:
    """Append a line to the log that is open in this process, if there is one."""
    if _open is not None:
        _open.append(kind, **fields)

"""Ranks that are killed, stopped or cut off: at once, or when they come to a place in a
save, a load or a report."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from typing import Any

import smp_core.checkpoint.folders.local_folder as local_folder
import smp_core.checkpoint.folders.storage as storage
from smp_core.watch.rank_watch import RankWatch

# Where a rank is in a save, a load and a report: while a file is closed, while tensors
# are read, and before it looks.
PLACES: dict[str, tuple[Any, str]] = {
    "save": (storage.Sink, "close"),
    "load": (local_folder._LocalRangeFile, "read_into"),
    "report": (RankWatch, "report"),
}


def strike(what: str) -> None:
    """Kill or stop this process ("kill", "stop"), or end all its connections while it
    lives on ("cut")."""
    if what == "cut":
        cut_off()
    else:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])


def strike_in(place: str, what: str) -> None:
    """Let this process be struck when it comes to a place of ``PLACES`` for the first
    time."""
    owner, name = PLACES[place]
    method = getattr(owner, name)

    def struck(*arguments: Any, **keywords: Any) -> Any:
        setattr(owner, name, method)
        strike(what)
        return method(*arguments, **keywords)

    setattr(owner, name, struck)


def cut_off() -> None:
    """End all TCP connections of this process, as a switch does that restarts."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.shutdown(socket.SHUT_RDWR)

"""The end of a run that loses processes, and a watch over the files that the next one
opens."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from smp_core.checkpoint.memory.slots import SharedSlots

COPY = SharedSlots.copy_rest


class Lost(Exception):
    pass


class Watch:
    """The paths below a folder that this process opens; an audit hook stays until the
    process ends."""

    def __init__(self, folder: Path) -> None:
        self.below = f"{folder}/"
        self.opened: list[str] = []
        self.is_on = True
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event == "open" and str(arguments[0]).startswith(self.below):
            self.opened.append(str(arguments[0]))


def copy_slowly(slots: SharedSlots) -> list[str]:
    """Begin when the next step would have changed the weights, if nobody waited."""
    time.sleep(0.2)
    return COPY(slots)

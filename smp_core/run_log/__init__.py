"""The log of a run: JSON lines of one format, written by all monitors, read as a stranger's data.

write appends a line and keeps the file whole; read makes a Run of what a log says. Nothing here imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.run_log.read import Run, objects, texts
    from smp_core.run_log.write import FILE, append, note

_PLACES = {
    "append": "write",
    "FILE": "write",
    "note": "write",
    "objects": "read",
    "Run": "read",
    "texts": "read",
}

__all__ = [
    "append",
    "FILE",
    "note",
    "objects",
    "Run",
    "texts",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

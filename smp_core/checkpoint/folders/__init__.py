"""Folders that checkpoints are written to: one interface, POSIX folders and object stores.

A transaction of storage stages files and commits them at once: by a rename (local_folder) or by a manifest that is
written last (object_folder). addresses chooses by the path; leftovers removes what interrupted saves leave.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.checkpoint.folders.addresses import is_address, local_path

_PLACES = {
    "is_address": "addresses",
    "local_path": "addresses",
}

__all__ = [
    "is_address",
    "local_path",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

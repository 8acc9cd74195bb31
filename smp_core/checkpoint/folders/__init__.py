"""Folders that checkpoints are written to: one interface, POSIX folders and object
stores.

A transaction of storage stages files and commits them at once: by a rename
(local_folder) or by a manifest that is written last (object_folder). addresses chooses
by the path; leftovers removes what interrupted saves leave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.checkpoint.folders.addresses import (
        is_address as is_address,
        local_path as local_path,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)

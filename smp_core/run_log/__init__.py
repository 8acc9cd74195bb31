"""The log of a run: JSON lines of one format, written by all monitors, read as a
stranger's data.

write appends a line and keeps the file whole; read makes a Run of what a log says.
Nothing here imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.run_log.read import Run as Run, objects as objects, texts as texts
    from smp_core.run_log.write import FILE as FILE, append as append, note as note
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)

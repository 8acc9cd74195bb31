"""A user's own training, in one process and at layouts of several ranks: whether they give the same numbers.

`smp verify` (commands) asks verify for a report. It starts the script in child processes (runs, child), as the ranks of
a layout (layouts) and as one process without torch-smp that trains on the batches those ranks read (batches). The faces
tell a Recorder what happens; it writes a record. compare finds the first difference beyond what its dtype allows
(tolerance), down to the module (activations); causes says what makes such differences; report is the table.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.verify.batches import sample_hashes
    from smp_core.verify.layouts import tell_degrees
    from smp_core.verify.recorder import Recorder, refuse
    from smp_core.verify.report import Report
    from smp_core.verify.request import Request, requested
    from smp_core.verify.verify import read_record, verify_call, verify_command

_PLACES = {
    "read_record": "verify",
    "Recorder": "recorder",
    "refuse": "recorder",
    "Report": "report",
    "Request": "request",
    "requested": "request",
    "sample_hashes": "batches",
    "tell_degrees": "layouts",
    "verify_call": "verify",
    "verify_command": "verify",
}

__all__ = [
    "read_record",
    "Recorder",
    "refuse",
    "Report",
    "Request",
    "requested",
    "sample_hashes",
    "tell_degrees",
    "verify_call",
    "verify_command",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

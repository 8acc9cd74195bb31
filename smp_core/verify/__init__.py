"""A user's own training, in one process and at layouts of several ranks: whether they
give the same numbers.

`smp verify` (commands) asks verify for a report. It starts the script in child
processes (runs, child), as the ranks of a layout (layouts) and as one process without
torch-smp that trains on the batches those ranks read (batches). The faces tell a
Recorder what happens; it writes a record. compare finds the first difference beyond
what its dtype allows (tolerance), down to the module (activations); causes says what
makes such differences; report is the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.verify.batches import (
        natural_samples as natural_samples,
        sample_hashes as sample_hashes,
    )
    from smp_core.verify.layouts import tell_degrees as tell_degrees
    from smp_core.verify.recorder import Recorder as Recorder, refuse as refuse
    from smp_core.verify.report import Report as Report
    from smp_core.verify.request import Request as Request, requested as requested
    from smp_core.verify.verify import (
        read_record as read_record,
        verify_call as verify_call,
        verify_command as verify_command,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)

"""Figures of a run: rates and bytes of the whole job, memory by kind, seconds by part
of a step, router loads.

The monitors of both faces build on JobFigures (job_figures), MemoryWatch (memory_watch)
and RunRecord (run_record), which writes the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.observe.job_figures import (
        BYTES as BYTES,
        DrawsTimeline as DrawsTimeline,
        JobFigures as JobFigures,
        check_peak as check_peak,
    )
    from smp_core.observe.memory_log import KINDS as KINDS
    from smp_core.observe.memory_report import MemoryReport as MemoryReport
    from smp_core.observe.memory_watch import WatchesMemory as WatchesMemory
    from smp_core.observe.run_record import RunRecord as RunRecord
    from smp_core.observe.step_times import PARTS as PARTS
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)

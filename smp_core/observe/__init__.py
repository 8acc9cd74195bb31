"""Figures of a run: rates and bytes of the whole job, memory by kind, seconds by part of a step, router loads.

The monitors of both faces build on JobFigures (job_figures), MemoryWatch (memory_watch) and RunRecord (run_record),
which writes the log.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.observe.job_figures import BYTES, DrawsTimeline, JobFigures, check_peak
    from smp_core.observe.memory_log import KINDS
    from smp_core.observe.memory_report import MemoryReport
    from smp_core.observe.memory_watch import WatchesMemory
    from smp_core.observe.monitoring import FlopMeasurement, StepMeter, count_model_flops
    from smp_core.observe.run_record import RunRecord
    from smp_core.observe.step_times import PARTS

_PLACES = {
    "BYTES": "job_figures",
    "check_peak": "job_figures",
    "count_model_flops": "monitoring",
    "DrawsTimeline": "job_figures",
    "FlopMeasurement": "monitoring",
    "JobFigures": "job_figures",
    "KINDS": "memory_log",
    "MemoryReport": "memory_report",
    "PARTS": "step_times",
    "RunRecord": "run_record",
    "StepMeter": "monitoring",
    "WatchesMemory": "memory_watch",
}

__all__ = [
    "BYTES",
    "check_peak",
    "count_model_flops",
    "DrawsTimeline",
    "FlopMeasurement",
    "JobFigures",
    "KINDS",
    "MemoryReport",
    "PARTS",
    "RunRecord",
    "StepMeter",
    "WatchesMemory",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

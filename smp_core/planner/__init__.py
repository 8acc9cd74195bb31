"""The planner: from a model, machines and a batch to a configuration, and what would fit if nothing does.

``plan()`` traces one block of the model without values (trace), looks at every configuration of the open knobs that
``decide`` accepts (search), predicts the memory (step_memory) and the time (time, stage_time) of a step of each, and
ranks those that fit. Machines come from tables with sources (devices, hardware), constants from fits (fitted), which
`smp plan --calibrate` refits on the log of a run. A run with ``plan="auto"`` comes here once, by way of
smp_core/entry.py; nothing below knows this folder, so it can be cut off.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.planner.auto_plan import RunningStep, plan_run
    from smp_core.planner.devices import peak_flops
    from smp_core.planner.dry_run import RUN_KINDS, DryRun, Question
    from smp_core.planner.model_source import Source, build, copied
    from smp_core.planner.model_trace import Instants, ModelTrace, SplitRun, SplitTrace, between
    from smp_core.planner.next_run import knobs_of_next_run
    from smp_core.planner.planner import NothingFits, Recommendation, plan
    from smp_core.planner.trace import scores_kept
    from smp_core.planner.workload import Workload

_PLACES = {
    "between": "model_trace",
    "build": "model_source",
    "copied": "model_source",
    "DryRun": "dry_run",
    "Instants": "model_trace",
    "knobs_of_next_run": "next_run",
    "ModelTrace": "model_trace",
    "NothingFits": "planner",
    "peak_flops": "devices",
    "plan": "planner",
    "plan_run": "auto_plan",
    "Question": "dry_run",
    "Recommendation": "planner",
    "RUN_KINDS": "dry_run",
    "RunningStep": "auto_plan",
    "scores_kept": "trace",
    "Source": "model_source",
    "SplitRun": "model_trace",
    "SplitTrace": "model_trace",
    "Workload": "workload",
}

__all__ = [
    "between",
    "build",
    "copied",
    "DryRun",
    "Instants",
    "knobs_of_next_run",
    "ModelTrace",
    "NothingFits",
    "peak_flops",
    "plan",
    "plan_run",
    "Question",
    "Recommendation",
    "RUN_KINDS",
    "RunningStep",
    "scores_kept",
    "Source",
    "SplitRun",
    "SplitTrace",
    "Workload",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

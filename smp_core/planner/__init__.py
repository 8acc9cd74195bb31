"""The planner: from a model, machines and a batch to a configuration, and what would
fit if nothing does.

``plan()`` traces one block of the model without values (trace), looks at every
configuration of the open knobs that ``decide`` accepts (search), predicts the memory
(step_memory) and the time (time, stage_time) of a step of each, and ranks those that
fit. Machines come from tables with sources (devices, hardware), constants from fits
(fitted), which `smp plan --calibrate` refits on the log of a run. A run with
``plan="auto"`` comes here once, by way of smp_core/entry.py; nothing below knows this
folder, so it can be cut off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.planner.auto_plan import (
        RunningStep as RunningStep,
        plan_run as plan_run,
    )
    from smp_core.planner.devices import peak_flops as peak_flops
    from smp_core.planner.dry_run import (
        RUN_KINDS as RUN_KINDS,
        DryRun as DryRun,
        Question as Question,
    )
    from smp_core.planner.model_source import (
        Source as Source,
        build as build,
        copied as copied,
    )
    from smp_core.planner.model_trace import (
        Instants as Instants,
        ModelTrace as ModelTrace,
        SplitRun as SplitRun,
        SplitTrace as SplitTrace,
        between as between,
    )
    from smp_core.planner.planner import (
        NothingFits as NothingFits,
        Recommendation as Recommendation,
        plan as plan,
    )
    from smp_core.planner.trace import scores_kept as scores_kept
    from smp_core.planner.workload import Workload as Workload
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)

"""Planning: decisions about a model and a run, made before anything is changed.

What is offered here is imported when it is asked for; it needs torch, and parts of this package do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.planner.planner import NothingFits, Recommendation, plan
    from smp_core.planner.workload import Workload

__all__ = ["NothingFits", "Recommendation", "Workload", "plan"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from smp_core.planner import planner, workload

    return getattr(workload if name == "Workload" else planner, name)

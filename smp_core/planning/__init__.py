"""Planning: decisions about a model and a run, made before anything is changed."""

from smp_core.planning.planner import NothingFits, Recommendation, plan
from smp_core.planning.workload import Workload

__all__ = ["NothingFits", "Recommendation", "Workload", "plan"]

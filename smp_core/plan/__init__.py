"""What was decided, as data: no process group, no module, no collective.

A Draft of the knobs becomes a Plan, which knows the model (Shapes: units, towers, parameters), the machines (Cluster),
the blocks in their order (chain/), stages, dtypes, what is recomputed and the memory that all of this takes
(memory). The engine makes plans, subjects do their part of them, the planner compares them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.plan.checkpointed import CheckpointedModule
    from smp_core.plan.cluster import GIB, Cluster
    from smp_core.plan.draft import Draft, ModelDraft
    from smp_core.plan.dtypes import HALF, Dtypes, Precision, dtype_of, name_of
    from smp_core.plan.examples import Example, example_of
    from smp_core.plan.kept_operators import is_kept, keep_outputs_of
    from smp_core.plan.memory import (
        GradientBytes,
        MemoryEstimate,
        describe_stages,
        device_memory,
        estimate,
        fitting,
        gradient_bytes,
        plan_table,
        unit_bytes,
    )
    from smp_core.plan.optimizers import OPTIMIZERS, OptimizerStates, planned_states
    from smp_core.plan.picture import svg_picture, text_picture
    from smp_core.plan.plan import TRAINERS_OWN, ActivationPlan, GivenSharding, Plan, keeps_parameters
    from smp_core.plan.routes import compression, head_groups, replicas_share_nodes, two_stages
    from smp_core.plan.schedules import Step, blocks_kept, chunks_of, computations, forward_only, with_messages
    from smp_core.plan.shapes import Shapes
    from smp_core.plan.stages import Stages
    from smp_core.plan.subject import Finding, Subject, asked_for, came_sharded
    from smp_core.plan.units import Entry, PlannedUnit, WrapPlan, units_with

_PLACES = {
    "ActivationPlan": "plan",
    "asked_for": "subject",
    "blocks_kept": "schedules",
    "came_sharded": "subject",
    "CheckpointedModule": "checkpointed",
    "chunks_of": "schedules",
    "Cluster": "cluster",
    "compression": "routes",
    "computations": "schedules",
    "describe_stages": "memory",
    "device_memory": "memory",
    "Draft": "draft",
    "dtype_of": "dtypes",
    "Dtypes": "dtypes",
    "Entry": "units",
    "estimate": "memory",
    "Example": "examples",
    "example_of": "examples",
    "Finding": "subject",
    "fitting": "memory",
    "forward_only": "schedules",
    "GIB": "cluster",
    "GivenSharding": "plan",
    "gradient_bytes": "memory",
    "GradientBytes": "memory",
    "HALF": "dtypes",
    "head_groups": "routes",
    "is_kept": "kept_operators",
    "keep_outputs_of": "kept_operators",
    "keeps_parameters": "plan",
    "MemoryEstimate": "memory",
    "ModelDraft": "draft",
    "name_of": "dtypes",
    "OPTIMIZERS": "optimizers",
    "OptimizerStates": "optimizers",
    "Plan": "plan",
    "plan_table": "memory",
    "planned_states": "optimizers",
    "PlannedUnit": "units",
    "Precision": "dtypes",
    "replicas_share_nodes": "routes",
    "Shapes": "shapes",
    "Stages": "stages",
    "Step": "schedules",
    "Subject": "subject",
    "svg_picture": "picture",
    "text_picture": "picture",
    "TRAINERS_OWN": "plan",
    "two_stages": "routes",
    "unit_bytes": "memory",
    "units_with": "units",
    "with_messages": "schedules",
    "WrapPlan": "units",
}

__all__ = [
    "ActivationPlan",
    "asked_for",
    "blocks_kept",
    "came_sharded",
    "CheckpointedModule",
    "chunks_of",
    "Cluster",
    "compression",
    "computations",
    "describe_stages",
    "device_memory",
    "Draft",
    "dtype_of",
    "Dtypes",
    "Entry",
    "estimate",
    "Example",
    "example_of",
    "Finding",
    "fitting",
    "forward_only",
    "GIB",
    "GivenSharding",
    "gradient_bytes",
    "GradientBytes",
    "HALF",
    "head_groups",
    "is_kept",
    "keep_outputs_of",
    "keeps_parameters",
    "MemoryEstimate",
    "ModelDraft",
    "name_of",
    "OPTIMIZERS",
    "OptimizerStates",
    "Plan",
    "plan_table",
    "planned_states",
    "PlannedUnit",
    "Precision",
    "replicas_share_nodes",
    "Shapes",
    "Stages",
    "Step",
    "Subject",
    "svg_picture",
    "text_picture",
    "TRAINERS_OWN",
    "two_stages",
    "unit_bytes",
    "units_with",
    "with_messages",
    "WrapPlan",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

"""What was decided, as data: no process group, no module, no collective.

A Draft of the knobs becomes a Plan, which knows the model (Shapes: units, towers,
parameters), the machines (Cluster), the blocks in their order (chain/), stages, dtypes,
what is recomputed and the memory that all of this takes (memory). The engine makes
plans, subjects do their part of them, the planner compares them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.plan.checkpointed import CheckpointedModule as CheckpointedModule
    from smp_core.plan.communicator_count import communicators as communicators
    from smp_core.plan.examples import (
        Example as Example,
        call_with as call_with,
        example_of as example_of,
    )
    from smp_core.plan.experts import (
        DEALT as DEALT,
        DROPPED as DROPPED,
        LOSS as LOSS,
        ExpertShape as ExpertShape,
        ExpertSite as ExpertSite,
        RouterLoss as RouterLoss,
        adapters_of as adapters_of,
        experts_of as experts_of,
        loss_over_stages as loss_over_stages,
        router_losses as router_losses,
        without_router_loss as without_router_loss,
    )
    from smp_core.plan.kept_operators import (
        is_kept as is_kept,
        keep_outputs_of as keep_outputs_of,
    )
    from smp_core.plan.memory import (
        GradientBytes as GradientBytes,
        MemoryEstimate as MemoryEstimate,
        describe_stages as describe_stages,
        device_memory as device_memory,
        estimate as estimate,
        fitting as fitting,
        gradient_bytes as gradient_bytes,
        plan_table as plan_table,
        unit_bytes as unit_bytes,
    )
    from smp_core.plan.optimizers import (
        OPTIMIZERS as OPTIMIZERS,
        OptimizerStates as OptimizerStates,
        planned_states as planned_states,
    )
    from smp_core.plan.picture import (
        svg_picture as svg_picture,
        text_picture as text_picture,
    )
    from smp_core.plan.plan import (
        FOREIGN_FP8 as FOREIGN_FP8,
        HALF as HALF,
        SYMMETRIC_MEMORY as SYMMETRIC_MEMORY,
        TRAINERS_OWN as TRAINERS_OWN,
        ActivationPlan as ActivationPlan,
        Draft as Draft,
        Dtypes as Dtypes,
        Finding as Finding,
        GivenSharding as GivenSharding,
        ModelDraft as ModelDraft,
        Plan as Plan,
        Precision as Precision,
        Subject as Subject,
        asked_for as asked_for,
        came_sharded as came_sharded,
        dtype_of as dtype_of,
        keeps_parameters as keeps_parameters,
        name_of as name_of,
    )
    from smp_core.plan.routes import (
        compression as compression,
        head_groups as head_groups,
    )
    from smp_core.plan.schedules import (
        Step as Step,
        blocks_kept as blocks_kept,
        chunks_of as chunks_of,
        computations as computations,
        forward_only as forward_only,
        with_messages as with_messages,
    )
    from smp_core.plan.shapes import (
        GIB as GIB,
        Cluster as Cluster,
        ParameterShape as ParameterShape,
        Shapes as Shapes,
    )
    from smp_core.plan.stages import Stages as Stages
    from smp_core.plan.units import (
        Entry as Entry,
        PlannedUnit as PlannedUnit,
        WrapPlan as WrapPlan,
        units_with as units_with,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)

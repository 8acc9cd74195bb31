"""The context parallelism of one model on one mesh."""

from __future__ import annotations

from torch import nn

from smp_core.cluster import Axis, SmpMesh
from smp_core.comm import CommMeter
from smp_core.context_parallel.batch import ContextParallel
from smp_core.context_parallel.key_value_exchange import register_group
from smp_core.context_parallel.transformers_models import adapt_transformers_models
from smp_core.context_parallel.trial import Trial
from smp_core.plan import Plan


def share_sequences(model: nn.Module, mesh: SmpMesh, plan: Plan, meter: CommMeter) -> ContextParallel:
    """Make the model's attention one over the context ranks, in place.

    Returns:
        the splitter of batches.

    Raises:
        ValueError: a Transformers model that would be wrong (see :mod:`smp_core.context_parallel.transformers_models`).
    """
    adapt_transformers_models(model)
    head_groups = int(plan.knobs.collectives.context_head_groups)
    group = register_group(mesh.group(Axis.CONTEXT), head_groups=head_groups, meter=meter)
    coarse = plan.knobs.fp8 is not None or plan.knobs.compression.gather is not None
    trial = Trial(model, group, mesh.world_group, coarse=coarse, in_stages=plan.stages is not None)
    return ContextParallel(group, mesh.world_group, trial)

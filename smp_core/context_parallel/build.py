"""Context parallelism of one model on one mesh."""

from __future__ import annotations

from torch import nn

from smp_core.comm.meter import CommMeter
from smp_core.config import SmpConfig
from smp_core.context_parallel.batch import ContextParallel
from smp_core.context_parallel.traffic import register_group
from smp_core.context_parallel.transformers_models import adapt_transformers_models
from smp_core.mesh import SmpMesh


def build_context_parallel(
    model: nn.Module, mesh: SmpMesh, config: SmpConfig, meter: CommMeter
) -> tuple[SmpConfig, ContextParallel | None]:
    """Make the model's attention one over context ranks, in place; None where every rank has whole sequences.

    Returns:
        the config with what took effect, and what splits batches.

    Raises:
        ValueError: a Transformers model that would be wrong (see :mod:`smp_core.context_parallel.transformers_models`).
    """
    if config.context_head_groups == "auto":
        on_cpu = mesh.device.type == "cpu"
        why = "on CPU nothing runs behind anything" if on_cpu else "one group's gather behind the other's attention"
        config = config.with_resolved("context_head_groups", 1 if on_cpu else 2, why)
    if mesh.context_degree == 1:
        return config, None
    adapt_transformers_models(model)
    group = register_group(mesh.context_group, head_groups=int(config.context_head_groups), meter=meter)
    return config, ContextParallel(group, mesh.world_group)

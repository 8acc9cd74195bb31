"""decide(): everything about one model on one cluster, settled once.

A :class:`Plan` comes of what a model is (:class:`~smp_core.plan.shapes.Shapes`), what was asked, and what the
cluster is (:class:`~smp_core.plan.cluster.Cluster`), by the rules of each subject. No process group, no module, no
collective: the same three give the same plan on every rank, on a laptop, and in a planner's loop.
:mod:`smp_core.engine.conversions` does what it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from smp_core.activations import settle_activations
from smp_core.cluster import Layout
from smp_core.comm import (
    settle_compression,
    settle_gathering,
    settle_head_groups,
    settle_optimizer_shard,
    settle_prefetch,
    settle_stages,
)
from smp_core.config import SmpConfig
from smp_core.engine.layout_rules import settle_layout
from smp_core.pipeline import settle_pipeline_stages
from smp_core.plan import TRAINERS_OWN, Cluster, Draft, Dtypes, GivenSharding, Plan, Precision, Shapes, dtype_of
from smp_core.sharding import settle_given, settle_masters, settle_precision, settle_reduce_dtype, settle_stored_dtype
from smp_core.tensor_parallel import require_known_combination


def decide(
    shapes: Shapes,
    asked: SmpConfig,
    cluster: Cluster,
    *,
    precision: Precision = TRAINERS_OWN,
    given: GivenSharding | None = None,
) -> Plan:
    """Decide everything about one model.

    Args:
        asked: ``shard_degree="auto"`` has been replaced by a number
            (:func:`smp_core.engine.auto_degree.decide_with_smallest_degree`), unless the model is pre-sharded.
        precision: what the trainer's precision means.
        given: how a pre-sharded model is sharded; it pins what was decided then.

    Raises:
        ValueError: a value that does not fit the model or the cluster; names the knob,
            its value, and what to write.
    """
    draft = Draft(asked)
    # Dtypes as the trainer or the model's maker wants them, the degrees, and what is gathered.
    if given is not None:
        settle_given(draft, given, shapes)
    settle_precision(draft, precision)
    layout = settle_layout(draft, cluster.topology)
    require_known_combination(draft, shapes, given is not None, cluster)
    # What follows is about ranks of one pipeline stage; and a tensor group, which holds a layer's parts, counts as one.
    stage, of_stage = cluster.of_stage(layout.pipeline), replace(layout, pipeline=1)
    groups, of_groups = stage.of_tensor_groups(layout.tensor), replace(of_stage, tensor=1)
    # FSDP2 shows split parameters to their layers, also where it has nothing to gather.
    masters = settle_masters(draft, shapes, given is not None, layout.replicate)
    casts = precision.cast_forward_inputs
    gathers = given is not None or _is_cut(layout) or settle_gathering(draft, of_stage, casts, masters)
    settle_reduce_dtype(draft, shapes)
    # What is sent, in which form and over which stages.
    payload = settle_compression(draft, of_groups, groups.topology)
    settle_stages(draft, shapes, of_groups, groups, payload)
    settle_optimizer_shard(draft, of_stage)
    settle_head_groups(draft, of_stage, cluster.device)
    # Memory, and what is in flight.
    activations = settle_activations(draft, shapes, stage)
    settle_prefetch(draft, shapes, of_groups, groups)
    _settle_by_model(draft, shapes)
    _settle_compile(draft, shapes, given, layout.tensor > 1 and bool(activations.checkpointed))
    stored = given is None and settle_stored_dtype(draft, shapes, gathers, masters)
    stages = settle_pipeline_stages(draft, shapes, given is not None)
    knobs = draft.knobs
    return Plan(
        knobs=knobs,
        shapes=shapes,
        cluster=cluster,
        precision=precision,
        layout=layout,
        gathers=gathers,
        dtypes=Dtypes(dtype_of(knobs.param_dtype), dtype_of(knobs.reduce_dtype), masters, stored),
        replica_payload=payload,
        activations=activations,
        warnings=tuple(draft.warnings),
        given=given,
        stages=stages,
    )


def decide_activations(plan: Plan, shapes: Shapes, **knobs: Any) -> Plan:
    """Decide anew about activations and the loss's chunks alone, on which nothing but `compile` depends. What
    :func:`decide` would come to with these knobs, for planners that try all of them.

    Args:
        plan: with both knobs at their defaults.
        shapes: of the same model, with the modules that ``activations.checkpoint`` names.
        knobs: values for `activations` and `chunked_cross_entropy`.

    Raises:
        ValueError: as :func:`decide`.
    """
    assert knobs.keys() <= {"activations", "chunked_cross_entropy"}
    draft = Draft(plan.knobs.with_asked(**knobs))
    activations = settle_activations(draft, shapes, plan.cluster.of_stage(plan.layout.pipeline))
    _settle_compile(draft, shapes, plan.given, plan.layout.tensor > 1 and bool(activations.checkpointed))
    warnings = (*plan.warnings, *draft.warnings)
    return replace(plan, knobs=draft.knobs, shapes=shapes, activations=activations, warnings=warnings)


def decide_pipeline(plan: Plan, pipeline: Mapping[str, Any]) -> Plan:
    """Decide anew about the schedule of pipeline stages, their micro-batches and blocks alone, on which nothing else
    depends.

    Raises:
        ValueError: as :func:`decide`.
    """
    draft = Draft(plan.knobs.with_asked(pipeline=pipeline))
    stages = settle_pipeline_stages(draft, plan.shapes, plan.given is not None)
    return replace(plan, knobs=draft.knobs, stages=stages)


def _settle_by_model(draft: Draft, shapes: Shapes) -> None:
    """Settle what the model alone decides: which modules ranks may leave out, and whether anything is to be
    initialised."""
    if draft.knobs.units.optional == "auto":
        names = shapes.units.optional
        inside = tuple(f"{name}." for name in names)
        elements = sum(each.elements for each in shapes.parameters if each.name.startswith(inside))
        why = f"no token goes through them: {elements:,} parameters, gathered with the unit around them"
        draft.settle("units.optional", names, why)
    if draft.knobs.delayed_init and not shapes.on_meta:
        why = "nothing was on the meta device; in Lightning, build the model in configure_model()"
        draft.drop("delayed_init", None, why)


def _settle_compile(draft: Draft, shapes: Shapes, given: GivenSharding | None, recomputes_split: bool) -> None:
    if draft.knobs.compile and given is not None:
        draft.drop("compile", None, "the model came sharded; call .compile() on its blocks before it is sharded")
    elif draft.knobs.compile and not shapes.units.blocks:
        draft.drop("compile", None, f"there are no blocks ({shapes.units.why}); name them with units=[...]")
    elif draft.knobs.compile and recomputes_split:
        # torch makes one operator of a recomputed stretch, in which nothing may stay outside of the graph.
        why = "the compiler leaves out what is recomputed around split layers; leave activations or compile out"
        draft.drop("compile", None, why)


def _is_cut(layout: Layout) -> bool:
    """Return whether ranks hold parts of layers, or some of them."""
    return layout.tensor > 1 or layout.pipeline > 1

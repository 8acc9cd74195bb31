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

from smp_core.activations import ACTIVATIONS
from smp_core.config import SmpConfig
from smp_core.engine.compile_rules import COMPILATION
from smp_core.engine.layout_rules import settle_layout
from smp_core.engine.subjects import SUBJECTS
from smp_core.pipeline import PIPELINE_PARALLELISM
from smp_core.plan import TRAINERS_OWN, Cluster, GivenSharding, ModelDraft, Plan, Precision, Shapes
from smp_core.sharding import settle_given, settle_precision


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
    draft = ModelDraft(asked, shapes, cluster, precision, given)
    # What all subjects look at: what the model's maker and the trainer want, and the degrees.
    if given is not None:
        settle_given(draft)
    settle_precision(draft)
    draft.layout = settle_layout(draft, cluster.topology)
    for subject in SUBJECTS:
        if not subject.is_off(draft.knobs):
            subject.settle(draft)
    return draft.plan()


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
    draft = _of(plan, plan.knobs.with_asked(**knobs), shapes)
    ACTIVATIONS.settle(draft)
    COMPILATION.settle(draft)
    warnings = (*plan.warnings, *draft.warnings)
    return replace(plan, knobs=draft.knobs, shapes=shapes, activations=draft.activations, warnings=warnings)


def decide_pipeline(plan: Plan, pipeline: Mapping[str, Any]) -> Plan:
    """Decide anew about the schedule of pipeline stages, their micro-batches and blocks alone, on which nothing else
    depends.

    Raises:
        ValueError: as :func:`decide`.
    """
    draft = _of(plan, plan.knobs.with_asked(pipeline=pipeline), plan.shapes)
    PIPELINE_PARALLELISM.settle(draft)
    return replace(plan, knobs=draft.knobs, stages=draft.stages)


def _of(plan: Plan, knobs: SmpConfig, shapes: Shapes) -> ModelDraft:
    return ModelDraft(knobs, shapes, plan.cluster, plan.precision, plan.given, plan.layout)

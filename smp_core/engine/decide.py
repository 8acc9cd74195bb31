"""decide(): everything about one model on one cluster, settled once.

A :class:`Plan` comes of what a model is (:class:`~smp_core.plan.shapes.Shapes`), what
was asked, and what the cluster is (:class:`~smp_core.plan.shapes.Cluster`), by the
rules of each subject. No process group, no module, no collective: the same three give
the same plan on every rank, on a laptop, and in a planner's loop.
:mod:`smp_core.engine.conversions` does what it says.

Before any subject is asked, :func:`settle_layout` resolves the layout: how large a
partition group is, whether collectives run in two stages, and how many ranks hold a
copy of gathered parameters between forward and backward.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from smp_core.activations import ACTIVATIONS
from smp_core.cluster import DEGREES, INNER, Layout, degrees_of, inner_degree
from smp_core.config import DEFAULTS, SmpConfig, contradictions
from smp_core.engine.compile_rules import COMPILATION
from smp_core.engine.subjects import SUBJECTS
from smp_core.pipeline import PIPELINE_PARALLELISM
from smp_core.plan import (
    TRAINERS_OWN,
    Cluster,
    Draft,
    GivenSharding,
    ModelDraft,
    Plan,
    Precision,
    Shapes,
)
from smp_core.sharding import settle_given, settle_precision
from smp_core.tensor_parallel import require_tensor_degree
from smp_core.topology import Topology, divisors, listed


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
            (:func:`smp_core.engine.auto_degree.decide_with_smallest_degree`), unless
            the model is pre-sharded.
        precision: what the trainer's precision means.
        given: how a pre-sharded model is sharded; it pins what was decided then.

    Raises:
        ValueError: a value that does not fit the model or the cluster; names the knob,
            its value, and what to write.
    """
    draft = ModelDraft(asked, shapes, cluster, precision, given)
    # What all subjects look at: what the model's maker and the trainer want, and the
    # degrees.
    # A pre-sharded model pins knobs before any rule looks at them.
    if given is not None:
        settle_given(draft)
    settle_precision(draft)
    draft.layout = settle_layout(draft, cluster.topology)
    # Subjects read what earlier ones have settled; those that are off are not asked.
    for subject in SUBJECTS:
        if not subject.is_off(draft.knobs):
            subject.settle(draft)
            continue
        for knob, (value, why) in subject.by_default.items():
            draft.settle(knob, value, why)
    return draft.plan()


def decide_activations(plan: Plan, shapes: Shapes, **knobs: Any) -> Plan:
    """Decide anew about activations and the loss's chunks alone, on which nothing but
    `compile` depends. What :func:`decide` would come to with these knobs, for planners
    that try all of them.

    Args:
        plan: with both knobs at their defaults.
        shapes: of the same model, with the modules that ``activations.checkpoint``
            names.
        knobs: values for `activations` and `chunked_cross_entropy`.

    Raises:
        ValueError: as :func:`decide`.
    """
    assert knobs.keys() <= {"activations", "chunked_cross_entropy"}
    draft = _of(plan, plan.knobs.with_asked(**knobs), shapes)
    ACTIVATIONS.settle(draft)
    COMPILATION.settle(draft)
    # Warnings of other subjects stay true.
    warnings = (*plan.warnings, *draft.warnings)
    return replace(
        plan,
        knobs=draft.knobs,
        shapes=shapes,
        activations=draft.activations,
        warnings=warnings,
    )


def decide_pipeline(plan: Plan, pipeline: Mapping[str, Any]) -> Plan:
    """Decide anew about the schedule of pipeline stages, their micro-batches and blocks
    alone, on which nothing else depends.

    Raises:
        ValueError: as :func:`decide`.
    """
    draft = _of(plan, plan.knobs.with_asked(pipeline=pipeline), plan.shapes)
    PIPELINE_PARALLELISM.settle(draft)
    return replace(plan, knobs=draft.knobs, stages=draft.stages)


def _of(plan: Plan, knobs: SmpConfig, shapes: Shapes) -> ModelDraft:
    return ModelDraft(
        knobs, shapes, plan.cluster, plan.precision, plan.given, plan.layout
    )


def lines_of_subjects(plan: Plan, parallel: object = None) -> list[str]:
    """Return what all subjects say of a plan, in lines for people.

    Args:
        parallel: the :class:`~smp_core.engine.parallel_model.ParallelModel` with what
            conversions made; None: there is none yet.
    """
    lines: list[str] = []
    for subject in SUBJECTS:
        if subject.is_off(plan.knobs):
            continue
        made = (
            getattr(parallel, subject.part)
            if parallel is not None and subject.part
            else None
        )
        lines += subject.describe(plan, made)
    return lines


def settle_layout(draft: Draft, topology: Topology) -> Layout:
    """Resolve ``shard_degree`` ("auto" is a number by now),
    ``collectives.hierarchical`` and ``reshard_after_forward``.

    Raises:
        ValueError: a degree that does not divide the world or straddles nodes, a
            context degree that does not divide the shard degree,
            ``collectives.hierarchical=True`` for a group that has only one stage.
    """
    asked, inner = draft.knobs.shard_degree, inner_degree(draft.knobs)
    stages = draft.knobs.pipeline_parallel_degree
    # Stages have the same layout, so one of them is looked at.
    world = topology.world_size
    if stages > 1:
        topology = topology.of_stage(stages)
    if draft.knobs.tensor_parallel_degree > 1:
        require_tensor_degree(draft.knobs, topology)
    # The degree of the partition group, in groups of ranks that count as one.
    groups = topology if inner == 1 else topology.of_groups(inner)
    try:
        degree = groups.resolve_shard_degree(asked)
    except ValueError as error:
        split = " and ".join(DEGREES[axis] for axis in INNER)
        # What the error counts may not be ranks of the world.
        counted = f" (each {inner} ranks of {split} count as one)" if inner > 1 else ""
        counted += (
            f" (the ranks of one of {stages} pipeline stages)" if stages > 1 else ""
        )
        raise ValueError(f"{error}{counted}") from None
    if degree != asked:
        counted = "ranks" if inner == 1 else f"groups of {inner} tensor ranks"
        draft.settle(
            "shard_degree",
            degree,
            f"{asked!r} of {groups.num_nodes} x {groups.ranks_per_node} {counted}",
        )
    # The layout, and what else follows from the degree.
    layout = Layout.of_world(world, degree, degrees_of(draft.knobs))
    _settle_hierarchical(draft, degree, groups)
    knobs = draft.knobs
    if knobs.reshard_after_forward == "auto":
        kept = knobs.keep_between_micro_batches
        draft.settle(
            "reshard_after_forward",
            kept == "shards",
            f"keep_between_micro_batches={kept!r}",
        )
    # True and False need no number.
    elif not isinstance(knobs.reshard_after_forward, bool):
        _settle_secondary_degree(draft, degree, groups)
    return layout


def _settle_hierarchical(draft: Draft, degree: int, topology: Topology) -> None:
    asked = draft.knobs.collectives.hierarchical
    k = topology.ranks_per_node
    nodes = topology.num_nodes
    # Two stages pay where a group has several ranks on each of several nodes.
    several = topology.has_two_stages(degree) or topology.replicas_share_nodes(degree)
    if asked == "auto":
        if topology.has_two_stages(degree):
            why = f"the partition group spans {degree // k} nodes with {k} ranks each"
        elif topology.replicas_share_nodes(degree):
            why = f"the replication group spans {nodes} nodes with {k // degree} ranks each"
        elif degree > k:
            why = "one rank per node: there is only one stage"
        else:
            why = "the partition group lies inside one node"
        draft.settle("collectives.hierarchical", several, why)
    elif asked and not several:
        raise ValueError(
            "collectives.hierarchical=True needs a partition or replication group that spans nodes with more than one "
            f"rank on each, but with shard_degree={degree} on nodes of {k} ranks there is none; write "
            "collectives={'hierarchical': 'auto'} or False, or a larger shard_degree"
        )


def _settle_secondary_degree(draft: Draft, degree: int, topology: Topology) -> None:
    """Resolve how many ranks, given as "node" or a number, hold a copy after forward:
    an integer below the shard degree, True or False."""
    asked, k = draft.knobs.reshard_after_forward, topology.ranks_per_node
    # A node's ranks hold the copy together.
    if asked == "node":
        if degree <= k:
            draft.settle(
                "reshard_after_forward",
                True,
                "the partition group lies inside one node already",
            )
        elif k == 1:
            draft.settle(
                "reshard_after_forward",
                False,
                "one rank per node: its copy is a whole one",
            )
        else:
            draft.settle(
                "reshard_after_forward",
                k,
                f"a copy sharded over the {k} ranks of each node",
            )
        return
    # A number of ranks, as it was asked for.
    assert asked != "auto"
    if degree % asked:
        allowed = listed(["true", "false", *divisors(degree)[1:]])
        raise ValueError(
            f"reshard_after_forward={asked} does not divide shard_degree={degree}; allowed: {allowed}"
        )
    if asked == degree:
        draft.settle(
            "reshard_after_forward", True, "as many ranks as the partition group has"
        )


# Settings that do not depend on how a model was sharded.
_OF_EACH_RUN = SmpConfig.settings_of("checkpoint")


def knobs_of_next_run(plan: Plan, asked: SmpConfig) -> SmpConfig:
    """Return the knobs in effect of a further run with a model that is sharded already:
    the model's, which stays as it is, but for the few that every run sets for itself.

    Raises:
        ValueError: a knob asks for something else than the model has.
    """
    config = kept = plan.knobs
    for name in SmpConfig.settings():
        # The default, the value in effect and what was asked then all mean "as it is".
        value, has = asked.asked(name), attrgetter(name)(kept)
        if name in _OF_EACH_RUN:
            config = config.with_resolved(name, value, "asked by this run")
        elif value not in (attrgetter(name)(DEFAULTS), has, kept.asked(name)):
            raise ValueError(
                f"{name}={value!r}: this model was sharded before with {name}={has!r} and keeps "
                "that; use the same value, or a new module and trainer.fit(..., ckpt_path=...)"
            )
    # Contradictions among other knobs were found when the model was sharded.
    names_one = re.compile("|".join(map(re.escape, _OF_EACH_RUN))).search
    wrong = [said for said in contradictions(config) if names_one(said)]
    if wrong:
        raise ValueError("\n".join(wrong))
    return config

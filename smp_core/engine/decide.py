"""decide(): everything about one model on one cluster, settled once.

A :class:`Plan` comes of what a model is (:class:`~smp_core.plan.shapes.Shapes`), what was asked, and what the
cluster is (:class:`~smp_core.plan.cluster.Cluster`), by rules that stand in the files beside this one. No process
group, no module, no collective: the same three give the same plan on every rank, on a laptop, and in a planner's loop.
:mod:`smp_core.engine.conversions` does what it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash

from smp_core.activations.rules import ActivationPlan, settle_activations
from smp_core.cluster.layout import PARTITION, Layout
from smp_core.codecs.codec import CodeName
from smp_core.comm.link_rules import settle_prefetch, settle_stages
from smp_core.comm.rules import (
    keeps_parameters,
    settle_compression,
    settle_gathering,
    settle_head_groups,
    settle_optimizer_shard,
)
from smp_core.config import SmpConfig
from smp_core.engine.layout_rules import settle_layout, two_stages
from smp_core.pipeline.rules import Stages, settle_pipeline_stages
from smp_core.plan.cluster import Cluster
from smp_core.plan.draft import Draft
from smp_core.plan.optimizers import OptimizerStates
from smp_core.plan.shapes import Shapes
from smp_core.plan.units import PlannedUnit
from smp_core.sharding.dtype_rules import (
    HALF,
    Dtypes,
    Precision,
    dtype_of,
    settle_masters,
    settle_precision,
    settle_reduce_dtype,
    settle_stored_dtype,
)
from smp_core.sharding.given_rules import GivenSharding, settle_given
from smp_core.tensor_parallel.rules import require_known_combination

TRAINERS_OWN = Precision()


@dataclass(frozen=True)
class Plan:
    """Everything that is done to one model, decided. Made by :func:`decide`.

    Attributes:
        knobs: all in effect, with what was asked and why each became what it is.
        shapes, cluster, precision: what it was decided by.
        layout: the axes of the run.
        gathers: units are sharded by FSDP2; False: every parameter is replicated.
        dtypes: of parameters and sums.
        replica_payload: how sums across replicas travel between nodes; None: as they are.
        activations: what is recomputed and offloaded.
        warnings: about knobs that were asked for and have no effect.
        given: how the model came, if it came sharded.
        stages: the pipeline stages, and what each has of the model; None without.
        optimizer: assumed when ``shard_degree="auto"`` was chosen; None otherwise.
    """

    knobs: SmpConfig
    shapes: Shapes
    cluster: Cluster
    precision: Precision
    layout: Layout
    gathers: bool
    dtypes: Dtypes
    replica_payload: CodeName | None
    activations: ActivationPlan
    warnings: tuple[str, ...] = ()
    given: GivenSharding | None = None
    optimizer: OptimizerStates | None = None
    stages: Stages | None = None

    @property
    def units(self) -> tuple[PlannedUnit, ...]:
        """The modules that are sharded and gathered as units, by their names."""
        return self.shapes.units.units

    @property
    def split_shapes(self) -> Shapes:
        """The model as one tensor rank holds it, before it is sharded."""
        return self.shapes.over(self.layout.tensor)

    @property
    def sharded_units(self) -> tuple[PlannedUnit, ...]:
        """The units that FSDP2 shards: none where nothing is gathered."""
        return self.units if self.gathers else ()

    @property
    def replicated(self) -> tuple[str, ...]:
        """Names of parameters that no unit can hold."""
        return self.shapes.units.replicated

    @property
    def word(self) -> str:
        """A text that is equal on two ranks if they decide the same about the same model."""
        came = None if self.given is None else (self.given.degree, self.given.two_dimensional)
        digest = xxhash.xxh3_64_hexdigest(repr((self.shapes, self.precision, came)).encode())
        where = ", some on the meta device" if self.shapes.on_meta else ""
        return f"{self.shapes.kind} with {len(self.shapes.parameters)} parameters{where}, digest {digest}"

    @property
    def parameters_in_words(self) -> list[str]:
        """Name, shape and dtype of each parameter, in the model's order."""
        frozen = {True: "", False: ", frozen"}
        return [f"{p.name} {list(p.shape)} {p.dtype}{frozen[p.trainable]}" for p in self.shapes.parameters]

    @property
    def shard_degree(self) -> int:
        """Ranks of a partition group, context ranks included."""
        return self.layout.size(*PARTITION)

    @property
    def hierarchical(self) -> bool:
        """Return whether collectives over the partition group run in two stages."""
        groups = self.cluster.topology.of_groups(self.layout.tensor)
        return bool(self.knobs.collectives.hierarchical) and two_stages(self.shard_degree, groups)

    @property
    def keeps_parameters(self) -> bool:
        """Return whether parameters stay unsharded from one micro-batch of a window to the next."""
        return keeps_parameters(self.knobs)

    @property
    def keeps_gradients(self) -> bool:
        """Return whether each rank adds up unsharded gradients over a window's micro-batches, reduced once."""
        return self.knobs.keep_between_micro_batches == "gradients"

    def computed_in(self, unit: PlannedUnit) -> torch.dtype | None:
        """Return what a unit's parameters are cast to when they are gathered; None: each stays in its own dtype."""
        if not self.dtypes.masters or self.dtypes.gathered is not None:
            return self.dtypes.gathered
        of_unit = [self.shapes.of_name(name) for name in unit.parameters]
        return next((each.dtype for each in of_unit if each.trainable and each.dtype in HALF), None)

    @property
    def replicated_casts(self) -> dict[str, torch.dtype]:
        """The dtypes that replicated parameters are cast to where they are used, by name. Under autocast layers cast
        their own, so that only one that others of the same layer are gathered beside has to be of their dtype."""
        beside = {name.rpartition(".")[0] for unit in self.units for name in unit.parameters}
        found = {}
        for parameter in map(self.shapes.of_name, self.replicated):
            casts = self.precision.cast_forward_inputs or parameter.name.rpartition(".")[0] in beside
            dtype = self.dtypes.of_gathered(parameter) if casts else parameter.dtype
            if dtype != self.dtypes.of_stepped(parameter):
                found[parameter.name] = dtype
        return found if self.gathers else {}

    @property
    def replicated_parameters(self) -> list[tuple[str, ...]]:
        """Names of the replicated parameters, in the groups that are added up together."""
        of_units = [] if self.gathers else [unit.parameters for unit in self.units]
        return [self.replicated, *of_units]

    def of_stage(self, stage: int) -> Plan:
        """Return the plan of one pipeline stage: its parameters' units, and roots."""
        if self.stages is None:
            return self
        units = self.stages.units(stage, self.shapes.units, self.shapes.aliases)
        return replace(self, shapes=replace(self.shapes, units=units))

    def describe(self) -> list[str]:
        """Return lines for people: the nodes, the layout, the units, what is replicated."""
        layout = self.layout
        total = self.shapes.elements
        replicas = "1 replica" if layout.replicate == 1 else f"{layout.replicate} replicas"
        lines = [
            self.cluster.topology.describe(),
            ("in each stage " if layout.pipeline > 1 else "")
            + f"{layout.replicate} x {self.shard_degree}: {replicas} of the model states, "
            f"each over {self.shard_degree * layout.tensor} ranks"
            + (", collectives in two stages" if self.hierarchical else ""),
        ]
        if self.stages is not None:
            lines.append(self.stages.describe())
        if layout.context > 1:
            lines.append(f"sequences over {layout.context} ranks")
        lines.append(f"{total:,} parameters, units: {len(self.units)} ({self.shapes.units.why})")
        if self.replicated:
            lines.append(f"whole on every rank: {', '.join(self.replicated)}")
        return lines


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

"""Plan: everything that is done to one model, decided; and the subjects that decide it.

The engine's ``decide`` makes one of Shapes, knobs and a Cluster; what was asked beside
it, how a model came and what is recomputed, are parts of it, and so is what is computed
in, reduced in, stored in and stepped (:class:`Dtypes`).

Sharding, context parallelism, FP8 and all other subjects are a folder each, with its
rules, that exports one object of a class made of :class:`Subject`;
``engine/subjects.py`` lists them. ``decide`` resolves the knobs of one after another,
the start-up report has the lines of each, `smp doctor` what each uses of the machine,
and docs/combinations.md which go together. What they write into is the
:class:`ModelDraft` of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar, Literal

import torch
import xxhash

from smp_core.cluster import INNER, PARTITION, Axis, Layout
from smp_core.codecs import CodeName, RowCodec
from smp_core.config import DEFAULTS, Clash, SmpConfig
from smp_core.plan.checkpointed import CheckpointedModule
from smp_core.plan.optimizers import OptimizerStates
from smp_core.plan.shapes import Cluster, ParameterShape, Shapes
from smp_core.plan.stages import Stages
from smp_core.plan.units import PlannedUnit

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Precision:
    """A trainer's precision, as sharding sees it.

    Attributes:
        param_dtype: what parameters are gathered in where the knob says "auto"; None:
            their own dtype.
        why: said of it.
        cast_forward_inputs: floating-point inputs are cast to that dtype (not under
            autocast).
        skips_steps: a gradient scaler skips steps whose gradients are inf or nan.
    """

    param_dtype: torch.dtype | None = None
    why: str = "the parameters' own dtype"
    cast_forward_inputs: bool = True
    skips_steps: bool = False


@dataclass(frozen=True)
class Dtypes:
    """The dtypes in effect; None means each tensor's own.

    Attributes:
        gathered: what forward and backward compute with.
        reduced: what gradients are added up in.
        masters: trainable half precision parameters are stored in float32, which is
            what the optimizer steps; they compute in their own dtype.
        stored_as_gathered: trainable parameters of units are stored in what they
            compute in, where ``optimizer_shard="world"`` keeps float32 masters of them.
    """

    gathered: torch.dtype | None
    reduced: torch.dtype | None
    masters: bool = False
    stored_as_gathered: bool = False

    def of_gathered(self, parameter: ParameterShape) -> torch.dtype:
        return _or_own(self.gathered, parameter.dtype)

    def of_stored(self, parameter: ParameterShape) -> torch.dtype:
        # Float32 masters elsewhere let the shard itself be stored as it is computed.
        if self.stored_as_gathered and parameter.trainable and parameter.is_divided:
            return (
                self.of_gathered(parameter)
                if self.of_stepped(parameter) == torch.float32
                else parameter.dtype
            )
        return self.of_stepped(parameter)

    def of_stepped(self, parameter: ParameterShape) -> torch.dtype:
        # Only half precision needs a master; anything else steps itself.
        has_master = self.masters and parameter.trainable and parameter.dtype in HALF
        return torch.float32 if has_master else parameter.dtype

    def of_reduced(self, parameter: ParameterShape) -> torch.dtype:
        return _or_own(self.reduced, self.of_gathered(parameter))


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return the dtype that a knob's word names; None: each tensor's own."""
    if name is None:
        return None
    return getattr(torch, name)


def name_of(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _or_own(dtype: torch.dtype | None, own: torch.dtype) -> torch.dtype:
    return own if dtype is None or not own.is_floating_point else dtype


@dataclass(frozen=True)
class ActivationPlan:
    """Decisions about activation memory.

    Attributes:
        checkpointed: modules that are computed again in backward.
        check: the outputs of recomputations are compared.
        offloaded_bytes: host memory of this rank that inputs of these modules may take;
            None: none are offloaded.
        horizon: how many modules' inputs may be on the device at once.
        min_bytes: smaller inputs stay on the device.
    """

    checkpointed: tuple[CheckpointedModule, ...] = ()
    check: bool = False
    offloaded_bytes: int | None = None
    horizon: int = 2
    min_bytes: int = 0


@dataclass(frozen=True)
class GivenSharding:
    """The sharding that a model came with.

    Attributes:
        ranks: of this rank's partition group.
        two_dimensional: sharded on a (replicate, shard) mesh: torch reduces across
            replicas.
        param_dtype, reduce_dtype: what it computes and reduces in; None: the
            parameters' own.
        experts: how many ranks divide the experts of a layer; 1: none do.
    """

    ranks: tuple[int, ...]
    two_dimensional: bool
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    experts: int = 1

    @property
    def degree(self) -> int:
        return len(self.ranks)


TRAINERS_OWN = Precision()
_SHORTEST_CODED_ROW = 16
FP8_ALIGNMENT = 16
"""FP8 kernels want both sizes of a weight, by the tensor ranks, to be multiples of
it."""


@dataclass(frozen=True)
class Plan:
    """Everything that is done to one model, decided. Made by :func:`decide`.

    Attributes:
        knobs: all in effect, with what was asked and why each became what it is.
        shapes, cluster, precision: what it was decided by.
        layout: the axes of the run.
        gathers: units are sharded by FSDP2; False: every parameter is replicated.
        dtypes: of parameters and sums.
        replica_payload: how sums across replicas travel between nodes; None: as they
            are.
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

    @cached_property
    def split_shapes(self) -> Shapes:
        """The model as one tensor rank holds it, before it is sharded."""
        return self.shapes.over(self.layout.tensor)

    @property
    def sharded_units(self) -> tuple[PlannedUnit, ...]:
        """The units that FSDP2 shards: none where nothing is gathered."""
        return self.shapes.units.units if self.gathers else ()

    @property
    def word(self) -> str:
        """A text that is equal on two ranks if they decide the same about the same
        model."""
        # What differs between ranks by right (memory, names of nodes) is left out.
        came = (
            None
            if self.given is None
            else (self.given.degree, self.given.two_dimensional, self.given.experts)
        )
        digest = xxhash.xxh3_64_hexdigest(
            repr((self.shapes, self.precision, came)).encode()
        )
        where = ", some on the meta device" if self.shapes.on_meta else ""
        return f"{self.shapes.kind} with {len(self.shapes.parameters)} parameters{where}, digest {digest}"

    @property
    def tensors_in_words(self) -> list[str]:
        """Name, shape and dtype of each parameter, and then of each buffer, in the
        model's order."""
        frozen = {True: "", False: ", frozen"}
        parameters = [
            f"{p.name} {list(p.shape)} {p.dtype}{frozen[p.trainable]}"
            for p in self.shapes.parameters
        ]
        return [*parameters, *(f"{buffer}, buffer" for buffer in self.shapes.buffers)]

    @cached_property
    def shard_degree(self) -> int:
        """Ranks of a partition group, context ranks included."""
        return self.layout.size(*PARTITION)

    def dealt(self, parameter: ParameterShape) -> int:
        """Return over how many ranks the experts are dealt whose parameter this is; 1:
        it is no experts'."""
        degree = self.knobs.expert_parallel_degree
        module = parameter.name.rpartition(".")[0]
        return (
            degree
            if isinstance(degree, int)
            and degree > 1
            and module in self.shapes.expert_names
            else 1
        )

    @cached_property
    def hierarchical(self) -> bool:
        """Return whether collectives over the partition group run in two stages."""
        if not self.knobs.collectives.hierarchical:
            return False
        # Two stages need several nodes with the same number of the group's ranks on
        # each.
        groups = self.cluster.topology.of_groups(self.layout.size(*INNER))
        return groups.has_two_stages(self.shard_degree)

    @property
    def experts_in_stages(self) -> bool:
        """Return whether tokens go to experts on other nodes in two all-to-alls."""
        collectives = self.knobs.collectives
        return (
            bool(collectives.hierarchical)
            and collectives.expert_transport == "all_to_all"
        )

    def is_coded(self, parameter: ParameterShape) -> bool:
        """Return whether a unit's parameter is stored as codes (``frozen_storage``): a
        frozen matrix whose rows are no shorter than codes pay for."""
        if (
            # Codes of floating-point numbers that no optimizer changes.
            self.knobs.frozen_storage is None
            or parameter.trainable
            or not parameter.dtype.is_floating_point
        ):
            return False
        # A scale for each short row would take more than the codes save.
        return (
            len(parameter.shape) > 1
            and math.prod(parameter.shape[1:]) >= _SHORTEST_CODED_ROW
        )

    def stored_bytes(self, parameter: ParameterShape, elements: int) -> int:
        """Return the bytes of so many elements, in whole rows, of a unit's parameter as
        they are stored."""
        if self.knobs.frozen_storage is None or not self.is_coded(parameter):
            return elements * self.dtypes.of_stored(parameter).itemsize
        # Codes are counted by rows, each with its scale.
        row = math.prod(parameter.shape[1:])
        return elements // row * RowCodec(self.knobs.frozen_storage).row_bytes(row)

    def multiplies_in_fp8(self, parameter: ParameterShape) -> bool:
        """Return whether a native FP8 layer multiplies by this parameter of a tensor
        rank."""
        if (
            self.knobs.fp8 is None
            or self.knobs.fp8.backend != "native"
            or parameter.fp8_dim is None
        ):
            return False
        # Kernels are called on a tensor rank's part, whose sizes have to fit.
        sizes = self.shapes.of_name(parameter.name).shape[-2:]
        return all(size % (FP8_ALIGNMENT * self.layout.tensor) == 0 for size in sizes)

    def gathered_itemsize(self, parameter: ParameterShape) -> int:
        """Return the bytes of an element of a unit's parameter as it is gathered, if it
        is not stored as codes."""
        if (
            self.knobs.fp8 is not None
            and self.knobs.fp8.fp8_all_gather
            and self.multiplies_in_fp8(parameter)
        ):
            return 1
        return self.dtypes.of_gathered(parameter).itemsize

    @property
    def keeps_parameters(self) -> bool:
        """Return whether parameters stay unsharded from one micro-batch of a window to
        the next."""
        return keeps_parameters(self.knobs)

    @property
    def keeps_gradients(self) -> bool:
        """Return whether each rank adds up unsharded gradients over a window's
        micro-batches, reduced once."""
        return self.knobs.keep_between_micro_batches == "gradients"

    def computed_in(self, unit: PlannedUnit) -> torch.dtype | None:
        """Return what a unit's parameters are cast to when they are gathered; None:
        each stays in its own dtype."""
        # One dtype for all units, or each in the dtype of its half precision
        # parameters.
        if not self.dtypes.masters or self.dtypes.gathered is not None:
            return self.dtypes.gathered
        of_unit = [self.shapes.of_name(name) for name in unit.parameters]
        return next(
            (each.dtype for each in of_unit if each.trainable and each.dtype in HALF),
            None,
        )

    @property
    def replicated_casts(self) -> dict[str, torch.dtype]:
        """The dtypes that replicated parameters are cast to where they are used, by
        name. Under autocast layers cast their own, so that only one that others of the
        same layer are gathered beside has to be of their dtype."""
        # Layers with both kinds of parameters would compute with two dtypes.
        wrap = self.shapes.units
        beside = {
            name.rpartition(".")[0] for unit in wrap.units for name in unit.parameters
        }
        found = {}
        for parameter in map(self.shapes.of_name, wrap.replicated):
            casts = (
                self.precision.cast_forward_inputs
                or parameter.name.rpartition(".")[0] in beside
            )
            dtype = self.dtypes.of_gathered(parameter) if casts else parameter.dtype
            if dtype != self.dtypes.of_stepped(parameter):
                found[parameter.name] = dtype
        return found if self.gathers else {}

    @property
    def replicated_parameters(self) -> list[tuple[str, ...]]:
        """Names of the replicated parameters, in the groups that are added up
        together."""
        wrap = self.shapes.units
        of_units = [] if self.gathers else [unit.parameters for unit in wrap.units]
        return [wrap.replicated, *of_units]

    def of_stage(self, stage: int) -> Plan:
        """Return the plan of one pipeline stage: its parameters' units, roots, and its
        experts."""
        if self.stages is None:
            return self
        # Units without parameters of this stage are left out, roots stay.
        units = self.stages.units(stage, self.shapes.units, self.shapes.aliases)
        held = {unit.name for unit in units.units}
        experts = tuple(site for site in self.shapes.experts if site.name in held)
        return replace(self, shapes=replace(self.shapes, units=units, experts=experts))


def keeps_parameters(knobs: SmpConfig) -> bool:
    """Return whether what a window's first micro-batch gathers stays until its last
    backward pass. Needs ``reshard_after_forward`` as it takes effect: one that frees
    parameters was asked for together with "gradients", or is how a model came; one that
    was asked for by ranks and turned out to keep an unsharded copy frees it too."""
    # Only where nothing is freed, and shards between micro-batches were not asked for.
    kept = knobs.reshard_after_forward is False and knobs.asked(
        "reshard_after_forward"
    ) in ("auto", False)
    return kept and knobs.keep_between_micro_batches != "shards"


@dataclass(eq=False)
class Draft:
    """The knobs of one run while they are decided, each with what it became and why.

    Attributes:
        knobs: as they are by now.
        warnings: sentences for people, about knobs that were asked for and have no
            effect.
    """

    knobs: SmpConfig
    warnings: list[str] = field(default_factory=list, init=False)

    def settle(self, knob: str, value: Any, why: str) -> None:
        """Put a value into effect, of a knob or of a field of one
        ("compression.gather")."""
        self.knobs = self.knobs.with_resolved(knob, value, why)

    def drop(self, knob: str, value: Any, why: str) -> None:
        """Put another value into effect than was asked for, and warn that what was
        asked for has no effect here."""
        self.warnings.append(
            f"{knob}={attrgetter(knob)(self.knobs)!r} has no effect: {why}"
        )
        self.settle(knob, value, why)


@dataclass(eq=False)
class ModelDraft(Draft):
    """A Plan in the making: each subject resolves its knobs, and writes what else it
    decides.

    Attributes:
        shapes, cluster, precision, given: what it is decided by, as :class:`Plan` has
            it.
        layout: the axes of the run; decided before any subject is asked.
        masters, stored_as_gathered: of the plan's :class:`Dtypes`.
        gathers, replica_payload, stages, activations: as :class:`Plan` has them.
    """

    shapes: Shapes
    cluster: Cluster
    precision: Precision = TRAINERS_OWN
    given: GivenSharding | None = None
    layout: Layout = field(default_factory=Layout)
    masters: bool = field(default=False, init=False)
    stored_as_gathered: bool = field(default=False, init=False)
    gathers: bool = field(default=False, init=False)
    replica_payload: CodeName | None = field(default=None, init=False)
    stages: Stages | None = field(default=None, init=False)
    activations: ActivationPlan = field(default_factory=ActivationPlan, init=False)

    # Stages are worlds of their own for what is decided about their ranks; ranks on
    # inner axes count as one for what is decided about partition and replication
    # groups.

    @property
    def of_groups(self) -> Layout:
        """The layout of one pipeline stage with the ranks on inner axes for one."""
        if self.layout.size(Axis.PIPELINE, *INNER) == 1:
            return self.layout
        return self.layout.without(Axis.PIPELINE, *INNER)

    @cached_property
    def stage(self) -> Cluster:
        """The machines of one pipeline stage."""
        return self.cluster.of_stage(self.layout.size(Axis.PIPELINE))

    @cached_property
    def groups(self) -> Cluster:
        """The same with the ranks on inner axes for one."""
        if self.layout.size(Axis.PIPELINE, *INNER) == 1:
            return self.cluster
        stage = self.cluster.of_stage(self.layout.size(Axis.PIPELINE))
        return stage.of_groups(self.layout.size(*INNER))

    def plan(self) -> Plan:
        """Return the plan that all subjects have written."""
        # By now every knob that was "auto" has a value.
        param_dtype = dtype_of(self.knobs.param_dtype)
        reduce_dtype = dtype_of(self.knobs.reduce_dtype)
        return Plan(
            knobs=self.knobs,
            shapes=self.shapes,
            cluster=self.cluster,
            precision=self.precision,
            layout=self.layout,
            gathers=self.gathers,
            dtypes=Dtypes(
                param_dtype, reduce_dtype, self.masters, self.stored_as_gathered
            ),
            replica_payload=self.replica_payload,
            activations=self.activations,
            warnings=tuple(self.warnings),
            given=self.given,
            stages=self.stages,
        )


@dataclass(frozen=True)
class Finding:
    """A result of `smp doctor`.

    Attributes:
        topic: what was looked at.
        state: "ok", "note" (worth knowing) or "problem" (has to be changed).
        found: in words.
        fix: what to do about it; "" if nothing.
    """

    topic: str
    state: Literal["ok", "note", "problem"]
    found: str
    fix: str = ""

    @classmethod
    def unless(cls, is_fine: bool, topic: str, found: str, fix: str) -> Finding:
        """Return a note with what to do about it, unless all is fine."""
        return cls(topic, "ok", found) if is_fine else cls(topic, "note", found, fix)


class Subject:
    """A subject. A method that is not overridden does nothing.

    Attributes:
        name: in messages and pages.
        page: its page in docs/.
        knobs: those that are its own.
        apart: what it does not go together with; the other subject need not list it
            too.
        optional: it is off where all its knobs are at their defaults, and is not asked
            anything then.
        by_default: values of knobs whose default is "auto", and why, where all its
            knobs are at their defaults; it is not asked to resolve them then.
        part: the attribute of :class:`smp_core.engine.parallel_model.ParallelModel`
            with what its conversion made.
    """

    name: ClassVar[str]
    page: ClassVar[str]
    knobs: ClassVar[tuple[str, ...]]
    apart: ClassVar[tuple[Clash[Any], ...]] = ()
    optional: ClassVar[bool] = False
    by_default: ClassVar[Mapping[str, tuple[Any, str]]] = {}
    part: ClassVar[str | None] = None

    def is_off(self, knobs: SmpConfig) -> bool:
        """Return whether there is nothing to resolve and nothing to report with these
        knobs."""
        # A subject at its defaults decides nothing, and reports nothing.
        return (self.optional or bool(self.by_default)) and all(
            getattr(knobs, knob) == getattr(DEFAULTS, knob) for knob in self.knobs
        )

    def settle(self, draft: ModelDraft) -> None:
        """Resolve its knobs, and write what else it decides.

        Raises:
            ValueError: what the model, the machines or other subjects do not allow;
                names the knob, its value, and what to write.
        """

    def describe(self, plan: Plan, made: Any) -> list[str]:
        """Return its lines of the start-up report.

        Args:
            made: its part of the parallel model; None where nothing was made, or not
                yet.
        """
        return [] if made is None else made.describe().splitlines()

    def machine(self) -> Iterator[Finding]:
        """Yield what this machine has, or lacks, that it uses."""
        yield from ()

    def beside(self, other: Subject) -> list[str]:
        """Return why it does not go together with another subject, in words; empty
        where it does."""
        # A clash is listed by one of the two.
        own = [clash.words for clash in self.apart if clash.other == other.name]
        return [
            *own,
            *(clash.words for clash in other.apart if clash.other == self.name),
        ]

    def require_together(self, draft: ModelDraft, asked: str) -> None:
        """Refuse what it has not been shown to be exact with.

        Args:
            asked: the subject's knob with its value.

        Raises:
            ValueError: names all of it, and what to write.
        """
        # All clashes at once, so that each has its remedy in one message.
        found = [(clash.found(draft), clash.instead) for clash in self.apart]
        lines = "\n".join(
            f"- {what}; {instead}" for what, instead in found if what is not None
        )
        if lines:
            raise ValueError(f"{asked} is not built yet together with\n{lines}")


def asked_for(knob: str, unless: Any = None) -> Callable[[ModelDraft], str | None]:
    """Return a function for :attr:`Clash.found`: the knob, or the field of one, with
    the value that was asked for.

    Args:
        unless: a value that is none of what is looked for, beside those that are false.
    """

    def found(draft: ModelDraft) -> str | None:
        # Fields of knobs by dots; a knob that is None has no fields.
        value: Any = draft.knobs
        for name in knob.split("."):
            value = None if value is None else getattr(value, name)
        return f"{knob}={value!r}" if value and value != unless else None

    return found


FOREIGN_FP8: Clash[ModelDraft] = Clash(
    "fp8",
    "FP8 layers of other libraries (`fp8.backend`)",
    asked_for("fp8.backend", unless="native"),
    "write fp8={'backend': 'native'}",
)
"""A clash of several axes: their refusal of another library's FP8 layers, in the same
words."""

SYMMETRIC_MEMORY: Clash[ModelDraft] = Clash(
    "communication",
    "`collectives.symmetric_memory`",
    asked_for("collectives.symmetric_memory"),
    "leave it out",
)
"""A clash of several axes: their refusal of symmetric memory, in the same words."""


def came_sharded(draft: ModelDraft) -> str | None:
    """Return a pre-sharded model in words; None: it is none. For
    :attr:`Clash.found`."""
    return (
        None
        if draft.given is None
        else f"a model that came sharded ({draft.shapes.kind})"
    )

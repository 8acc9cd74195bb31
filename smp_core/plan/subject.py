"""Subject: the interface of sharding, context parallelism, FP8 and all other subjects,
each a folder with its rules.

Each folder exports one object of a class made of :class:`Subject`;
``engine/subjects.py`` lists them. ``decide`` resolves the knobs of one after another,
the start-up report has the lines of each, `smp doctor` what each uses of the machine,
and docs/combinations.md which go together. What they write into is the
:class:`ModelDraft` of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar, Literal

from smp_core.cluster import INNER, Axis, Layout
from smp_core.codecs import CodeName
from smp_core.config import DEFAULTS, Clash, SmpConfig
from smp_core.plan.plan import (
    TRAINERS_OWN,
    ActivationPlan,
    Dtypes,
    GivenSharding,
    Plan,
    Precision,
    dtype_of,
)
from smp_core.plan.shapes import Cluster, Shapes
from smp_core.plan.stages import Stages


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
        part: the attribute of :class:`smp_core.engine.parallel_model.ParallelModel`
            with what its conversion made.
    """

    name: ClassVar[str]
    page: ClassVar[str]
    knobs: ClassVar[tuple[str, ...]]
    apart: ClassVar[tuple[Clash[Any], ...]] = ()
    optional: ClassVar[bool] = False
    part: ClassVar[str | None] = None

    def is_off(self, knobs: SmpConfig) -> bool:
        """Return whether there is nothing to resolve and nothing to report with these
        knobs."""
        # A subject at its defaults decides nothing, and reports nothing.
        return self.optional and all(
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

"""Drafts: what is decided about one run, or about one model, while it is decided."""

from __future__ import annotations

from functools import cached_property
from operator import attrgetter
from typing import Any

from smp_core.cluster import INNER, Axis, Layout
from smp_core.codecs import CodeName
from smp_core.config import SmpConfig
from smp_core.plan.cluster import Cluster
from smp_core.plan.dtypes import Dtypes, Precision, dtype_of
from smp_core.plan.plan import TRAINERS_OWN, ActivationPlan, GivenSharding, Plan
from smp_core.plan.shapes import Shapes
from smp_core.plan.stages import Stages


class Draft:
    """The knobs of one run while they are decided, each with what it became and why.

    Attributes:
        knobs: as they are by now.
        warnings: sentences for people, about knobs that were asked for and have no effect.
    """

    def __init__(self, asked: SmpConfig) -> None:
        self.knobs = asked
        self.warnings: list[str] = []

    def settle(self, knob: str, value: Any, why: str) -> None:
        """Put a value into effect, of a knob or of a field of one ("compression.gather")."""
        self.knobs = self.knobs.with_resolved(knob, value, why)

    def drop(self, knob: str, value: Any, why: str) -> None:
        """Put another value into effect than was asked for, and warn that what was asked for has no effect here."""
        self.warnings.append(f"{knob}={attrgetter(knob)(self.knobs)!r} has no effect: {why}")
        self.settle(knob, value, why)


class ModelDraft(Draft):
    """A Plan in the making: each subject resolves its knobs, and writes what else it decides.

    Attributes:
        shapes, cluster, precision, given: what it is decided by, as :class:`Plan` has it.
        layout: the axes of the run; decided before any subject is asked.
        masters, stored_as_gathered: of the plan's :class:`Dtypes`.
        gathers, replica_payload, stages, activations: as :class:`Plan` has them.
    """

    def __init__(
        self,
        asked: SmpConfig,
        shapes: Shapes,
        cluster: Cluster,
        precision: Precision = TRAINERS_OWN,
        given: GivenSharding | None = None,
        layout: Layout | None = None,
    ) -> None:
        super().__init__(asked)
        self.shapes, self.cluster, self.precision, self.given = shapes, cluster, precision, given
        self.layout = layout or Layout()
        self.masters = self.stored_as_gathered = self.gathers = False
        self.replica_payload: CodeName | None = None
        self.stages: Stages | None = None
        self.activations = ActivationPlan()

    # Stages are worlds of their own for what is decided about their ranks; ranks on inner axes count as one for what is
    # decided about partition and replication groups.

    @property
    def of_stage(self) -> Layout:
        """The layout of one pipeline stage."""
        return self.layout.without(Axis.PIPELINE)

    @property
    def of_groups(self) -> Layout:
        """The same with the ranks on inner axes for one."""
        return self.of_stage.without(*INNER)

    @cached_property
    def stage(self) -> Cluster:
        """The machines of one pipeline stage."""
        return self.cluster.of_stage(self.layout.size(Axis.PIPELINE))

    @cached_property
    def groups(self) -> Cluster:
        """The same with the ranks on inner axes for one."""
        return self.stage.of_groups(self.layout.size(*INNER))

    def plan(self) -> Plan:
        """Return the plan that all subjects have written."""
        param_dtype, reduce_dtype = dtype_of(self.knobs.param_dtype), dtype_of(self.knobs.reduce_dtype)
        return Plan(
            knobs=self.knobs,
            shapes=self.shapes,
            cluster=self.cluster,
            precision=self.precision,
            layout=self.layout,
            gathers=self.gathers,
            dtypes=Dtypes(param_dtype, reduce_dtype, self.masters, self.stored_as_gathered),
            replica_payload=self.replica_payload,
            activations=self.activations,
            warnings=tuple(self.warnings),
            given=self.given,
            stages=self.stages,
        )

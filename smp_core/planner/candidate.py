"""Candidate: a configuration that a planner looks at, with its memory and time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from smp_core.cluster import DEGREES
from smp_core.config import DEFAULTS, SmpConfig, as_asked
from smp_core.plan import Plan
from smp_core.planner.fitted import Band
from smp_core.planner.step_memory import PeakMemory
from smp_core.planner.time import StepTime

_DEFAULTS = DEFAULTS.to_dict()


def spread_of(
    pipeline: int, tensor: int, context: int, shard: int, ranks_per_node: int
) -> tuple[int, int]:
    """Return the axes of a layout beside sharding, and the nodes of a partition
    group."""
    axes = (pipeline > 1) + (tensor > 1) + (context > 1)
    return axes, -(-shard * tensor // ranks_per_node)


def changed_knobs(asked: SmpConfig) -> dict[str, Any]:
    """Return the knobs that are not at their defaults, as YAML files have them."""
    found = {}
    for knob in SmpConfig.knobs():
        # Compared as they were asked for: "auto" that came to a value is still a
        # default.
        if asked.asked(knob) == DEFAULTS.asked(knob):
            continue
        value, default = as_asked(asked.asked(knob)), _DEFAULTS[knob]
        if value == default:
            continue
        # Of a knob with fields only those that differ, so that a file stays short.
        if isinstance(value, Mapping):
            # Of one that is off by default.
            plain = default or SmpConfig.from_dict({knob: True}).to_dict()[knob]
            value = {
                name: each for name, each in value.items() if each != plain[name]
            } or True
        found[knob] = value
    return found


def complexity_of(plan: Plan, knobs: Mapping[str, Any]) -> int:
    """Return how many axes and knobs a configuration takes."""
    # An axis is harder to understand than a knob, and counts twice.
    axes = sum(2 for axis in DEGREES if plan.layout.size(axis) > 1)
    return axes + sum(
        len(value) if isinstance(value, Mapping) else 1 for value in knobs.values()
    )


@dataclass(frozen=True)
class Candidate:
    """A configuration that decide() takes, with its memory and time.

    Attributes:
        micro_batch: samples of a micro-batch on each rank.
        count: micro-batches of an optimizer step.
        flops: model FLOPs of a step, by the convention of MFU.
        band: how far off the time may be.
    """

    plan: Plan
    micro_batch: int
    count: int
    memory: PeakMemory
    time: StepTime
    flops: float
    peak: float
    tokens: int
    band: Band

    @property
    def asked(self) -> SmpConfig:
        return self.plan.knobs.unresolved

    @cached_property
    def knobs(self) -> dict[str, Any]:
        """The knobs that are not at their defaults, as YAML files have them."""
        return changed_knobs(self.asked)

    @cached_property
    def words(self) -> str:
        """The knobs as text, by which the ranking is the same each time."""
        return str(self.knobs)

    @cached_property
    def complexity(self) -> int:
        """The number of axes and knobs that it takes."""
        return complexity_of(self.plan, self.knobs)

    @property
    def recomputation(self) -> str:
        """The mode of recomputation, and whether inputs are offloaded, as "full,
        offloaded"."""
        offloaded = (
            ", offloaded" if self.plan.activations.offloaded_bytes is not None else ""
        )
        return f"{self.plan.knobs.activations.checkpoint}{offloaded}"

    @property
    def spread(self) -> tuple[int, int]:
        """The risk of a configuration: its axes beside sharding, and the nodes of a
        partition group."""
        layout, per_node = self.plan.layout, self.plan.cluster.topology.ranks_per_node
        return spread_of(
            layout.pipeline,
            layout.tensor,
            layout.context,
            self.plan.shard_degree,
            per_node,
        )

    @property
    def kind(self) -> tuple[bool, ...]:
        """The axes that it has beside sharding, and whether a partition group has
        several nodes."""
        layout = self.plan.layout
        return (
            layout.pipeline > 1,
            layout.context > 1,
            layout.tensor > 1,
            self.spread[1] > 1,
        )

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole job."""
        return self.tokens / self.time.total

    @property
    def mfu(self) -> float:
        return self.flops / self.time.total / (self.peak * self.plan.layout.world_size)

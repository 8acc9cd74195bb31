"""Draft: the knobs of one run while they are decided, each with what it became and why."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from smp_core.config import SmpConfig


class Draft:
    """A Plan in the making: the rules of :mod:`smp_core.engine.decide` write into it.

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

"""Workload: what one optimizer step is to do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from smp_core.plan import OPTIMIZERS, OptimizerStates


@dataclass(frozen=True)
class Workload:
    """The batch of one optimizer step.

    Attributes:
        sequence: tokens of a sample.
        global_batch: samples of a step, over all ranks and micro-batches.
        precision: "mixed" (float32 parameters, computed with in bfloat16), "bfloat16"
            (nothing is kept in float32) or "trainer" (dtypes are those of a model that
            is there, and its trainer's).
        optimizer: a name of :data:`smp_core.plan.optimizers.OPTIMIZERS`.
        tokens: of the whole training, for days and cost; None: not known.
    """

    sequence: int
    global_batch: int
    precision: Literal["mixed", "bfloat16", "trainer"] = "mixed"
    optimizer: str = "adamw"
    tokens: float | None = None

    def __post_init__(self) -> None:
        # A single token has no next one to be predicted.
        for name, least in (("sequence", 2), ("global_batch", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"{name}={getattr(self, name)} is not a number of at least {least}"
                )
        if self.precision not in ("mixed", "bfloat16", "trainer"):
            raise ValueError(
                f"precision={self.precision!r} is not planned with; allowed: 'mixed', 'bfloat16'"
            )
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"optimizer={self.optimizer!r} is not known; allowed: {', '.join(OPTIMIZERS)}"
            )
        if self.tokens is not None and not 0 < self.tokens < math.inf:
            raise ValueError(
                f"tokens={self.tokens:g} of the training is not a number above 0"
            )

    @property
    def states(self) -> OptimizerStates:
        return OPTIMIZERS[self.optimizer]

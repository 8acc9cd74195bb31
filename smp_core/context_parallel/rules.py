"""Rules for context parallelism: in how many groups of heads keys and values are
sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from smp_core.plan import Finding, ModelDraft, Plan, Subject


class ContextParallelism(Subject):
    """Context parallelism, as one of the subjects."""

    name = "context parallelism"
    page = "context-parallelism.md"
    knobs = ("context_parallel_degree",)
    optional = True

    def settle(self, draft: ModelDraft) -> None:
        """Resolve in how many groups of heads keys and values are sent between context
        ranks."""
        # More groups hide more of the exchange, and start more messages.
        if draft.knobs.collectives.context_head_groups == "auto":
            on_cpu = draft.cluster.device == "cpu"
            why = (
                "on CPU nothing runs behind anything"
                if on_cpu
                else "one group's gather behind the other's attention"
            )
            draft.settle("collectives.context_head_groups", 1 if on_cpu else 2, why)

    def describe(self, plan: Plan, made: Any) -> list[str]:
        """Return a line about the ranks that share sequences."""
        return [f"sequences over {plan.layout.context} ranks"]

    def machine(self) -> Iterator[Finding]:
        """Look whether the device has FlashAttention's kernels."""
        if torch.cuda.is_available():
            capable = torch.cuda.get_device_capability() >= (8, 0)
            found = "yes" if capable else "needs 8.0"
            yield Finding.unless(
                capable, "FlashAttention", found, "attention takes torch's math kernels"
            )


CONTEXT_PARALLELISM = ContextParallelism()

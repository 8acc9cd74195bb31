"""Frozen weights as codes, as one of the subjects: what is stored so, and what that
does not go together with."""

from __future__ import annotations

from typing import Any

from smp_core.config import Clash
from smp_core.plan import (
    GIB,
    SYMMETRIC_MEMORY,
    ModelDraft,
    Plan,
    Subject,
    asked_for,
    came_sharded,
)


class FrozenStorage(Subject):
    """Frozen weights in 8 or 4 bits, as one of the subjects."""

    name = "frozen storage"
    page = "low-bit-bases.md"
    knobs = ("frozen_storage",)
    optional = True
    apart = (
        Clash(
            "fp8",
            "`fp8`: weights travel in FP8 then",
            asked_for("fp8"),
            "leave fp8 or frozen_storage out",
        ),
        Clash(
            "communication",
            "`compression.gather`, where frozen weights travel as codes already",
            asked_for("compression.gather"),
            "leave compression.gather out",
        ),
        SYMMETRIC_MEMORY,
        Clash(
            "tensor parallelism",
            "layers over tensor ranks",
            asked_for("tensor_parallel_degree", unless=1),
            "write tensor_parallel_degree=1",
        ),
        Clash(
            "pipeline parallelism",
            "pipeline stages",
            asked_for("pipeline_parallel_degree", unless=1),
            "write pipeline_parallel_degree=1",
        ),
        Clash(
            "expert parallelism",
            "experts that ranks divide",
            asked_for("expert_parallel_degree", unless=1),
            "write expert_parallel_degree=1",
        ),
        Clash(
            "sharding",
            "models that came sharded",
            came_sharded,
            "load it whole, torch-smp shards it",
        ),
    )

    def settle(self, draft: ModelDraft) -> None:
        """Refuse what codes have no effect on, or have not been shown to be exact with.

        Raises:
            ValueError: nothing to store as codes, and what it does not go together
                with.
        """
        # Clashes first: they name what to leave out.
        asked = draft.knobs.frozen_storage
        self.require_together(draft, f"frozen_storage={asked!r}")
        if not any(_coded(draft.plan())):
            raise ValueError(
                f"frozen_storage={asked!r} stores frozen matrices as codes, and {draft.shapes.kind} has none (2-D or "
                "more, rows of 16 elements or more); freeze the base before the model is prepared "
                "(parameter.requires_grad_(False), or peft's get_peft_model), or leave frozen_storage out"
            )

    def describe(self, plan: Plan, made: Any) -> list[str]:
        """Return a line about how much is stored as codes."""
        coded = _coded(plan)
        elements = sum(each.elements for each in coded)
        stored = sum(plan.stored_bytes(each, each.elements) for each in coded)
        return [
            f"frozen weights as {plan.knobs.frozen_storage} codes: {elements:,} elements of {len(coded)} matrices, "
            f"{stored / GIB:.2f} GiB in all, {stored / elements:.2f} bytes an element"
        ]


FROZEN_STORAGE = FrozenStorage()


def _coded(plan: Plan) -> list[Any]:
    """Return the parameters that are stored as codes."""
    # Replicated parameters are in no unit, and stay as they are.
    of_units = {name for unit in plan.sharded_units for name in unit.parameters}
    return [
        each
        for each in plan.shapes.parameters
        if each.name in of_units and plan.is_coded(each)
    ]

"""What experts that are dealt to ranks gather and hold, and what their tokens send, for a plan: with a balanced router
a rank's experts get as many rows as the rank has for all experts, so that it computes and keeps what it would without.
"""

from __future__ import annotations

from smp_core.plan import Plan
from smp_core.planner.model_trace import ModelTrace


def expert_degree(plan: Plan) -> int:
    """Return over how many ranks the experts of a layer are dealt; 1: none."""
    degree = plan.knobs.expert_parallel_degree
    assert isinstance(degree, int)
    return degree


def dealt_elements(plan: Plan, trace: ModelTrace) -> tuple[float, float]:
    """Return the elements of a block's experts, as one tensor rank holds them, and of those that one expert rank has;
    none where they are dealt to no ranks."""
    degree = expert_degree(plan)
    whole = trace.block_elements(plan.layout.tensor, of_experts=True) if degree > 1 else 0.0
    return whole, whole / degree


def row_bytes(plan: Plan, trace: ModelTrace, micro_batch: int, held: float) -> float:
    """Return the bytes of a block's rows on a rank, one for each expert of a token; 0: its experts are dealt to no
    ranks.

    Args:
        held: tokens of each sample on a rank.
    """
    if expert_degree(plan) == 1:
        return 0.0
    return trace.experts_of_token * trace.block["full"].at(micro_batch, held).kept


def count_bytes(plan: Plan, trace: ModelTrace) -> float:
    """Return the bytes of the numbers of rows of a layer's experts, int64."""
    return 8.0 * trace.shapes["none"].experts[0].experts if expert_degree(plan) > 1 else 0.0

"""What experts that are dealt to ranks gather and hold, and what their tokens send, for
a plan: with a balanced router a rank's experts get as many rows as the rank has for all
experts, so that it computes and keeps what it would without.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from smp_core.plan import Plan
from smp_core.planner.model_trace import ModelTrace

# Bytes of a number of rows, of an expert's number, of its weight (float32 in most).
_COUNT, _NAME, _WEIGHT = 8, 4, 4


def expert_degree(plan: Plan) -> int:
    """Return over how many ranks the experts of a layer are dealt; 1: none."""
    degree = plan.knobs.expert_parallel_degree
    assert isinstance(degree, int)
    return degree


def dealt_elements(plan: Plan, trace: ModelTrace) -> tuple[float, float]:
    """Return the elements of a block's experts, as one tensor rank holds them, and of
    those that one expert rank has; none where they are dealt to no ranks."""
    degree = expert_degree(plan)
    whole = (
        trace.block_elements(plan.layout.tensor, of_experts=True) if degree > 1 else 0.0
    )
    return whole, whole / degree


@dataclass(frozen=True)
class TokenBytes:
    """The bytes of one exchange of a block's tokens with the ranks of their experts, as
    of gathers: all but one part of as many as there are members leave a rank.

    Attributes:
        ranks, nodes: members of the gather inside a node, and of that between nodes.
        inside, across: of tokens, in either; of the way to the experts and of the way
            back, forward and backward.
        beside: of the experts and weights that go to other nodes with tokens, in
            forward; ``weights``: back of it.
        counts_inside, counts_across: of the numbers of rows, before the way to the
            experts.
        kept: what recomputation keeps of both ways.
    """

    ranks: int
    nodes: int
    inside: float
    across: float
    beside: float
    weights: float
    counts_inside: float
    counts_across: float
    kept: float


def token_bytes(
    plan: Plan, trace: ModelTrace, micro_batch: int, held: float
) -> TokenBytes | None:
    """Return what tokens send with a balanced router; None: experts are dealt to no
    ranks.

    Args:
        held: tokens of each sample on a rank.
    """
    degree = expert_degree(plan)
    if degree == 1:
        return None
    experts = trace.shapes["none"].experts[0].experts
    of_token = round(trace.experts_of_token)
    # One for each expert of a token.
    rows = of_token * trace.block["full"].at(micro_batch, held).kept
    counts = float(_COUNT * experts)
    # How many of an expert group's ranks stand on one node.
    ranks = min(
        max(plan.cluster.topology.ranks_per_node // plan.layout.tensor, 1), degree
    )
    nodes = degree // ranks
    if nodes == 1:
        return TokenBytes(ranks, nodes, rows, 0.0, 0.0, 0.0, counts, 0.0, 2 * rows)
    if ranks == 1 or not plan.knobs.collectives.hierarchical:
        return TokenBytes(
            ranks, nodes, rows / nodes, rows, 0.0, 0.0, counts / nodes, counts, 2 * rows
        )
    # In two hops: a token crosses once to each node that has experts of it, of any
    # choice of them as often.
    elsewhere = math.comb(experts - experts // nodes, of_token) / math.comb(
        experts, of_token
    )
    crossing = nodes * (1 - elsewhere) * micro_batch * held
    across = crossing * rows / (of_token * micro_batch * held)
    weights = crossing * of_token * _WEIGHT
    beside = crossing * of_token * _NAME + weights
    counts_across = counts + nodes * _COUNT
    kept = 2 * (rows + across)
    return TokenBytes(
        ranks, nodes, rows, across, beside, weights, counts / nodes, counts_across, kept
    )

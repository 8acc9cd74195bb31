"""What attention over split sequences sends, and takes while it runs, for a plan: the
exchange of keys and values that :mod:`smp_core.context_parallel.key_value_exchange`
makes, in units of the keys and values of a whole sequence.
"""

from __future__ import annotations

from smp_core.plan import Plan, head_groups
from smp_core.planner.model_trace import Figures


def keys_and_values(plan: Plan, block: Figures) -> float:
    """Return the bytes of keys and values that a rank gathers for one attention.

    Args:
        block: the figures of a block at the tokens that a rank holds.
    """
    return block.keys * plan.layout.context / plan.layout.tensor


def exchanges(plan: Plan) -> tuple[float, float]:
    """Return how often a block gathers its keys and values in a step of one micro-batch
    (in forward, where that is made again, and in backward), and how much it adds up:
    gradients are summed in float32 at least."""
    return 3.0 if plan.knobs.activations.checkpoint == "full" else 2.0, _widened(plan)


def copies(plan: Plan) -> tuple[float, float]:
    """Return what copies around one gather, and around the sum of gradients, read and
    write, in those units."""
    degree, sums = plan.layout.context, _widened(plan)
    # A rank's own keys and values are laid end to end; those of all are taken apart, and
    # put into the sequence's order, of which second halves are turned round before.
    gathered = 4 / degree + 2 + 1 + 2
    # Sums begin as zeros, are added to, turned round, put into the ranks' order, and
    # into the buffer that is sent; of what arrives come gradients of the model's dtype.
    summed = sums + (1 + 2 * sums) + 3 * sums + 2 * sums + (1 + sums) / degree
    return gathered, summed


def beside_attention(plan: Plan, block: Figures, heads: int) -> tuple[float, float]:
    """Return the bytes that attention takes at most while it runs, forward and
    backward, beside its inputs, outputs and gradients.

    Args:
        block: as of :func:`keys_and_values`.
        heads: of keys, of all tensor ranks.
    """
    degree, asked = plan.layout.context, plan.knobs.collectives.context_head_groups
    if degree == 1:
        return 0.0, 0.0
    assert isinstance(asked, int)
    # Keys are exchanged group of heads by group, so that less of them is there at a
    # time.
    groups = head_groups(max(heads // plan.layout.tensor, 1), asked)
    one, others = keys_and_values(plan, block) / groups, float(groups > 1)
    # The ranks' pieces are put into the sequence's order one after the other, by
    # halves; another group's arrive.
    forward = (2.25 + others * (1 + 1 / degree)) * one
    # Sums, the tensor that is sent, and the copy of the keys' gradients in the ranks'
    # order, by halves; what was sent of another group, and what is received.
    return forward, (2.75 + others * (1 + 1 / degree)) * _widened(plan) * one


def _widened(plan: Plan) -> float:
    computed = plan.dtypes.of_gathered(plan.shapes.parameters[0]).itemsize
    return max(4, computed) / computed

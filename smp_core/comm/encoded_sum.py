"""Sums of parts that travel encoded: the one stage that quantised reductions and the
replica hop share.

Every rank of a group owns one of M parts and holds a term of each. Terms travel to
their owners encoded; the owner adds up in float32 (float64 for float64) in group order,
its own term exact. A term that holds inf or nan cannot be encoded blockwise: its scales
say so to both ends, which is all the agreement that is needed, and it follows exactly
on CPU. On accelerators its blocks that are not finite arrive as nan, which the sum
would not be without them either: to send it exactly the host would have to ask the
device, and wait for all that it was given, in the middle of a backward pass.

Shape letters: M ranks of the group, S elements of one part.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from smp_core.codecs import Codec
from smp_core.comm.exchange import all_to_all, exchange
from smp_core.comm.meter import CommMeter
from smp_core.torch_facts import streams


def wide_copy(parts: Tensor) -> Tensor:
    """Return the same numbers in the dtype in which sums are taken."""
    return parts.to(
        torch.float64 if parts.dtype == torch.float64 else torch.float32, copy=True
    )


def sum_at_owners(
    parts_MS: Tensor,
    codec: Codec,
    group: dist.ProcessGroup,
    meter: CommMeter,
    *,
    kind: str,
    tag: int,
    residual_MS: Tensor | None = None,
    new_call: bool = False,
) -> Tensor | int:
    """Sum the ranks' terms into the row ``parts_MS[me]``; other rows are sent, and
    become what was meant to be sent.

    Args:
        parts_MS: this rank's terms, float32 or float64.
        residual_MS: what was rounded off the terms sent before; it is added to these
            and then holds what was rounded off them (error feedback, arXiv 1901.09847).
            None: without.
        kind, new_call: how the meter counts it.

    Returns:
        how many terms of this rank held inf or nan; on an accelerator a 0-d tensor.
    """
    ranks, me, (m, s) = (
        dist.get_process_group_ranks(group),
        dist.get_rank(group),
        parts_MS.shape,
    )
    others = [i for i in range(m) if i != me]
    # Every term but the own one, which the owner adds without codes.
    sent = parts_MS.new_empty((m, codec.size(s)), dtype=torch.uint8)
    for i in others:
        codec.encode(
            parts_MS[i], sent[i], None if residual_MS is None else residual_MS[i]
        )
    got = torch.empty_like(sent)
    with meter.point_to_point(
        kind, [(ranks[i], sent.shape[1]) for i in others], "inter", new_call=new_call
    ):
        all_to_all(got, sent, group, tag)
    # A device is not asked which terms were refused: their blocks arrive as nan.
    if streams.run_behind(parts_MS.device):
        parts_MS[me] = codec.sum_rows(got, parts_MS[me], me, {})
        refused = ~codec.finite_in(sent, s)
        refused[me] = False  # nothing was encoded there
        return refused.sum()
    # Both ends read from the scales which terms follow exactly.
    finite = torch.stack((codec.finite_in(sent, s), codec.finite_in(got, s))).tolist()
    refused_here = [i for i in others if not finite[0][i]]
    exact = {i: torch.empty_like(parts_MS[0]) for i in others if not finite[1][i]}
    # Exact terms go by a second exchange, for those pairs of ranks alone.
    if refused_here or exact:
        n_bytes = [(ranks[i], s * parts_MS.element_size()) for i in refused_here]
        with meter.point_to_point(kind, n_bytes, "inter", new_call=False):
            sends = [(parts_MS[i], ranks[i]) for i in refused_here]
            exchange(sends, [(term, ranks[i]) for i, term in exact.items()], group, tag)
    parts_MS[me] = codec.sum_rows(got, parts_MS[me], me, exact)
    return len(refused_here)

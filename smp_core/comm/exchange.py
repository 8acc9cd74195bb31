"""Messages between the ranks of one group, for backends whose own collectives move too
much or lose full duplex.

Measured on gloo: its reduce_scatter puts a whole ring all-reduce on the wire, and in a
group of two its collectives lose full duplex unless every receive is posted before any
send. Both are avoided here: all receives first, straight into their final place, then
all sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from smp_core.cluster import prefers_messages
from smp_core.torch_facts import (
    all_gather_single,
    reduce_scatter_single,
)

# Messages of one tag never meet those of another, so that gathers in flight and
# reductions can share a group.
GATHER = 1
REDUCE = 2
HOP = 3

Message = tuple[Tensor, int]


def exchange(
    sends: Sequence[Message],
    receives: Sequence[Message],
    group: dist.ProcessGroup,
    tag: int = 0,
) -> None:
    """Send and receive contiguous tensors; returns when all have arrived and all send
    buffers are free again.

    Args:
        sends: (tensor, global rank of the destination). Messages to one destination
            keep their order.
        receives: (tensor, global rank of the source), in the order in which that source
            sends them.
        group: a group all these ranks belong to.
        tag: messages are matched within a tag.
    """
    for work in start_exchange(sends, receives, group, tag):
        work.wait()


def start_exchange(
    sends: Sequence[Message],
    receives: Sequence[Message],
    group: dist.ProcessGroup,
    tag: int = 0,
) -> list[dist.Work]:
    """Start the same without waiting; the tensors must stay alive until everything was
    waited for."""
    # Both lists leave out empty tensors, on both sides alike.
    if "nccl" in str(dist.get_backend(group)):
        # NCCL pairs up sends and receives only inside one batch.
        batch = [
            dist.P2POp(dist.irecv, tensor, source, group)
            for tensor, source in receives
            if tensor.numel()
        ]
        batch += [
            dist.P2POp(dist.isend, tensor, to, group)
            for tensor, to in sends
            if tensor.numel()
        ]
        return dist.batch_isend_irecv(batch) if batch else []
    works = [
        dist.irecv(tensor, src=source, group=group, tag=tag)
        for tensor, source in receives
        if tensor.numel()
    ]
    works += [
        dist.isend(tensor, dst=to, group=group, tag=tag)
        for tensor, to in sends
        if tensor.numel()
    ]
    return [work for work in works if work is not None]


def all_to_all(
    out_PN: Tensor, rows_PN: Tensor, group: dist.ProcessGroup, tag: int = 0
) -> None:
    """Send row i to rank i of the group, and receive what rank i sends here in
    ``out_PN[i]``. Rows are contiguous and of one size."""
    # The library has this very collective.
    if not prefers_messages(group, rows_PN.device):
        dist.all_to_all_single(out_PN.view(-1), rows_PN.view(-1), group=group)
        return
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
    out_PN[me].copy_(rows_PN[me])
    others = [i for i in range(len(ranks)) if i != me]
    sends = [(rows_PN[i], ranks[i]) for i in others]
    receives = [(out_PN[i], ranks[i]) for i in others]
    exchange(sends, receives, group, tag)


def sum_rows(
    out_N: Tensor, rows_PN: Tensor, group: dist.ProcessGroup, tag: int = 0
) -> None:
    """Send row i to rank i of the group, and write the sum of the rows for this rank
    into ``out_N``.

    Messages are added up in rank order, the library's reduce-scatter has an order of
    its own. Half precision is added up in float32 and rounded once, which a library
    need not do: it is sent as it is and added up here. ``out_N`` may be this rank's own
    row.
    """
    if prefers_messages(group, rows_PN.device):
        start_sum_rows(out_N, rows_PN, group, tag)()
        return
    # A reduce-scatter of half precision might round in each addition.
    if out_N.dtype not in (torch.float16, torch.bfloat16):
        reduce_scatter_single(out_N, rows_PN.view(-1), group=group)
        return
    received_PN = torch.empty_like(rows_PN)
    all_to_all(received_PN, rows_PN, group)
    torch.sum(received_PN, 0, out=out_N)  # one kernel, with float32 inside


def start_sum_rows(
    out_N: Tensor, rows_PN: Tensor, group: dist.ProcessGroup, tag: int = 0
) -> Callable[[], None]:
    """Start the same by messages; what is returned waits for them and adds up."""
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
    others = [i for i in range(len(ranks)) if i != me]
    received = dict(
        zip(others, rows_PN.new_empty(len(others), rows_PN.shape[1]), strict=True)
    )
    sends = [(rows_PN[i], ranks[i]) for i in others]
    receives = [(received[i], ranks[i]) for i in others]
    works = start_exchange(sends, receives, group, tag)

    def finish() -> None:
        for work in works:
            work.wait()
        # out_N may be this rank's own row, and is written first: it is needed later.
        own_N = rows_PN[me]
        if me > 1 and own_N.data_ptr() == out_N.data_ptr():
            own_N = own_N.clone()
        sum_in_order([received.get(i, own_N) for i in range(len(ranks))], out_N)

    return finish


def gather_rows(rows_PN: Tensor, group: dist.ProcessGroup, tag: int = 0) -> None:
    """All-gather in place: every rank has filled its own row, which is its place in the
    group."""
    me = dist.get_rank(group)
    if not prefers_messages(group, rows_PN.device):
        all_gather_single(rows_PN.view(-1), rows_PN[me], group=group)
        return
    for work in start_gather_rows(rows_PN, group, tag):
        work.wait()


def start_gather_rows(
    rows_PN: Tensor, group: dist.ProcessGroup, tag: int = 0
) -> list[dist.Work]:
    """Start the same by messages, without waiting; ``rows_PN`` must stay alive until
    everything was waited for."""
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
    others = [(i, rank) for i, rank in enumerate(ranks) if i != me]
    sends = [(rows_PN[me], rank) for _, rank in others]
    return start_exchange(sends, [(rows_PN[i], rank) for i, rank in others], group, tag)


def gather_each(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: dist.ProcessGroup
) -> None:
    """All-gather ``inputs[i]`` [N] of all ranks into ``outputs[i]`` [P * N], in one
    launch where the library can."""
    if _has_one_launch(group):
        group.allgather_into_tensor_coalesced(list(outputs), list(inputs)).wait()
        return
    pairs = zip(outputs, inputs, strict=True)
    _wait_all(
        [
            all_gather_single(output, own, group=group, async_op=True)
            for output, own in pairs
        ]
    )


def reduce_each(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: dist.ProcessGroup
) -> None:
    """Reduce-scatter ``inputs[i]`` [P * N] of all ranks into ``outputs[i]`` [N], in one
    launch if the library can."""
    if _has_one_launch(group):
        group.reduce_scatter_tensor_coalesced(list(outputs), list(inputs)).wait()
        return
    pairs = zip(outputs, inputs, strict=True)
    _wait_all(
        [
            reduce_scatter_single(output, whole, group=group, async_op=True)
            for output, whole in pairs
        ]
    )


def _has_one_launch(group: dist.ProcessGroup) -> bool:
    """Return whether several collectives can be launched as one; gloo takes no tensors
    of a device there."""
    return "gloo" not in str(dist.get_backend(group))


def _wait_all(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def sum_in_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """Write ``parts[0] + parts[1] + ...``, added in that order, into ``out``: the
    result does not depend on arrival.

    Half precision is added up in float32 and rounded once. ``out`` may be one of the
    first two parts.
    """
    # More than two terms would be rounded more than once.
    if out.dtype in (torch.float16, torch.bfloat16) and len(parts) > 2:
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        out.copy_(total)
        return
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    torch.add(parts[0].to(out.dtype), parts[1], out=out)
    for part in parts[2:]:
        out += part

"""The exchange of keys and values: an all-gather over the context ranks before
attention, and a reduce-scatter of their gradients after it.

Heads are exchanged in groups: while the attention of one group of heads runs, the next
group's keys and values are gathered, and the previous group's gradients are reduced.
(The overlap of ring-flash-attention's "llama3" variant; it bounds memory as well: only
two groups are in memory at a time.) Gathered keys and values are freed when the
attention over them is done, and gathered again in backward.

A context group has a number, because an operator that torch compiles takes numbers and
tensors only. A group is registered while it is referenced (by its model's
:class:`~smp_core.context_parallel.batch.ContextParallel`, and by the batches that it
has split), so that the memory of a finished run is freed.

Shape letters: R ranks, B rows, L tokens of a rank, S = RL tokens of all, K key and
value heads of a head group, D and E head sizes of keys and values.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from smp_core.cluster import prefers_messages
from smp_core.comm import CommMeter, sum_rows
from smp_core.context_parallel.sequence_plan import SequencePlan
from smp_core.plan import head_groups
from smp_core.torch_facts import (
    all_gather_single,
    reduce_scatter_single,
)

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share sequences, seen from this process.

    Attributes:
        process_group: None when the degree is 1.
        number: the group's number in plans.
        ranks: global ranks in the group's order.
        rank: this process's place among them.
        head_groups: the most groups in which key and value heads are exchanged.
        meter: counts the bytes that leave this rank, as "context_gather" and
            "context_reduce".
    """

    process_group: dist.ProcessGroup | None
    number: int
    ranks: tuple[int, ...]
    rank: int
    head_groups: int = 1
    meter: CommMeter | None = None

    @property
    def degree(self) -> int:
        return len(self.ranks)

    def counting(self, kind: str, whole: Tensor | None) -> AbstractContextManager[None]:
        """Meter a collective over the group; ``whole`` is the tensor of all ranks'
        parts, None while waiting for one."""
        if self.meter is None:
            return nullcontext()
        n_bytes = 0 if whole is None else whole.nbytes
        return self.meter.ring(kind, self.ranks, n_bytes, new_call=whole is not None)


_ALONE = ContextGroup(None, 0, (0,), 0)
_groups: weakref.WeakValueDictionary[int, ContextGroup] = weakref.WeakValueDictionary(
    {0: _ALONE}
)
# No number is used twice: a plan of a group that is gone must not mean another one.
_numbers = itertools.count(1)


def register_group(
    process_group: dist.ProcessGroup | None,
    *,
    head_groups: int = 1,
    meter: CommMeter | None = None,
) -> ContextGroup:
    """Make a group known to the kernels of this process, while the caller keeps a
    reference; None: this process alone.
    """
    if head_groups < 1:
        raise ValueError(f"head_groups={head_groups}; allowed: 1 or more")
    ranks = (
        (0,)
        if process_group is None
        else tuple(dist.get_process_group_ranks(process_group))
    )
    rank = 0 if process_group is None else dist.get_rank(process_group)
    group = ContextGroup(process_group, next(_numbers), ranks, rank, head_groups, meter)
    _groups[group.number] = group
    return group


def group_numbered(number: int) -> ContextGroup:
    """Return the group that plans call ``number``.

    Raises:
        ValueError: the group is not referenced any more.
    """
    group = _groups.get(number)
    if group is None:
        raise ValueError(
            f"the ranks of context group {number} are not known any more: the batch was split for a model that is gone"
        )
    return group


def head_ranges(heads: int, at_most: int) -> list[tuple[int, int]]:
    """Divide the key and value heads into equal runs, as many as :func:`head_groups`
    says."""
    groups = head_groups(heads, at_most)
    return [(i * heads // groups, (i + 1) * heads // groups) for i in range(groups)]


def gather_keys_values(
    k_BLKD: Tensor,
    v_BLKE: Tensor,
    plan: SequencePlan,
    group: ContextGroup,
    heads: Sequence[tuple[int, int]],
) -> Iterator[Pair]:
    """Yield, for each range of heads, the unsplit sequence's keys [B, S, K, D] and
    values [B, S, K, E].

    Tokens have the sequence's order. The next range is on its way while the caller
    works on this one; a pair is freed when the caller lets go of it, and nothing here
    holds on to it (nor should a `zip` do so).
    """

    def start(which: tuple[int, int]) -> Callable[[], Pair]:
        return _start_gather(
            k_BLKD[:, :, slice(*which)], v_BLKE[:, :, slice(*which)], plan, group
        )

    # Lists, out of which tensors are taken: a name would hold on to what the caller has
    # let go.
    pending = [start(heads[0])]
    for following in [*heads[1:], None]:
        ready = [pending.pop()()]
        if following is not None:
            pending.append(start(following))
        yield ready.pop()


def _start_gather(
    k_BLKD: Tensor, v_BLKE: Tensor, plan: SequencePlan, group: ContextGroup
) -> Callable[[], Pair]:
    """Start the all-gather of keys [B, L, K, D] and values [B, L, K, E]; the returned
    function waits for them."""
    if group.process_group is None:
        return lambda: (k_BLKD, v_BLKE)
    # Tokens first, so that the ranks' pieces laid end to end are one tensor over the
    # sequence.
    local = torch.cat(
        [k_BLKD.transpose(0, 1).flatten(), v_BLKE.transpose(0, 1).flatten()]
    )
    # One message for keys and values together.
    everyone = local.new_empty(group.degree * len(local))
    with group.counting("context_gather", everyone):
        work = all_gather_single(
            everyone, local, group=group.process_group, async_op=True
        )

    def finish() -> Pair:
        if work is not None:
            with group.counting("context_gather", None):
                work.wait()
        # Each rank's piece has its keys, then its values.
        parts = everyone.view(group.degree, -1).split(
            [k_BLKD.numel(), v_BLKE.numel()], 1
        )
        shapes = (
            (plan.length, len(like), *like.shape[2:]) for like in (k_BLKD, v_BLKE)
        )
        k, v = (
            plan.in_sequence_order(part.reshape(shape))
            for part, shape in zip(parts, shapes, strict=True)
        )
        return k.transpose(0, 1), v.transpose(0, 1)

    return finish


def reduce_gradients(
    gradients: list[Tensor], plan: SequencePlan, group: ContextGroup
) -> Callable[[], Pair]:
    """Start the reduce-scatter of the unsplit sequence's gradients; the returned
    function waits for those of this rank's tokens.

    Args:
        gradients: of keys [B, S, K, D] and values [B, S, K, E]; the list is emptied, so
            that each is freed when it is copied.
    """
    if group.process_group is None:
        dk, dv = gradients
        return lambda: (dk, dv)
    shapes = [(plan.local_length, len(each), *each.shape[2:]) for each in gradients]
    sizes = [each.numel() // group.degree for each in gradients]
    # One buffer, a row for each rank: the gradients of its keys, then of its values.
    sent_RN = gradients[0].new_empty(group.degree, sum(sizes))
    for columns in sent_RN.split(sizes, 1):
        columns.copy_(
            plan.by_rank(gradients.pop(0).transpose(0, 1)).reshape(group.degree, -1)
        )
    received = sent_RN.new_empty(sent_RN.shape[1])
    work = _reduce_scatter(received, sent_RN, group)
    read = [] if work is None else [sent_RN]  # until it was waited for

    def finish() -> Pair:
        if work is not None:
            with group.counting("context_reduce", None):
                work.wait()
        read.clear()
        dk, dv = (
            part.view(shape).transpose(0, 1)
            for part, shape in zip(received.split(sizes), shapes, strict=True)
        )
        return dk, dv

    return finish


def _reduce_scatter(
    received: Tensor, sent_RN: Tensor, group: ContextGroup
) -> dist.Work | None:
    """Sum rows of ``sent_RN`` over the ranks: row r into rank r's ``received`` [N]."""
    assert group.process_group is not None
    # The backend's own reduce-scatter, or sums of messages where that is faster or
    # missing.
    if not prefers_messages(group.process_group, sent_RN.device):
        with group.counting("context_reduce", sent_RN):
            return reduce_scatter_single(
                received, sent_RN.view(-1), group=group.process_group, async_op=True
            )
    with group.counting("context_reduce", sent_RN):
        sum_rows(received, sent_RN, group.process_group)
    return None

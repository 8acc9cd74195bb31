"""One-stage all-gather, reduce-scatter and all-reduce over a partition or replication
group, metered.

The first two are communication objects in the sense of FSDP2
(``FSDPModule.set_custom_all_gather`` and ``set_custom_reduce_scatter``): ``allocate``
makes the buffers, the call moves the data. FSDP2 hands the input of an all-gather over
as a view into its output, at the slot of this rank.

Shape letters: P ranks of the group, N elements of one shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smp_core.cluster import prefers_messages
from smp_core.comm.deferred import Deferred, finish_later
from smp_core.comm.exchange import GATHER, REDUCE, start_gather_rows, start_sum_rows
from smp_core.comm.meter import CommMeter, LinkClass
from smp_core.torch_facts import (
    all_gather_single,
    reduce_scatter_single,
)


class CommObject:
    """The base of communication objects: the meter, plain allocation and the global
    ranks of a group.

    Args:
        deferred: of gathers: return something to wait for without ``async_op`` too,
            which FSDP2 never sets; it waits for what it gets. For backends without
            streams.
        prefix: of the kinds that it is metered as.
    """

    def __init__(
        self, meter: CommMeter, *, deferred: bool = False, prefix: str = ""
    ) -> None:
        self.meter = meter
        self._deferred = deferred
        self._prefix = prefix
        # Ranks and link of each group that was ever asked for.
        self._ranks: dict[dist.ProcessGroup, list[int]] = {}
        self._links: dict[dist.ProcessGroup, LinkClass] = {}

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def ranks_of(self, group: dist.ProcessGroup) -> list[int]:
        if group not in self._ranks:
            self._ranks[group] = dist.get_process_group_ranks(group)
        return self._ranks[group]

    def link_of(self, group: dist.ProcessGroup) -> LinkClass:
        """Return the class of the group's slowest link."""
        if group not in self._links:
            self._links[group] = (
                "inter"
                if self.meter.topology.spans_nodes(self.ranks_of(group))
                else "intra"
            )
        return self._links[group]

    def counted_to_its_end(
        self, work: dist.Work | None, kind: str, ranks: Sequence[int]
    ) -> dist.Work | None:
        """Let the seconds that are spent waiting for ``work`` of a ring count too; its
        bytes have been counted."""
        if work is None:
            return None

        def finish() -> None:
            with self.meter.ring(kind, ranks, 0, new_call=False):
                work.wait()

        return Deferred(finish)


def average_divisor(op: Any, group_size: int) -> int:
    """Return the number a sum over ``group_size`` ranks has to be divided by to honour
    ``op`` (SUM or AVG).

    Raises:
        NotImplementedError: for any other reduction; gradients are only ever summed or
            averaged.
    """
    if op == dist.ReduceOp.SUM:
        return 1
    if op == dist.ReduceOp.AVG:
        return group_size
    raise NotImplementedError(
        f"reduce-scatter with {op}: only ReduceOp.SUM and ReduceOp.AVG are defined here"
    )


class FlatAllGather(CommObject):
    """All-gather in one stage: ``output[P * N]`` from ``input[N]`` of every rank of
    ``group``.

    On gloo it is made of messages inside a node, straight into their places, and is
    gloo's ring where the group spans nodes, whose links a ring crosses once.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        ranks, wait_later = self.ranks_of(group), async_op or self._deferred
        # Inside a node every rank reaches every other one directly.
        inside = len(ranks) > 1 and self.link_of(group) == "intra"
        if inside and prefers_messages(group, output_tensor.device):
            return self._by_messages(
                output_tensor.view(len(ranks), -1), input_tensor, group, wait_later
            )
        n_bytes = output_tensor.nbytes
        with self.meter.ring(f"{self._prefix}all_gather", ranks, n_bytes):
            work = all_gather_single(
                output_tensor, input_tensor, group=group, async_op=wait_later
            )
        return self.counted_to_its_end(work, f"{self._prefix}all_gather", ranks)

    def _by_messages(
        self,
        output_PN: Tensor,
        input_N: Tensor,
        group: dist.ProcessGroup,
        wait_later: bool,
    ) -> dist.Work | None:
        mine_N = output_PN[dist.get_rank(group)]
        # FSDP2 hands over a view of this very place; others may not.
        if input_N.data_ptr() != mine_N.data_ptr():
            mine_N.copy_(input_N)
        shard_bytes = mine_N.nbytes
        sent = [
            (rank, shard_bytes)
            for rank in self.ranks_of(group)
            if rank != self.meter.rank
        ]
        with self.meter.point_to_point(f"{self._prefix}all_gather", sent, "intra"):
            works = start_gather_rows(output_PN, group, GATHER)

        def finish() -> None:
            with self.meter.point_to_point(
                f"{self._prefix}all_gather", [], "intra", new_call=False
            ):
                for work in works:
                    work.wait()

        return finish_later(finish, wait_later)


class FlatReduceScatter(CommObject):
    """Reduce-scatter in one stage: ``output[N]`` is this rank's slot of the reduced
    ``input[P * N]``."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        ranks = self.ranks_of(group)
        # The library reduces by itself, also to a mean.
        if not prefers_messages(group, input_tensor.device):
            n_bytes = input_tensor.nbytes
            with self.meter.ring(f"{self._prefix}reduce_scatter", ranks, n_bytes):
                work = reduce_scatter_single(
                    output_tensor, input_tensor, op=op, group=group, async_op=async_op
                )
            return self.counted_to_its_end(work, f"{self._prefix}reduce_scatter", ranks)

        # By messages: a sum in the order of ranks, and the division behind it.
        divisor = average_divisor(op, len(ranks))
        shard_bytes = output_tensor.nbytes
        sent = [(rank, shard_bytes) for rank in ranks if rank != self.meter.rank]
        link = self.link_of(group)
        with self.meter.point_to_point(f"{self._prefix}reduce_scatter", sent, link):
            add_up = start_sum_rows(
                output_tensor, input_tensor.view(len(ranks), -1), group, REDUCE
            )

        def finish() -> None:
            with self.meter.point_to_point(
                f"{self._prefix}reduce_scatter", [], link, new_call=False
            ):
                add_up()
            if divisor != 1:
                output_tensor.div_(divisor)

        return finish_later(finish, async_op)


class FlatAllReduce(CommObject):
    """Sum over a replication group, in place; with ``async_op`` something to wait for
    is returned."""

    def __call__(
        self, tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        ranks = self.ranks_of(group)
        with self.meter.ring(f"{self._prefix}all_reduce", ranks, tensor.nbytes):
            work = dist.all_reduce(
                tensor, op=dist.ReduceOp.SUM, group=group, async_op=async_op
            )
        return self.counted_to_its_end(work, f"{self._prefix}all_reduce", ranks)


class FlatMaxReduce(CommObject):
    """Maximum over a group, in place; metered as ``"amax_all_reduce"``, for FP8
    scales."""

    def __call__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        with self.meter.ring(
            "amax_all_reduce",
            self.ranks_of(group),
            tensor.nbytes,
        ):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)

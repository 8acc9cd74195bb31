"""All-gather and reduce-scatter in two stages for partition groups that span nodes
(MiCS, arXiv 2205.00119, 3.2).

A partition group of P = M * K ranks covers M nodes with K ranks each, in node order. A
flat ring over it carries (P - 1) / P of the tensor across every node's link; in two
stages it is (P - K) / P:

    all-gather       1. between nodes: K gathers side by side, each over the M ranks of equal local rank;
                     2. inside a node: M gathers, each straight into its node's contiguous part of the output.
    reduce-scatter   1. inside a node: M reduce-scatters, one for each node's part of the input;
                     2. between nodes: the M partial sums of this local rank's slot are added up.

On gloo each stage is made of messages into their final place (see
:mod:`smp_core.comm.exchange`); elsewhere of the library's collectives. The
reduce-scatter adds in another order than a flat one, so it agrees to rounding, not
bitwise.

Shape letters: M nodes, K ranks per node, N elements of one shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from smp_core.cluster import prefers_messages
from smp_core.comm.deferred import finish_later
from smp_core.comm.exchange import (
    GATHER,
    REDUCE,
    exchange,
    gather_each,
    reduce_each,
    start_exchange,
    sum_in_order,
    sum_rows,
)
from smp_core.comm.flat import CommObject, FlatAllGather, average_divisor
from smp_core.comm.meter import CommMeter
from smp_core.torch_facts import (
    all_gather_single,
    reduce_scatter_single,
)


class _TwoStage(CommObject):
    """The two sub-groups of this rank's partition group.

    Args:
        intra_group: the K ranks of the partition group on this node.
        inter_group: the M ranks of the partition group with this rank's local rank.
    """

    def __init__(
        self,
        meter: CommMeter,
        intra_group: dist.ProcessGroup,
        inter_group: dist.ProcessGroup,
        *,
        deferred: bool = False,
    ) -> None:
        super().__init__(meter, deferred=deferred)
        self.intra_group, self.inter_group = intra_group, inter_group
        self.nodes, self.local_ranks = (
            dist.get_world_size(inter_group),
            dist.get_world_size(intra_group),
        )
        self.node, self.local_rank = (
            dist.get_rank(inter_group),
            dist.get_rank(intra_group),
        )

    def _check(self, group: dist.ProcessGroup) -> None:
        if dist.get_world_size(group) != self.nodes * self.local_ranks:
            raise ValueError(
                f"a two-stage collective made for {self.nodes} nodes x {self.local_ranks} ranks was called with a "
                f"group of {dist.get_world_size(group)} ranks"
            )


class HierarchicalAllGather(_TwoStage):
    """Bit-identical to the flat all-gather: ``output[M * K * N]`` from ``input[N]`` of
    every rank.

    Over a smaller group, which a secondary shard is gathered over, it has one stage.

    Args:
        deferred: on gloo, return a handle as soon as the stage between nodes is under
            way.
    """

    def __init__(
        self,
        meter: CommMeter,
        intra_group: dist.ProcessGroup,
        inter_group: dist.ProcessGroup,
        *,
        deferred: bool = False,
    ) -> None:
        super().__init__(meter, intra_group, inter_group, deferred=deferred)
        self._flat = FlatAllGather(meter, deferred=deferred)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if dist.get_world_size(group) != self.nodes * self.local_ranks:
            return self._flat(output_tensor, input_tensor, group, async_op)
        output_MKN = output_tensor.view(self.nodes, self.local_ranks, -1)
        if not prefers_messages(group, output_tensor.device):
            self._by_collectives(output_MKN, input_tensor)
            return None
        finish = self._by_messages(output_MKN, input_tensor)
        return finish_later(finish, self._deferred)

    def _by_messages(self, output_MKN: Tensor, input_N: Tensor) -> Callable[[], None]:
        """Start the stage between nodes; what is returned does the rest."""
        node_ranks = self.ranks_of(self.inter_group)
        local_ranks = self.ranks_of(self.intra_group)
        shard_bytes = input_N.nbytes
        me, here = self.local_rank, self.node
        if input_N.data_ptr() != output_MKN[here, me].data_ptr():
            output_MKN[here, me].copy_(input_N)
        mine = output_MKN[here, me]

        # Stage 1, between nodes: this rank's shard to its peers.
        nodes = [m for m in range(self.nodes) if m != here]
        sent = [(node_ranks[m], shard_bytes) for m in nodes]
        sends = [(mine, node_ranks[m]) for m in nodes]
        receives = [(output_MKN[m, me], node_ranks[m]) for m in nodes]
        with self.meter.point_to_point("all_gather", sent, "inter"):
            works = start_exchange(sends, receives, self.inter_group, GATHER)

        def finish() -> None:
            with self.meter.point_to_point("all_gather", [], "inter", new_call=False):
                for work in works:
                    work.wait()
            # Stage 2, inside the node: the shards of all nodes to the other ranks here.
            peers = [k for k in range(self.local_ranks) if k != me]
            sent = [(local_ranks[k], shard_bytes * self.nodes) for k in peers]
            sends = [
                (output_MKN[m, me], local_ranks[k])
                for k in peers
                for m in range(self.nodes)
            ]
            receives = [
                (output_MKN[m, k], local_ranks[k])
                for k in peers
                for m in range(self.nodes)
            ]
            with self.meter.point_to_point("all_gather", sent, "intra", new_call=False):
                exchange(sends, receives, self.intra_group, GATHER)

        return finish

    def _by_collectives(self, output_MKN: Tensor, input_N: Tensor) -> None:
        shard_bytes = input_N.nbytes
        column_MN = input_N.new_empty(self.nodes, input_N.numel())
        with self.meter.ring(
            "all_gather", self.ranks_of(self.inter_group), shard_bytes * self.nodes
        ):
            all_gather_single(column_MN.view(-1), input_N, group=self.inter_group)
        node_bytes = shard_bytes * self.local_ranks * self.nodes
        with self.meter.ring(
            "all_gather", self.ranks_of(self.intra_group), node_bytes, new_call=False
        ):
            gather_each(
                [node_KN.view(-1) for node_KN in output_MKN],
                list(column_MN),
                self.intra_group,
            )


class HierarchicalReduceScatter(_TwoStage):
    """A reduce-scatter in two stages: ``output[N]`` is this rank's slot of the reduced
    ``input[M * K * N]``.

    ``op`` is SUM or AVG."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._check(group)
        # FSDP2 asks for a sum, or a mean: it is divided once, at the end.
        divisor = average_divisor(op, self.nodes * self.local_ranks)
        partial_MN = self.sum_inside(
            input_tensor.view(self.nodes, self.local_ranks, -1)
        )
        self._sum_between(output_tensor, partial_MN)
        if divisor != 1:
            output_tensor /= divisor
        return None

    def sum_inside(self, input_MKN: Tensor) -> Tensor:
        """Return the sums over this node for the slots of this rank's peers between
        nodes [M, N]."""
        # By the library: a reduce-scatter for each node's part, in one launch.
        if not prefers_messages(self.intra_group, input_MKN.device):
            partial_MN = input_MKN.new_empty(self.nodes, input_MKN.shape[2])
            n_bytes = input_MKN.nbytes
            with self.meter.ring(
                "reduce_scatter", self.ranks_of(self.intra_group), n_bytes
            ):
                reduce_each(
                    list(partial_MN),
                    [node_KN.view(-1) for node_KN in input_MKN],
                    self.intra_group,
                )
            return partial_MN
        # By messages: each peer sends what is this rank's, which is summed in the order
        # of ranks.
        local_ranks, me = self.ranks_of(self.intra_group), self.local_rank
        received_KMN = input_MKN.new_empty(
            self.local_ranks, self.nodes, input_MKN.shape[2]
        )
        received_KMN[me] = input_MKN[:, me]
        peers = [k for k in range(self.local_ranks) if k != me]
        sent = [
            (local_ranks[k], received_KMN[k].numel() * received_KMN.element_size())
            for k in peers
        ]
        sends = [
            (input_MKN[m, k], local_ranks[k]) for k in peers for m in range(self.nodes)
        ]
        receives = [
            (received_KMN[k, m], local_ranks[k])
            for k in peers
            for m in range(self.nodes)
        ]
        with self.meter.point_to_point("reduce_scatter", sent, "intra"):
            exchange(sends, receives, self.intra_group, REDUCE)
            partial_MN = received_KMN[0]
            sum_in_order(list(received_KMN), partial_MN)
        return partial_MN

    def _sum_between(self, output_N: Tensor, partial_MN: Tensor) -> None:
        node_ranks = self.ranks_of(self.inter_group)
        # By the library, whose order of summation is its own.
        if not prefers_messages(self.inter_group, partial_MN.device):
            n_bytes = partial_MN.nbytes
            with self.meter.ring("reduce_scatter", node_ranks, n_bytes, new_call=False):
                reduce_scatter_single(
                    output_N, partial_MN.view(-1), group=self.inter_group
                )
            return
        sent = [
            (rank, output_N.nbytes) for rank in node_ranks if rank != self.meter.rank
        ]
        with self.meter.point_to_point("reduce_scatter", sent, "inter", new_call=False):
            sum_rows(output_N, partial_MN, self.inter_group, REDUCE)

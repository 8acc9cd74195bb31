"""Reduce-scatters that cross nodes in 8 or 4 bits (ZeRO++, arXiv 2306.10209, 3.3: qgZ).

The stage inside a node is exact. Between nodes every term travels encoded to its owner,
which adds up in float32 (:mod:`smp_core.comm.encoded_sum`): one encoding per step of
the way, whatever the number of nodes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smp_core.codecs import Codec
from smp_core.comm.encoded_sum import sum_at_owners, wide_copy
from smp_core.comm.exchange import REDUCE
from smp_core.comm.flat import CommObject, average_divisor
from smp_core.comm.hierarchical import HierarchicalReduceScatter
from smp_core.comm.meter import CommMeter


class QuantizedReduceScatter(CommObject):
    """One unit's ``output[N]``, this rank's slot of the reduced ``input[P * N]``;
    ``op`` is SUM or AVG.

    Args:
        group: the partition group.
        stages: (its ranks on this node, its ranks with this local rank); None: one
            stage, all of it encoded.
        error_feedback: whether what was rounded off is added to the next micro-batch's
            terms.
    """

    def __init__(
        self,
        meter: CommMeter,
        codec: Codec,
        group: dist.ProcessGroup,
        stages: tuple[dist.ProcessGroup, dist.ProcessGroup] | None,
        *,
        error_feedback: bool = False,
    ) -> None:
        super().__init__(meter)
        self._codec, self._error_feedback = codec, error_feedback
        self._inside = (
            None if stages is None else HierarchicalReduceScatter(meter, *stages)
        )
        self._between = group if stages is None else stages[1]
        self.residual: Tensor | None = None
        """What was rounded off the terms sent last [M, N]; None: without error
        feedback, or nothing was sent yet."""
        self.fallbacks: Tensor | int = 0
        """Terms that held inf or nan, as
        :attr:`smp_core.comm.replica_hop.ReplicaHop.fallbacks`."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        divisor = average_divisor(op, dist.get_world_size(group))
        # Stage 1, inside the node, as numbers.
        if self._inside is None:
            partial_MN = input_tensor.view(dist.get_world_size(group), -1)
        else:
            partial_MN = self._inside.sum_inside(
                input_tensor.view(self._inside.nodes, self._inside.local_ranks, -1)
            )
        # Stage 2, between nodes, in codes.
        parts_MN = wide_copy(partial_MN)
        # Remainders begin as zeros, and again where the unit's size has changed.
        if self._error_feedback and (
            self.residual is None or self.residual.shape != parts_MN.shape
        ):
            self.residual = torch.zeros_like(parts_MN)
        self.fallbacks = self.fallbacks + sum_at_owners(
            parts_MN,
            self._codec,
            self._between,
            self.meter,
            kind="reduce_scatter",
            tag=REDUCE,
            residual_MS=self.residual,
            new_call=self._inside is None,
        )
        total = parts_MN[dist.get_rank(self._between)]
        # The sum is in float32; the output in the dtype that FSDP2 wants.
        output_tensor.copy_(total if divisor == 1 else total / divisor)
        return None

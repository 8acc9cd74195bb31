"""Secondary shards: between forward and backward a smaller group holds the unsharded
parameters, a part each.

What ``reshard_after_forward=<int>`` of FSDP2 and hpZ of ZeRO++ (arXiv 2306.10209) do,
as a communication object: the gather of a forward leaves this rank's part of its output
behind, and the gather of the backward that follows goes over the smaller group (the
ranks of a node, say) from these parts. Parts are stretches of what was gathered, in
whatever form the parameters are sent and however their layers are split.

Shape letters: P ranks of the partition group, K of the smaller one, N elements of one
shard.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from smp_core.comm.deferred import Deferred
from smp_core.torch_facts import streams


class Gathers(Protocol):
    """The unit whose gathers these are, as far as it has to be known.

    Attributes:
        leaves_parts: whether the gather that begins is of a forward that a backward
            pass may follow.
        reads_parts: whether it may read what the forward before left: it is of a
            backward pass, or of a forward that runs ahead of one, with the same
            weights.
    """

    @property
    def leaves_parts(self) -> bool: ...

    @property
    def reads_parts(self) -> bool: ...


class SecondaryGather:
    """Gathers a unit with ``made``, and from the parts that it left behind.

    Args:
        made: the communication object of the unit's gathers, over any group that it is
            given.
        holders: the K neighbours in the partition group that hold the parts.

    Attributes:
        part: this rank's, between forward and backward: 1-D, of the dtype that is
            gathered. None: there is none.
    """

    def __init__(self, made: Any, holders: dist.ProcessGroup, unit: Gathers) -> None:
        self._made = made
        self._holders = holders
        self._unit = unit
        self._degree, self._place = dist.get_world_size(holders), dist.get_rank(holders)
        self.part: Tensor | None = None

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._made.allocate(*args, **kwargs)

    def forget(self) -> None:
        """Drop the part that is held."""
        self.part = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``output[P * N]`` from ``input[N]`` of every rank of ``group``, or
        from ``[P * N / K]`` of the holders."""
        part, leaves = self.part, self._unit.leaves_parts
        work: dist.Work | None
        # Backward, or a forward ahead, with the weights of the forward that left the
        # part.
        if part is not None and self._unit.reads_parts:
            streams.used_here(part)
            work = self._made(output_tensor, part, self._holders, async_op)
            self.part = part if leaves else None
            return work
        # A new gather over the whole group; the old part is of older weights.
        self.part = None
        work = self._made(output_tensor, input_tensor, group, async_op)
        return self._left_behind(work, output_tensor) if leaves else work

    def _left_behind(
        self, work: dist.Work | None, output_tensor: Tensor
    ) -> dist.Work | None:
        """Keep this rank's part of the output as soon as that is there."""

        # As soon as the output is there, or now.
        def keep() -> None:
            self.part = output_tensor.view(self._degree, -1)[self._place].clone()

        def finish() -> None:
            assert work is not None
            work.wait()
            keep()

        if work is not None:
            return Deferred(finish)
        keep()
        return None

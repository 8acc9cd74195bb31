"""Exchange: one all-to-all of rows between ranks, as an operator, so that recomputation
keeps what it returns instead of sending again. Its gradient goes the way back. Bytes
are counted as they leave: what stays on a rank is not sent.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from smp_core.comm import CommMeter, LinkClass
from smp_core.plan import keep_outputs_of
from smp_core.watch import here

DISPATCH, COMBINE = "expert_dispatch", "expert_combine"

_numbers = itertools.count()
_by_number: WeakValueDictionary[int, Exchange] = WeakValueDictionary()


class Exchange:
    """All-to-alls between some ranks.

    Args:
        group: the ranks, on whose communicator nothing else runs.

    Attributes:
        degree: the number of ranks.
        rank: this one's place among them.
    """

    def __init__(self, group: dist.ProcessGroup, meter: CommMeter) -> None:
        self._group, self._meter = group, meter
        self.degree, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._number = next(_numbers)
        _by_number[self._number] = self

    def equal_parts(self, numbers: torch.Tensor) -> torch.Tensor:
        """Send each rank its part of ``numbers`` [degree * n]; return those that
        arrive, [degree * n]."""
        return _equal_parts(numbers, self._number)

    def dispatch(
        self, rows: torch.Tensor, leaving: list[int], arriving: list[int]
    ) -> torch.Tensor:
        """Send rows [R, ...], sorted by rank, so many to and from each rank, on their
        way to experts."""
        return _exchange(rows, leaving, arriving, self._number, DISPATCH)

    def combine(
        self, rows: torch.Tensor, arrived: list[int], left: list[int]
    ) -> torch.Tensor:
        """Send what was made of rows that arrived back; it comes in the order in which
        they had left."""
        return _exchange(rows, arrived, left, self._number, COMBINE)

    def run(
        self, rows: torch.Tensor, leaving: list[int], arriving: list[int], kind: str
    ) -> torch.Tensor:
        """Run one all-to-all, metered."""
        arrived = rows.new_empty((sum(arriving), *rows.shape[1:]))
        with self.sending(leaving, row_bytes(rows), kind):
            dist.all_to_all_single(
                arrived, rows.contiguous(), arriving, leaving, group=self._group
            )
        return arrived

    @contextlib.contextmanager
    def sending(self, leaving: list[int], size: int, kind: str) -> Iterator[None]:
        """Meter so many rows of ``size`` bytes that leave to each rank meanwhile."""
        # What stays on this rank is no message.
        sizes = zip(self._ranks, leaving, strict=True)
        sent = [
            (rank, count * size)
            for rank, count in sizes
            if rank != self._meter.rank and count
        ]
        link: LinkClass = (
            "inter" if self._meter.topology.spans_nodes(self._ranks) else "intra"
        )
        with (
            self._meter.point_to_point(kind, sent, link),
            here.waiting("tokens for experts"),
        ):
            yield


def row_bytes(rows: torch.Tensor) -> int:
    """Return the bytes of one of some rows; 0 without any."""
    return rows[:1].numel() * rows.element_size()


@torch.library.custom_op("smp::expert_counts", mutates_args=())
def _equal_parts(own: torch.Tensor, number: int) -> torch.Tensor:
    exchange = _by_number[number]
    # As many numbers to each rank as from it, so nothing has to be told before.
    shares = [own.shape[0] // exchange.degree] * exchange.degree
    return exchange.run(own, shares, shares, DISPATCH)


@_equal_parts.register_fake
def _(own: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(own)


@torch.library.custom_op("smp::expert_exchange", mutates_args=())
def _exchange(
    rows: torch.Tensor, leaving: list[int], arriving: list[int], number: int, kind: str
) -> torch.Tensor:
    return _by_number[number].run(rows, leaving, arriving, kind)


@_exchange.register_fake
def _(
    rows: torch.Tensor, leaving: list[int], arriving: list[int], number: int, kind: str
) -> torch.Tensor:
    return rows.new_empty((sum(arriving), *rows.shape[1:]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *ctx.way = inputs


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    leaving, arriving, number, kind = ctx.way
    return _exchange(gradient, arriving, leaving, number, kind), None, None, None, None


_exchange.register_autograd(_backward, setup_context=_save)
keep_outputs_of(
    torch.ops.smp.expert_counts, torch.ops.smp.expert_exchange, in_all_modes=True
)

"""FlatDispatch: rows of tokens to the ranks of their experts, and what experts made of them back, in one all-to-all
each way.

The exchanges are operators, so that recomputation keeps what they return instead of sending again. Their gradients go
the way back. Bytes are counted as they leave: rows for the rank itself are not sent. Shape letters: E experts of the
layer, D ranks that divide them, T tokens, R rows, H features.
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from smp_core.comm import CommMeter
from smp_core.plan import keep_outputs_of
from smp_core.watch import here

DISPATCH, COMBINE = "expert_dispatch", "expert_combine"

_numbers = itertools.count()
_by_number: WeakValueDictionary[int, FlatDispatch] = WeakValueDictionary()


class FlatDispatch:
    """All-to-alls between the ranks that divide a layer's experts.

    Args:
        group: the ranks, on whose communicator nothing else runs.

    Attributes:
        degree: D, the number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup, meter: CommMeter) -> None:
        self._group, self._meter = group, meter
        self.degree, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._number = next(_numbers)
        _by_number[self._number] = self

    def counts(self, own_E: torch.Tensor) -> torch.Tensor:
        """Return how many rows arrive, [E]: from each rank in order, for each of this rank's experts.

        Args:
            own_E: how many rows of this rank go to each expert, int64.
        """
        return _counts(own_E, self._number)

    def send(self, rows_RH: torch.Tensor, leaving: list[int], arriving: list[int]) -> torch.Tensor:
        """Send rows, sorted by their ranks, to the experts; so many for and from each rank. Returns what arrives."""
        return _exchange(rows_RH, leaving, arriving, self._number, DISPATCH)

    def bring_back(self, rows_RH: torch.Tensor, arrived: list[int], left: list[int]) -> torch.Tensor:
        """Send what experts made of rows back to where these came from. Returns it in the order of what was sent."""
        return _exchange(rows_RH, arrived, left, self._number, COMBINE)

    def exchange(self, rows: torch.Tensor, leaving: list[int], arriving: list[int], kind: str) -> torch.Tensor:
        """Run one all-to-all, metered."""
        arrived = rows.new_empty((sum(arriving), *rows.shape[1:]))
        row_bytes = rows[:1].numel() * rows.element_size() if rows.shape[0] else 0
        sizes = zip(self._ranks, leaving, strict=True)
        sent = [(rank, count * row_bytes) for rank, count in sizes if rank != self._meter.rank and count]
        link = "inter" if self._meter.topology.spans_nodes(self._ranks) else "intra"
        with self._meter.point_to_point(kind, sent, link), here.waiting("tokens of other ranks for experts"):
            dist.all_to_all_single(arrived, rows.contiguous(), arriving, leaving, group=self._group)
        return arrived


@torch.library.custom_op("smp::expert_counts", mutates_args=())
def _counts(own: torch.Tensor, number: int) -> torch.Tensor:
    dispatch = _by_number[number]
    share = [own.shape[0] // dispatch.degree] * dispatch.degree
    return dispatch.exchange(own, share, share, DISPATCH)


@_counts.register_fake
def _(own: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(own)


@torch.library.custom_op("smp::expert_exchange", mutates_args=())
def _exchange(
    rows: torch.Tensor, leaving: list[int], arriving: list[int], number: int, kind: str
) -> torch.Tensor:
    return _by_number[number].exchange(rows, leaving, arriving, kind)


@_exchange.register_fake
def _(rows: torch.Tensor, leaving: list[int], arriving: list[int], number: int, kind: str) -> torch.Tensor:
    return rows.new_empty((sum(arriving), *rows.shape[1:]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *ctx.way = inputs


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    leaving, arriving, number, kind = ctx.way
    return _exchange(gradient, arriving, leaving, number, kind), None, None, None, None


_exchange.register_autograd(_backward, setup_context=_save)
keep_outputs_of(torch.ops.smp.expert_counts, torch.ops.smp.expert_exchange, in_all_modes=True)

"""Whole matrices, each on the one rank that works on it: there and back in one exchange
each.

The rows of a matrix lie on P ranks, torch's chunks of dim 0. Each matrix has an owner,
to which all ranks send their rows; the owner works on the whole matrix and sends every
rank its rows of the result. Owners are chosen so that all have about as much to do, the
largest matrices first. Both ways together the ranks send 2(P-1)/P of the matrices'
bytes, where an all-gather for each of them would send P-1 times the bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from smp_core.comm import CommMeter, LinkClass, Message
from smp_core.comm.exchange import exchange

KIND = "muon"
"""As what the meter counts these messages."""


class StepsTogether(torch.optim.Optimizer):
    """The base class of our optimizers whose steps are collective over the partition
    group. They step each tensor by itself, and not in host memory, where ranks cannot
    exchange anything.

    Attributes:
        meter: counts what is sent; set when the optimizer is prepared for a model.
        exchanged: what ranks send one another in a step, in words.
    """

    meter: CommMeter | None = None
    exchanged: ClassVar[str] = "matrices"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        Raises:
            ValueError: a parameter is of complex numbers, which torch's AdamW alone
                steps, in a group of that algorithm.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        strange = [p.dtype for p in group["params"] if not p.is_floating_point()]
        if strange and group.get("algorithm") != "adamw":
            # The group is taken out again: the optimizer goes on without it.
            self.param_groups.pop()
            raise ValueError(
                f"{type(self).__name__} steps real numbers; {len(strange)} parameters are of {strange[0]}, which "
                "torch.optim.AdamW steps"
            )

    @staticmethod
    def planned_states(group: Mapping[str, Any]) -> int:
        """Return the states of a parameter's shape that a group keeps for each
        parameter, for the memory plan."""
        return 1


@dataclass(frozen=True)
class Matrix:
    """A whole matrix inside a sharded parameter: all of it, or some of its rows or
    columns (a head, the queries of a fused projection).

    Attributes:
        parameter: its place in the list of parameters.
        n_rows: of the parameter, which say how its rows are dealt out.
        rows, columns: (first, end) of the matrix in the whole parameter.
    """

    parameter: int
    n_rows: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    def rows_of(self, rank: int, degree: int) -> tuple[int, int]:
        """Return (first, end) of the matrix's rows that a rank holds, counted from the
        rank's first row."""
        # torch's chunks: equal ones, the last smaller or empty.
        chunk = -(-self.n_rows // degree)
        first = min(rank * chunk, self.n_rows)
        end = min((rank + 1) * chunk, self.n_rows)
        # The matrix may begin and end in the middle of what the rank holds.
        begin, stop = max(self.rows[0], first), min(self.rows[1], end)
        return (begin - first, stop - first) if begin < stop else (0, 0)

    def part_of(self, local: Tensor, rank: int, degree: int) -> Tensor:
        """Return this matrix's part of the rows [n, columns] that a rank holds, as a
        view."""
        first, end = self.rows_of(rank, degree)
        return local[first:end, self.columns[0] : self.columns[1]]


def deal(costs: Sequence[int], n_owners: int) -> list[int]:
    """Return the owner of each piece of work, by its cost: the largest first, each to
    whom has least so far."""
    loads = [0] * n_owners
    owners = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda piece: -costs[piece]):
        owner = loads.index(min(loads))
        owners[piece] = owner
        loads[owner] += costs[piece]
    return owners


class Owners:
    """The ranks of one group, and what each of them owns of some matrices.

    Args:
        cost: of work on a matrix of so many rows and columns.
        meter: counts what is sent; None: it is not counted.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        matrices: Sequence[Matrix],
        cost: Callable[[int, int], int],
        meter: CommMeter | None = None,
    ) -> None:
        # Dealt by cost, once for all steps.
        self._group, self._meter = group, meter
        self._rank, self._ranks = (
            dist.get_rank(group),
            dist.get_process_group_ranks(group),
        )
        self._degree = len(self._ranks)
        owners = deal([cost(*matrix.shape) for matrix in matrices], self._degree)
        self._owned_by: list[list[Matrix]] = [[] for _ in self._ranks]
        for matrix, owner in zip(matrices, owners, strict=True):
            self._owned_by[owner].append(matrix)

    def work(
        self,
        locals_: Sequence[Tensor],
        work: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> list[tuple[Matrix, Tensor]]:
        """Return this rank's rows of ``work(matrix)`` for each matrix, empty ones
        included. Collective over the group.

        Args:
            locals_: by parameter, this rank's rows [n, columns], of any dtype.
            work: on a whole matrix [rows, columns] of ``dtype``; returns one of the
                same shape and dtype.
            dtype: that matrices travel in, both ways.
        """
        mine = self._owned_by[self._rank]
        # Every rank counts the sizes itself: nothing else is sent for that.
        ranks = range(self._degree)
        device = locals_[0].device
        # Phase 1, to the owners: this rank's rows of all ranks' matrices go out, all
        # ranks' rows of its own come in.
        to_owners = [self._parts(locals_, owned) for owned in self._owned_by]
        of_mine = [self._sizes(mine, rank) for rank in ranks]
        arrived = self._exchange(
            to_owners, [sum(sizes) for sizes in of_mine], dtype, device
        )
        pieces = [
            rows.split(sizes) for rows, sizes in zip(arrived, of_mine, strict=True)
        ]
        # Phase 2: the work, on whole matrices.
        done = []
        for place, matrix in enumerate(mine):
            whole = torch.cat(
                [piece[place].view(-1, matrix.shape[1]) for piece in pieces]
            )
            done.append(
                work(whole).split([self._n_rows(matrix, rank) for rank in ranks])
            )
        # Phase 3: rows of the results go back to the ranks that hold them.
        of_owners = [self._sizes(owned, self._rank) for owned in self._owned_by]
        to_holders = []
        for rank in ranks:
            to_holders.append([rows[rank] for rows in done])
        returned = self._exchange(
            to_holders, [sum(sizes) for sizes in of_owners], dtype, device
        )
        results = []
        for owned, rows, sizes in zip(self._owned_by, returned, of_owners, strict=True):
            for matrix, piece in zip(owned, rows.split(sizes), strict=True):
                results.append((matrix, piece.view(-1, matrix.shape[1])))
        return results

    def _parts(
        self, locals_: Sequence[Tensor], matrices: Sequence[Matrix]
    ) -> list[Tensor]:
        """Return this rank's rows of each matrix."""
        return [
            each.part_of(locals_[each.parameter], self._rank, self._degree)
            for each in matrices
        ]

    def _sizes(self, matrices: Sequence[Matrix], rank: int) -> list[int]:
        """Return how many elements of each matrix a rank holds."""
        return [self._n_rows(each, rank) * each.shape[1] for each in matrices]

    def _n_rows(self, matrix: Matrix, rank: int) -> int:
        first, end = matrix.rows_of(rank, self._degree)
        return end - first

    def _exchange(
        self,
        pieces: Sequence[Sequence[Tensor]],
        sizes: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[Tensor]:
        """Send each rank the pieces for it; return what came from each rank, flat, of
        ``sizes`` elements."""
        # Pieces for one rank are one message, in the dtype of the work.
        sent: list[Tensor | None] = []
        for each in pieces:
            flat = [piece.reshape(-1).to(dtype) for piece in each]
            sent.append(torch.cat(flat) if flat else None)
        received = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
        # What this rank sends to itself stays where it is.
        own = sent[self._rank]
        if own is not None:
            received[self._rank] = own
        others = [place for place in range(self._degree) if place != self._rank]
        sends = [
            (rows, self._ranks[place])
            for place in others
            if (rows := sent[place]) is not None
        ]
        with self._counted(sends):
            exchange(
                sends,
                [(received[place], self._ranks[place]) for place in others],
                self._group,
            )
        return received

    def _counted(
        self, sends: Sequence[Message]
    ) -> contextlib.AbstractContextManager[None]:
        if self._meter is None:
            return contextlib.nullcontext()
        link: LinkClass = (
            "inter" if self._meter.topology.spans_nodes(self._ranks) else "intra"
        )
        return self._meter.point_to_point(
            KIND, [(to, rows.nbytes) for rows, to in sends], link
        )

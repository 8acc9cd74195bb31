"""The tokens of each rank, and the keys that each token sees: rectangles instead of
masks.

R ranks share sequences padded to S tokens, a multiple of 2R. Under "zigzag" the
sequence is cut into 2R chunks and rank r holds chunks r and 2R-1-r, so that every rank
has the same work under a causal mask (Llama 3, arXiv 2407.21783, section 3.3.2); under
"contiguous" it holds one piece of S/R tokens.

A row of the batch is a line of *documents* that do not see one another: packed texts,
and the runs of padding. Inside a document attention is causal or bidirectional, perhaps
with a window. So the part of a chunk that lies in one document sees one range of keys,
aligned at its end: a rectangle. Rectangles are enough, and no mask of S x S elements
exists.

The kernels take a plan as one small integer tensor, which holds all of it: it can be
saved for backward, is an ordinary input to ``torch.compile``, and is decoded once per
batch.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

Order = Literal["zigzag", "contiguous"]
_ORDERS: tuple[Order, ...] = ("zigzag", "contiguous")
Range = tuple[int, int]


@dataclass(frozen=True)
class KernelCall:
    """The queries of one chunk, and the keys that they see.

    Attributes:
        row: index in the batch; None: all rows, which are alike.
        queries: [start, end) in this rank's own tokens.
        keys: [start, end) in the whole sequence.
        segments: (queries, keys) of each document in turn; they fill both ranges.
    """

    row: int | None
    queries: Range
    keys: Range
    segments: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SequencePlan:
    """The layout of one batch over the ranks of a context group.

    Attributes:
        degree: ranks R that share the sequences.
        length: tokens S per row, padding included; a multiple of 2R.
        documents: for each row the starts of its documents, 0 first; a single entry
            when all rows are alike.
        order: the assignment of chunks to ranks.
        group: the number of the context group, with which
            :mod:`smp_core.context_parallel.key_value_exchange` has registered it.
    """

    degree: int
    length: int
    documents: tuple[tuple[int, ...], ...] = ((0,),)
    order: Order = "zigzag"
    group: int = 0

    def __post_init__(self) -> None:
        if self.order not in _ORDERS:
            raise ValueError(f"order={self.order!r}; allowed: 'zigzag', 'contiguous'")
        # A multiple of 2R under "contiguous" too, so that padding does not depend on
        # the order.
        if self.length <= 0 or self.length % (2 * self.degree):
            raise ValueError(
                f"a sequence of {self.length} tokens is not a multiple of 2 x {self.degree} ranks; pad it to "
                f"{padded_length(max(self.length, 1), self.degree)}"
            )
        for starts in self.documents:
            begins_at_0 = bool(starts) and starts[0] == 0
            rises = all(a < b for a, b in itertools.pairwise([*starts, self.length]))
            if not (begins_at_0 and rises):
                raise ValueError(
                    f"document starts {starts} do not rise from 0 to below {self.length}"
                )

    @property
    def local_length(self) -> int:
        """The tokens L of each rank."""
        return self.length // self.degree

    def chunks(self, rank: int) -> tuple[Range, ...]:
        """Return the ranges of the sequence that ``rank`` holds, in the order in which
        it holds them."""
        if self.order == "contiguous":
            return ((rank * self.local_length, (rank + 1) * self.local_length),)
        # Chunk r and its mirror image from the end, so that early and late tokens are
        # dealt equally.
        size = self.length // (2 * self.degree)
        return tuple(
            (i * size, (i + 1) * size) for i in (rank, 2 * self.degree - 1 - rank)
        )

    def positions(self, rank: int) -> Tensor:
        """Return the indices into the sequence of the tokens that ``rank`` holds:
        [S/R], int64, on CPU."""
        return torch.cat([torch.arange(*chunk) for chunk in self.chunks(rank)])

    def in_sequence_order(self, pieces: Tensor) -> Tensor:
        """Put the ranks' pieces, laid end to end along dim 0, into the sequence's
        order: [S, *]."""
        if self.order == "contiguous" or self.degree == 1:
            return pieces
        # Rank r holds chunks r and 2R-1-r: the second halves stand in reverse order.
        heads, tails = pieces.unflatten(0, (self.degree, 2, -1)).unbind(1)
        return torch.cat([heads, tails.flip(0)]).flatten(0, 1)

    def by_rank(self, sequence: Tensor) -> Tensor:
        """Reverse :meth:`in_sequence_order`: put [S, *] in the sequence's order into
        the ranks' pieces laid end to end.
        """
        if self.order == "contiguous" or self.degree == 1:
            return sequence
        heads, tails = sequence.unflatten(0, (2, self.degree, -1)).unbind(0)
        return torch.stack([heads, tails.flip(0)], 1).flatten(0, 2)

    def calls(
        self, rank: int, causal: bool, window: int | None
    ) -> tuple[KernelCall, ...]:
        """List the kernel calls that ``rank`` makes for one attention of every row.

        Args:
            causal: whether a token sees only those before it, and itself.
            window: the most tokens that a token sees, itself included; None: all.
                Causal only.
        """
        return _calls(self, rank, causal, window)

    def in_chunks(self, size: int, first: Sequence[Sequence[int]] = ()) -> SequencePlan:
        """Return a plan of the same tokens in which a token sees only its chunk of
        ``size`` positions: documents cut into pieces.

        Args:
            first: the position of each document's first token, for each row; one entry
                when all rows are alike. Default: 0. Chunks begin at multiples of
                ``size``.
        """
        if size < 1:
            raise ValueError(f"chunks of {size} positions; allowed: 1 or more")
        first = first or [[0] * len(starts) for starts in self.documents]
        pieces = []
        for row in range(max(len(first), len(self.documents))):
            # One entry stands for all rows, of documents as of positions.
            starts = self.documents[row % len(self.documents)]
            ends = [*starts[1:], self.length]
            positions = first[row % len(first)]
            cuts: list[int] = []
            for start, end, position in zip(starts, ends, positions, strict=True):
                # The first chunk may have begun before the document's first token here.
                tokens_in_first_chunk = size - position % size
                cuts += [start, *range(start + tokens_in_first_chunk, end, size)]
            pieces.append(tuple(cuts))
        # One entry for rows that are alike: one kernel call for all of them.
        rows_alike = len(set(pieces)) == 1
        return replace(self, documents=tuple(pieces[:1] if rows_alike else pieces))

    def encode(self) -> Tensor:
        """Encode the plan as one int64 tensor on CPU; :func:`decode` reads it."""
        # Counts of documents let the starts lie in one flat list.
        header = [
            self.group,
            self.degree,
            self.length,
            _ORDERS.index(self.order),
            len(self.documents),
        ]
        counts = [len(starts) for starts in self.documents]
        return torch.tensor(
            header + counts + [start for starts in self.documents for start in starts]
        )


def decode(encoded: Tensor) -> SequencePlan:
    """Return the plan in a tensor made by :meth:`SequencePlan.encode`.

    Raises:
        ValueError: it is no such tensor; one without values, for instance.
    """
    if (
        type(encoded) is not Tensor
        or encoded.device.type != "cpu"
        or not encoded.is_contiguous()
    ):
        raise ValueError(
            f"a plan of split sequences is a tensor on the CPU with values, not {type(encoded).__name__}"
        )
    # Not by an operator: one may be run without values.
    return _decode(ctypes.string_at(encoded.data_ptr(), encoded.nbytes))


def padded_length(length: int, degree: int) -> int:
    """Round a length up to a multiple of 2 x degree."""
    return -(-length // (2 * degree)) * 2 * degree


def document_starts(ids: Tensor) -> tuple[tuple[int, ...], ...]:
    """Find the starts of runs of one number, for each row of [B, S]; one entry when all
    rows are alike."""
    # A document begins where the number is another one than before.
    changes = ids[:, 1:] != ids[:, :-1]
    rows = tuple(
        (0, *(changes[row].nonzero().flatten() + 1).tolist()) for row in range(len(ids))
    )
    return rows[:1] if len(set(rows)) == 1 else rows


@lru_cache(maxsize=64)
def _decode(content: bytes) -> SequencePlan:
    numbers = memoryview(content).cast("q").tolist()
    # In the order of :meth:`SequencePlan.encode`.
    group, degree, length, order, rows = numbers[:5]
    counts, starts = numbers[5 : 5 + rows], numbers[5 + rows :]
    documents, at = [], 0
    for count in counts:
        documents.append(tuple(starts[at : at + count]))
        at += count
    return SequencePlan(degree, length, tuple(documents), _ORDERS[order], group)


@lru_cache(maxsize=256)
def _calls(
    plan: SequencePlan, rank: int, causal: bool, window: int | None
) -> tuple[KernelCall, ...]:
    calls = []
    for row, starts in enumerate(plan.documents):
        at = 0
        for chunk in plan.chunks(rank):
            rectangles = _rectangles(chunk, starts, plan.length, causal, window)
            size = chunk[1] - chunk[0]
            # Documents follow one another, and only the first can begin before the
            # chunk, only the last end after it: together their keys are one range.
            calls.append(
                KernelCall(
                    row=row if len(plan.documents) > 1 else None,
                    queries=(at, at + size),
                    keys=(rectangles[0][1][0], rectangles[-1][1][1]),
                    segments=tuple((q[1] - q[0], k[1] - k[0]) for q, k in rectangles),
                )
            )
            at += size
    return tuple(calls)


def _rectangles(
    chunk: Range, starts: Sequence[int], length: int, causal: bool, window: int | None
) -> list[tuple[Range, Range]]:
    """Return (queries, keys) in the unsplit sequence for every document that meets the
    chunk."""
    found = []
    for start, end in zip(starts, [*starts[1:], length], strict=True):
        # The part of the document that lies in this chunk.
        queries = (max(chunk[0], start), min(chunk[1], end))
        if queries[0] >= queries[1]:
            continue
        # A causal document is seen up to the last query, any other to its end.
        keys = (start, queries[1]) if causal else (start, end)
        if window is not None:
            # Keys before the first query's window are seen by none.
            keys = (max(keys[0], queries[0] - window + 1), keys[1])
        found.append((queries, keys))
    return found

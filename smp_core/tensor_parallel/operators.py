"""The autograd functions of tensor parallelism: what travels between the ranks of one
layer, in forward and backward.

An activation is in one of three states: *replicated* (every tensor rank has all of it,
and an equal gradient), *split* by features (heads, columns) or by tokens, or *partial*
(the ranks' values have to be added up). Each function goes from one state to another,
and its backward goes back with the gradient (Megatron-LM, arXiv 1909.08053; with tokens
split, arXiv 2205.05198):

    function           forward                            backward
    sum_gradient       nothing                            all-reduce
    gradient_once      nothing                            nothing; zeros on all ranks but the first
    sum_outputs        all-reduce                         nothing
    scatter_tokens     reduce-scatter of tokens           all-gather of tokens
    split_tokens       this rank's tokens                 all-gather of tokens
    join_tokens        all-gather of tokens               this rank's tokens
    gather_features    all-gather of features             this rank's features
    split_features     this rank's features               all-gather of features
    exchange_rows      rows of a weight that ranks use    the gradients of these rows, added up where they are stored

What column layers read goes through :mod:`smp_core.tensor_parallel.overlap`: an
all-gather of tokens or nothing, and backward a reduce-scatter or an all-reduce. Tokens
are dimension -2, features -1. Shape letters: T ranks of the axis, N tokens, H features,
R rows of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import register_sharding

from smp_core.comm import CommMeter, FlatAllGather, FlatAllReduce, FlatReduceScatter
from smp_core.config import Overlap

_KIND = "tensor_"


@dataclass(eq=False)
class TensorAxis:
    """The ranks that hold parts of one layer, with the objects that move data between
    them.

    Attributes:
        rank: this rank's place on the axis.
        degree: T, the number of ranks.
        length: tokens of the sequences of the present call, where they are split;
            padding to a multiple of T excluded.
        whole_logits: whether the head gathers its logits; False while a loss over the
            split vocabulary follows.
        draws: whether forward passes draw random numbers
            (:mod:`smp_core.tensor_parallel.randomness`).
        drawn: the seed of the present call of a block that does; None outside.
        overlap: what goes on while tokens are gathered and added up
            (:class:`smp_core.config.recipes.TensorParallel`).
    """

    group: dist.ProcessGroup
    meter: CommMeter
    overlap: Overlap = "sums"
    rank: int = field(init=False)
    degree: int = field(init=False)
    length: int = 0
    whole_logits: bool = True
    draws: bool = False
    drawn: int | None = None

    def __post_init__(self) -> None:
        self.rank, self.degree = (
            dist.get_rank(self.group),
            dist.get_world_size(self.group),
        )
        self._gather = FlatAllGather(self.meter, prefix=_KIND)
        self._reduce_scatter = FlatReduceScatter(self.meter, prefix=_KIND)
        self._all_reduce = FlatAllReduce(self.meter, prefix=_KIND)

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the axis."""
        return self._all_reduce.ranks_of(self.group)

    def begin(self, hidden: Tensor) -> None:
        """Note how many tokens [..., N, H] has, before they are split."""
        self.length = hidden.shape[-2]

    def all_reduce(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Return the sum over the ranks, whatever ``dim`` is."""
        return self.start_all_reduce(tensor, dim)()

    def maximum(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks."""
        largest = tensor.clone()
        n_bytes = largest.nbytes
        with self.meter.ring(f"{_KIND}all_reduce", self.ranks, n_bytes):
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return largest

    def holds_alike(self, values: Tensor) -> bool:
        """Return whether all ranks have the same float64 values [N], by a checksum and
        their number."""
        # Positions as weights, so that an exchange of two values shows; the second
        # number is the length.
        place = torch.arange(
            1, values.numel() + 1, device=values.device, dtype=torch.float64
        )
        mark = torch.stack([values @ place, place.sum()])
        return torch.equal(self.maximum(mark), -self.maximum(-mark))

    def other_batches(self) -> ValueError:
        """Return the error of ranks that were not given the same input."""
        return ValueError(
            "tensor ranks read different batches: those of tensor_parallel_degree="
            f"{self.degree} neighbours have to be the same; leave the sampler to the trainer, or give it "
            "num_replicas=mesh.data_size and rank=mesh.data_rank; for what the model draws itself (masks, noise, "
            "generate(do_sample=True)), torch.manual_seed(mesh.data_rank)"
        )

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """Return the ranks' parts side by side along a dimension."""
        return torch.cat(self.start_gather(part)().unbind(), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part, along a dimension, of the sum over the ranks."""
        return self.start_reduce_scatter(tensor, dim)()

    def start_gather(self, part: Tensor) -> Callable[[], Tensor]:
        """Start a gather; what is returned waits for it and returns the ranks' parts
        [T, *part]."""
        # Flat buffers: the collectives move bytes and know no shapes.
        part = part.contiguous()
        parts_T = part.new_empty((self.degree, *part.shape))
        return _waiting(
            self._gather(parts_T.view(-1), part.view(-1), self.group, async_op=True),
            parts_T,
            part,
        )

    def start_all_reduce(self, tensor: Tensor, dim: int = -1) -> Callable[[], Tensor]:
        """Start :meth:`all_reduce`; what is returned waits for it and returns the
        sum."""
        # The collective works in place, and the argument may be in use elsewhere.
        total = tensor.clone(memory_format=torch.contiguous_format)
        return _waiting(self._all_reduce(total, self.group, async_op=True), total)

    def start_reduce_scatter(self, tensor: Tensor, dim: int) -> Callable[[], Tensor]:
        """Start :meth:`reduce_scatter`; what is returned waits for it and returns this
        rank's part."""
        # Each rank's stretch has to lie contiguously for the flat collective.
        parts_T = torch.stack(tensor.chunk(self.degree, dim))
        part = torch.empty_like(parts_T[0])
        work = self._reduce_scatter(
            part.view(-1),
            parts_T.view(-1),
            self.group,
            dist.ReduceOp.SUM,
            async_op=True,
        )
        return _waiting(work, part, parts_T)

    def of_first(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the tensor on the first rank, zeros elsewhere, whatever ``dim`` is."""
        return tensor if self.rank == 0 else torch.zeros_like(tensor)

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part along a dimension."""
        return tensor.chunk(self.degree, dim)[self.rank].contiguous()


def _waiting(
    work: dist.Work | None, result: Tensor, *in_use: Tensor
) -> Callable[[], Tensor]:
    """Return a function that waits for a collective and returns its result; what it
    reads lives as long."""

    def finish() -> Tensor:
        if work is not None:
            work.wait()
        # What the collective reads may be freed only when it is over.
        kept.clear()
        return result

    kept = list(in_use)
    return finish


class _Move(torch.autograd.Function):
    """One method of the axis forward, another one backward, both along one dimension;
    None: nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        axis: TensorAxis,
        way: str | None,
        back: str | None,
        dim: int,
    ) -> Any:
        ctx.axis = axis
        ctx.back = back
        ctx.dim = dim
        # A view, so that autograd sees another tensor where nothing is moved.
        return (
            tensor.view_as(tensor) if way is None else getattr(axis, way)(tensor, dim)
        )

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad,) = grads
        moved = grad if ctx.back is None else getattr(ctx.axis, ctx.back)(grad, ctx.dim)
        return moved, None, None, None, None


@torch.compiler.disable
def _move(
    tensor: Tensor, axis: TensorAxis, way: str | None, back: str | None, dim: int = -1
) -> Tensor:
    return _Move.apply(tensor, axis, way, back, dim)


def sum_gradient(tensor: Tensor, axis: TensorAxis) -> Tensor:
    """Return the tensor; its gradient is added up over the ranks."""
    return _move(tensor, axis, None, "all_reduce")


def gradient_once(tensor: Tensor, axis: TensorAxis) -> Tensor:
    """Return the tensor; of its gradient, which is equal on all ranks, the first rank
    goes on with it: where sums over the ranks follow, it counts once."""
    return _move(tensor, axis, None, "of_first")


def sum_outputs(tensor: Tensor, axis: TensorAxis) -> Tensor:
    """Add partial values up over the ranks."""
    return _move(tensor, axis, "all_reduce", None)


def scatter_tokens(partial: Tensor, axis: TensorAxis) -> Tensor:
    """Add up partial values [..., N, H]; each rank gets its tokens."""
    return _move(_with_padding(partial, axis), axis, "reduce_scatter", "gather", -2)


def split_tokens(tensor: Tensor, axis: TensorAxis) -> Tensor:
    """Take this rank's tokens of [..., N, H]."""
    return _move(_with_padding(tensor, axis), axis, "part", "gather", -2)


def join_tokens(part: Tensor, axis: TensorAxis) -> Tensor:
    """Gather tokens [..., N/T, H] for what every rank does alike with all of them."""
    return without_padding(_move(part, axis, "gather", "part", -2), axis)


def gather_features(part: Tensor, axis: TensorAxis) -> Tensor:
    """Gather features [..., H/T] for what every rank does alike with all of them."""
    return _move(part, axis, "gather", "part", -1)


def split_features(tensor: Tensor, axis: TensorAxis) -> Tensor:
    """Take this rank's features of [..., H]."""
    return _move(tensor, axis, "part", "gather", -1)


def _with_padding(tensor: Tensor, axis: TensorAxis) -> Tensor:
    # At the end of the sequence, where it is cut off again.
    missing = -tensor.shape[-2] % axis.degree
    return F.pad(tensor, (0, 0, 0, missing)) if missing else tensor


def without_padding(tensor: Tensor, axis: TensorAxis) -> Tensor:
    """Leave padding out: tokens are only padded where no gradients are wanted; what has
    two dimensions holds several sequences, for layers that look at one token at a
    time."""
    if torch.is_grad_enabled() or tensor.ndim < 3:
        return tensor
    return tensor[..., : axis.length, :].contiguous()


def let_anomalies_be_found() -> None:
    """Let autograd's anomaly mode (``detect_anomaly``) look at gradients of split
    parameters: DTensor has no rule for ``_is_any_true``, the operator that it asks them
    with, whether any element is nan; torch names no other."""

    @register_sharding(torch.ops.aten._is_any_true.default)
    def rule(tensor: Any) -> Any:
        return [([Replicate()], [Replicate()])]


@dataclass(frozen=True, eq=False)
class _RowExchange:
    """Counts and indices of one rank's all-to-all of rows.

    Attributes:
        n_sent: how many rows go to each rank.
        places: which stored rows these are, int64 on the weight's device, rank after
            rank.
        n_received: how many rows come from each rank.
        order: where these stand among the rows in use, int64 on the weight's device, in
            the order of their arrival.
    """

    n_sent: list[int]
    places: Tensor
    n_received: list[int]
    order: Tensor


@dataclass(frozen=True)
class RowsInUse:
    """The rows of a weight that the ranks compute with, where those are not the rows
    that they store.

    A weight of several blocks (queries, keys and values in one) is stored in equal
    stretches of rows, as every weight is, and used by heads. A head that several ranks
    use is stored once.

    Attributes:
        by_rank: the rows that each rank uses, in the order of use.
        rows: R, all rows of the weight; each rank stores R/T of them, in order.
    """

    by_rank: tuple[tuple[int, ...], ...]
    rows: int
    _exchanges: dict[tuple[int, int, torch.device], _RowExchange] = field(
        default_factory=dict, compare=False, repr=False
    )

    def exchange(self, rank: int, degree: int, weight: Tensor) -> _RowExchange:
        """Return how ``rank``'s rows travel, with indices on the device of ``weight``.
        They are made once: an index that is made from a list on a GPU makes the host
        wait for all that was launched before it."""
        key = (rank, degree, weight.device)
        # A tensor that is only traced (fake) takes part in its own trace alone, and is
        # not kept.
        real = type(weight) in (Tensor, torch.nn.Parameter)
        if real and key in self._exchanges:
            return self._exchanges[key]
        n_sent, places = self.sent(rank, degree)
        n_received, order = self.received(rank, degree)
        # The host waits for these copies, once: later calls may come on another stream,
        # which would not wait for them.
        places_there = torch.tensor(places, dtype=torch.long).to(weight.device)
        order_there = torch.tensor(order, dtype=torch.long).to(weight.device)
        exchange = _RowExchange(n_sent, places_there, n_received, order_there)
        if real:
            self._exchanges[key] = exchange
        return exchange

    def received(self, rank: int, degree: int) -> tuple[list[int], list[int]]:
        """Return how many rows ``rank`` receives from each rank, and where they stand,
        in the order of their arrival, among those that it uses."""
        stored = self.rows // degree
        used = self.by_rank[rank]
        # Rows arrive rank after rank, and by row inside of each: this is where they
        # belong.
        order = sorted(range(len(used)), key=lambda place: used[place])
        counts = [0] * degree
        for row in used:
            counts[row // stored] += 1
        return counts, order

    def sent(self, rank: int, degree: int) -> tuple[list[int], list[int]]:
        """Return how many rows ``rank`` sends to each rank, and which of its stored
        rows these are."""
        stored = self.rows // degree
        counts, places = [], []
        for used in self.by_rank:
            # Sorted like the receiver sorts them, so that no index has to be sent.
            own = sorted(row - rank * stored for row in used if row // stored == rank)
            counts.append(len(own))
            places += own
        return counts, places


class _ExchangeRows(torch.autograd.Function):
    """An all-to-all of rows; its backward sends their gradients back and adds them
    up."""

    @staticmethod
    def forward(ctx: Any, stored: Tensor, axis: TensorAxis, rows: RowsInUse) -> Tensor:
        ctx.axis, ctx.rows, ctx.n_stored = axis, rows, stored.shape[0]
        # Every rank sends the rows that others use, and receives those it uses.
        exchange = rows.exchange(axis.rank, axis.degree, stored)
        arrived = _all_to_all(
            stored[exchange.places], exchange.n_sent, exchange.n_received, axis
        )
        # In the order in which heads are computed, which is not that of arrival.
        used = torch.empty_like(arrived)
        used[exchange.order] = arrived
        return used

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        axis = ctx.axis
        exchange = ctx.rows.exchange(axis.rank, axis.degree, grad)
        # The same way back: gradients of the rows go to the rank that stores them.
        arrived = _all_to_all(
            grad[exchange.order], exchange.n_received, exchange.n_sent, axis
        )
        total = grad.new_zeros((ctx.n_stored, *grad.shape[1:]))
        # Ranks arrive in order, one after the other, so that sums are the same in every
        # run.
        start = 0
        for count in exchange.n_sent:
            own = exchange.places[start : start + count]
            total[own] += arrived[start : start + count]
            start += count
        return total, None, None


def exchange_rows(
    stored: Tensor, axis: TensorAxis, rows: RowsInUse, dim: int = 0
) -> Tensor:
    """Return the rows of a weight that this rank uses, of those that the ranks store.

    Args:
        dim: the dimension of the rows.
    """
    result: Tensor = _ExchangeRows.apply(
        stored.movedim(dim, 0).contiguous(), axis, rows
    )
    return result.movedim(0, dim)


def _all_to_all(
    rows: Tensor, n_sent: Sequence[int], n_received: Sequence[int], axis: TensorAxis
) -> Tensor:
    arrived = rows.new_empty((sum(n_received), *rows.shape[1:]))
    # The meter counts what leaves this rank; the all-to-all's own part does not.
    row_bytes = rows[:1].numel() * rows.element_size()
    ranks = axis.ranks
    sends = [
        (rank, n * row_bytes)
        for rank, n in zip(ranks, n_sent, strict=True)
        if n and rank != axis.meter.rank
    ]
    link = "inter" if axis.meter.topology.spans_nodes(ranks) else "intra"
    with axis.meter.point_to_point(f"{_KIND}exchange", sends, link):  # type: ignore[arg-type]
        dist.all_to_all_single(
            arrived, rows, list(n_received), list(n_sent), group=axis.group
        )
    return arrived

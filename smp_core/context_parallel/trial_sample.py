"""The sample of a trial (:mod:`smp_core.context_parallel.trial`): a call's arguments
with some tokens of every rank.

Shape letters: R ranks, L tokens of a rank, M tokens of each rank in the sample.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import torch
import torch.distributed as dist
from torch import Tensor

from smp_core.checkpoint import iterate_tensors, map_tensors
from smp_core.context_parallel.chunked_loss import IGNORED
from smp_core.context_parallel.key_value_exchange import ContextGroup
from smp_core.context_parallel.replaced_attention import SplitBatch
from smp_core.context_parallel.sequence_plan import SequencePlan
from smp_core.torch_facts import Args, Kwargs

Call = tuple[Args, Kwargs, SplitBatch]
"""Arguments, and the batch that is active during the call."""

# Sequences up to this length are tried as they are; of longer ones each rank gives a
# multiple of _ALIGNED tokens.
_WHOLE, _ALIGNED = 256, 32


class Sample:
    """A part of one call's arguments.

    Attributes:
        tokens: M, of each rank.
        degree: R.
        rank: this process's place among them.
        has_tokens: whether an argument is a tensor of this rank's tokens.
    """

    def __init__(
        self,
        split: SplitBatch,
        group: ContextGroup,
        args: Args,
        kwargs: Kwargs,
    ) -> None:
        self._split, self._group, self._arguments = split, group, [args, kwargs]
        self.degree, self.rank = group.degree, group.rank
        # All tokens of a short sequence, and as many as kernels like of a long one.
        length = split.plan.local_length
        aligned = length // self.degree // _ALIGNED * _ALIGNED
        self.tokens = (
            length
            if split.plan.length <= _WHOLE
            else max(aligned, min(length, _ALIGNED))
        )
        tensors = [
            tensor
            for _, tensor in iterate_tensors(self._arguments, mapping=MutableMapping)
        ]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        # Tensors of the batch, with the dim of their tokens; None: they have none.
        in_batch = iterate_tensors([split.batch], mapping=MutableMapping)
        self._of_batch: dict[int, int | None] = {
            id(tensor): None for _, tensor in in_batch
        }
        # The batch says which dim is the sequence; of other tensors it is found by
        # length.
        for key, dim in split.dims.items():
            for tensor in (split.sequences[key], split.at(key)):
                self._of_batch[id(tensor)] = dim % tensor.dim()
        # Tensors that the split has made.
        for made in (split.position_ids, split.labels, split.shift_labels):
            self._of_batch[id(made)] = 1
        self._gathered: dict[int, list[Tensor]] = {}
        self.has_tokens = any(self._dim(tensor) is not None for tensor in tensors)

    def part(self) -> Call:
        """Return the call with M tokens of this rank, as in a real step."""
        return self._call(self._own, self.degree, self.rank, self._group.number)

    def whole(self) -> Call:
        """Return the call with the sample of all ranks, alone. Collective when it is
        first called."""
        return self._call(
            lambda tensor, dim: torch.cat(self._of_all(tensor, dim), dim), 1, 0, 0
        )

    def counted_by_length(self) -> str | None:
        """Name an argument that is the same on two ranks while their tokens are not,
        and no constant. Collective."""
        # Tensors of the batch tell which ranks have other data; other arguments were
        # computed from lengths or data.
        tensors = list(iterate_tensors(self._arguments, mapping=MutableMapping))
        of_data, others = [], []
        for path, tensor in tensors:
            dim = self._dim(tensor)
            # Masks of booleans are the same on many ranks by right.
            if dim is None or tensor.dtype == torch.bool:
                continue
            pieces = self._of_all(tensor, dim)
            if id(tensor) in self._of_batch:
                of_data.append(pieces)
            elif any(
                bool((piece != piece.narrow(dim, 0, 1)).any()) for piece in pieces
            ):
                others.append((path[-1], pieces))
        # Pairs of ranks whose tokens differ.
        pairs = []
        for one in range(self.degree):
            for other in range(one):
                if not of_data or any(
                    _differ(pieces, one, other) for pieces in of_data
                ):
                    pairs.append((one, other))
        # An argument that is the same on such a pair.
        for name, pieces in others:
            if any(not _differ(pieces, *pair) for pair in pairs):
                return (
                    f"its argument {name!r} is the same on two ranks and not constant, as what is counted by the "
                    "length of a rank's part is"
                )
        return None

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's tokens of a tensor whose ``dim`` is all of them."""
        return whole.narrow(dim, self.rank * self.tokens, self.tokens)

    def _dim(self, tensor: Tensor) -> int | None:
        """Return the dim of a tensor that is this rank's tokens."""
        if id(tensor) in self._of_batch:
            return self._of_batch[id(tensor)]
        length, shape = self._split.plan.local_length, tensor.shape
        # As many rows as tokens: a vector may be one number for each row.
        if tensor.dim() == 1 and length in self._rows():
            return None
        # [B, L, ...] first, then [L, ...], then any other place.
        return next(
            (
                dim
                for dim in (1, 0, *range(2, len(shape)))
                if dim < len(shape) and shape[dim] == length
            ),
            None,
        )

    def _rows(self) -> set[int]:
        split = self._split
        return {
            size
            for key, dim in split.dims.items()
            for place, size in enumerate(split.at(key).shape[:2])
            if place != dim
        }

    def _own(self, tensor: Tensor, dim: int) -> Tensor:
        return (
            tensor.detach()
            .narrow(dim, 0, self.tokens)
            .clone(memory_format=torch.contiguous_format)
        )

    def _of_all(self, tensor: Tensor, dim: int) -> list[Tensor]:
        """Gather M tokens of every rank."""
        # Gathered once; both runs and the comparison read it.
        if id(tensor) not in self._gathered:
            own = self._own(tensor, dim).to(self._device)
            # Collectives have no booleans on every backend.
            sent = own.view(torch.uint8) if own.dtype == torch.bool else own
            pieces = [torch.empty_like(sent) for _ in range(self.degree)]
            dist.all_gather(pieces, sent, group=self._group.process_group)
            self._gathered[id(tensor)] = [piece.view(own.dtype) for piece in pieces]
        return self._gathered[id(tensor)]

    def _call(
        self, take: Callable[[Tensor, int], Tensor], degree: int, rank: int, group: int
    ) -> Call:
        # A tensor that stands twice in a call stays one tensor.
        taken: dict[int, Tensor] = {}

        def sampled(tensor: Tensor) -> Tensor:
            if id(tensor) not in taken:
                dim = self._dim(tensor)
                taken[id(tensor)] = tensor if dim is None else take(tensor, dim)
            return taken[id(tensor)]

        args, kwargs = map_tensors(self._arguments, sampled, MutableMapping)
        kwargs = dict(kwargs)
        if kwargs.get("num_items_in_batch") is not None:
            # Trainer's number of targets belongs to the average over ranks.
            kwargs["num_items_in_batch"] = kwargs["num_items_in_batch"] / degree
        return args, kwargs, self._active(sampled, degree, rank, group)

    def _active(
        self, sampled: Callable[[Tensor], Tensor], degree: int, rank: int, group: int
    ) -> SplitBatch:
        """Return the batch that is active: one document, of which each rank has M
        tokens in a row."""
        split = self._split
        # Contiguous: parts laid end to end are then the whole sample, on every rank
        # alike.
        plan = SequencePlan(
            degree, self.tokens * self.degree, order="contiguous", group=group
        )
        made = SplitBatch(None, plan, plan.length, rank, group=self._group)
        if split.position_ids is None:
            split.position_ids = split.plan.positions(split.rank)[None]
            self._of_batch[id(split.position_ids)] = 1
        # Real positions, so that models whose tables end somewhere stay inside.
        made.position_ids = sampled(split.position_ids)
        made.last_position = torch.stack(
            [piece.max() for piece in self._of_all(split.position_ids, 1)]
        ).max()
        # Losses are weighted as in a real step, with the sample's own number of
        # targets.
        made.divided_by_model = split.divided_by_model
        if split.labels is not None:
            made.labels = sampled(split.labels)
        if split.shift_labels is not None:
            made.shift_labels = sampled(split.shift_labels)
            total = sum(
                (piece != IGNORED).sum().double()
                for piece in self._of_all(split.shift_labels, 1)
            )
            assert isinstance(total, Tensor)
            made.tokens_per_rank = total / degree
            own = (made.shift_labels != IGNORED).sum().double()
            made.weight = torch.where(
                total > 0,
                own / made.tokens_per_rank,
                torch.ones_like(made.tokens_per_rank),
            )
        return made


def _differ(pieces: list[Tensor], one: int, other: int) -> bool:
    return not torch.equal(pieces[one], pieces[other])

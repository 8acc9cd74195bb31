"""Batches split along the sequence: the tokens of each rank, and the weight of each
rank's loss.

    1. all context peers take the batch of the first one (an iterable data set or an
       augmenting worker may give each peer its own)
    2. documents are found (:mod:`smp_core.context_parallel.documents`)
    3. labels are shifted while the sequence is unsplit (afterwards a token's target may
       be on another rank); the first token of a document is no target
    4. sequences are padded to a multiple of 2R, and each rank takes its tokens
    5. targets are counted over all ranks, so that every rank divides its losses by the
       same number

Shape letters: B rows, S tokens of a row, L tokens of a rank, R ranks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from smp_core.checkpoint import iterate_tensors, map_tensors, of_kind
from smp_core.cluster import Axis, SmpMesh
from smp_core.comm import CommMeter
from smp_core.context_parallel.chunked_loss import IGNORED
from smp_core.context_parallel.documents import (
    DOCUMENT_KEYS,
    Key,
    document_starts_of,
    has_sequence_of,
    positions_in_documents,
    positions_of_first_tokens,
)
from smp_core.context_parallel.key_value_exchange import ContextGroup, register_group
from smp_core.context_parallel.learned_positions import LearnedPositions
from smp_core.context_parallel.replaced_attention import SplitBatch
from smp_core.context_parallel.sequence_plan import (
    Order,
    SequencePlan,
    document_starts,
    padded_length,
)
from smp_core.context_parallel.transformers_models import adapt_transformers_models
from smp_core.context_parallel.trial import Trial
from smp_core.plan import Plan

# Keys that collators add for kernels that pack documents; position_ids tell the same.
_PACKING_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass(frozen=True)
class BatchLayout:
    """The tensors of a batch that have a sequence, and their meaning.

    By default both are found: in a mapping with ``input_ids`` or ``inputs_embeds``
    every tensor [B, S, ...] is split; in a tuple or list ``(input, target)`` every
    tensor whose first two dims are the first one's.

    Args:
        dims: key (or place in a tuple) -> dim that is the sequence; other tensors go to
            every rank unsplit. Default: as above.
        targets: key or place of the targets; -100 marks a token without one. Default:
            ``labels``, or the tuple's last tensor that is no mask of booleans.
        shift_targets: whether the target of a token is the next one's label, as in
            Transformers' causal models. Default: true for a mapping, except under
            models whose loss does not shift; false for a tuple.
        order: "zigzag" (default; the same work on every rank under a causal mask) or
            "contiguous".
        pad_values: key -> value for padding to a multiple of 2R; default 0, and -100
            for targets.
    """

    dims: Mapping[Key, int] | None = None
    targets: Key | None = None
    shift_targets: bool | None = None
    order: Order = "zigzag"
    pad_values: Mapping[Key, Any] = field(default_factory=dict)


class ContextParallel:
    """Splits batches over a context group, and gathers outputs.

    Args:
        group: the context group, from
            :func:`smp_core.context_parallel.key_value_exchange.register_group`.
        everyone: the group over which targets are counted: all ranks that train on one
            global batch. None: the context group.
        trial: tries the model's first calls under a split batch; None: nothing is
            tried.
        learned: the model's table of learned positions; None: it has none.
    """

    def __init__(
        self,
        group: ContextGroup,
        everyone: dist.ProcessGroup | None = None,
        trial: Trial | None = None,
        learned: LearnedPositions | None = None,
    ) -> None:
        self.group, self.trial, self.learned = group, trial, learned
        self._everyone = group.process_group if everyone is None else everyone

    @property
    def degree(self) -> int:
        """The ranks R that share sequences."""
        return self.group.degree

    def split(
        self,
        batch: Any,
        layout: BatchLayout | None = None,
        *,
        shifts: bool = True,
        count: bool = True,
        weight: float | None = None,
    ) -> SplitBatch:
        """Return this rank's part of the first context peer's ``batch``.

        Collective over the context group, and over ``everyone`` if targets are counted.

        Args:
            batch: tensors on this rank's device: a mapping or a tuple. It is not
                changed.
            shifts: whether the model's loss shifts labels, where the layout does not
                say.
            count: whether to count targets over all ranks now, and not when a model
                asks.
            weight: of an evaluation's batch, 0 where it is another rank's, which counts
                nothing; None in training.

        Raises:
            ValueError: no sequence is found, dims differ, an attention mask with holes
                or of 4 dims, labels per row, more tokens than the model has learned
                positions.
        """
        layout = layout or BatchLayout()
        # From here on all context peers work on one batch, whatever their loaders gave
        # them.
        batch = self.broadcast(batch)
        if isinstance(batch, Mapping):
            split = self._split_mapping(batch, layout, shifts)
        elif isinstance(batch, (tuple, list)):
            split = self._split_sequence(batch, layout)
        else:
            raise ValueError(
                f"a batch of type {type(batch).__name__} cannot be split along the sequence: which target belongs to a "
                "token is not said; give a mapping with input_ids and labels, or a tuple (input, target)"
            )
        # Kept apart: the code that trains may take labels out of the batch.
        split.sequences = {key: split.batch[key] for key in split.dims}
        # Looked at while lengths are those of whole sequences; each rank's own part is
        # short.
        if self.learned is not None:
            self.learned.require(split.length, split.last_position)
        # Counting is a collective: it is made now, or when a model first asks for the
        # number.
        if split.shift_labels is not None:
            split.count_targets = functools.partial(self._count_targets, split, weight)
        if split.count_targets is not None and count:
            split.count_targets()
        split.trial = self.trial
        return split

    def gather(self, tensor: Tensor, split: SplitBatch, dim: int = 1) -> Tensor:
        """Gather the unsplit sequence of a tensor, of which every context rank has its
        tokens. Collective.

        The result has no padding and no gradient: it is for predictions and metrics.
        """
        dim %= tensor.dim()
        if tensor.shape[dim] != split.plan.local_length:
            raise ValueError(
                f"dim {dim} of a tensor {tuple(tensor.shape)} is not the {split.plan.local_length} tokens of this rank"
            )
        # Tokens first, so that pieces laid end to end are one sequence.
        sequence = tensor.detach().movedim(dim, 0).contiguous()
        # The plan's order is that of ranks; predictions are wanted in that of the
        # sequence.
        if self.degree > 1:
            pieces = [torch.empty_like(sequence) for _ in range(self.degree)]
            dist.all_gather(pieces, sequence, group=self.group.process_group)
            sequence = split.plan.in_sequence_order(torch.cat(pieces))
        return sequence[: split.length].movedim(0, dim).contiguous()

    def gather_all(self, outputs: Any, split: SplitBatch) -> Any:
        """Apply :meth:`gather` to every tensor [B, L, ...] in a nest of mappings,
        tuples and lists."""

        def gathered(tensor: Tensor) -> Tensor:
            is_split = tensor.dim() >= 2 and tensor.shape[1] == split.plan.local_length
            return self.gather(tensor, split) if is_split else tensor

        return map_tensors(outputs, gathered, MutableMapping)

    def broadcast(self, batch: Any) -> Any:
        """Return the first context peer's batch, on this rank's device. Collective over
        the context group."""
        # One rank alone has nothing to agree on.
        if self.group.process_group is None:
            return batch
        is_source = self.group.rank == 0
        source, group = self.group.ranks[0], self.group.process_group
        device = _device_of(batch)

        # The batch without its values: meta tensors pickle to shape and dtype.
        def shape_of(tensor: Tensor) -> Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

        # Other ranks learn the structure first, since their own batch may have other
        # shapes.
        carried = [map_tensors(batch, shape_of, MutableMapping) if is_source else None]
        dist.broadcast_object_list(carried, src=source, group=group)

        # The values, in the order of the nest, which is the same on every rank.
        values = iterate_tensors(batch, mapping=MutableMapping)

        def received(shape: Tensor) -> Tensor:
            tensor = (
                next(values)[1].contiguous()
                if is_source
                else torch.empty_like(shape, device=device)
            )
            dist.broadcast(tensor, src=source, group=group)
            return tensor

        return map_tensors(carried[0], received, MutableMapping)

    def _split_mapping(
        self, batch: Mapping[Any, Any], layout: BatchLayout, shifts: bool
    ) -> SplitBatch:
        """Split a mapping: phases 2 to 4 of this module's docstring."""
        # The tensors that have a sequence, with the sequence in dim 1.
        tokens = _token_tensor(batch)
        dims = (
            _dims_of_mapping(batch, tokens)
            if layout.dims is None
            else dict(layout.dims)
        )
        rows, length = _common_shape(batch, dims)
        device = _device_of(batch)
        sequences = {key: batch[key].movedim(dim, 1) for key, dim in dims.items()}

        # Documents, and the position of each token in its document.
        starts = document_starts_of(sequences, rows, length, device)
        position_ids = positions_in_documents(sequences, starts)

        # The target of each token.
        target_key = "labels" if layout.targets is None else layout.targets
        targets = sequences.get(target_key)
        if targets is None and isinstance(batch.get(target_key), Tensor):
            raise ValueError(
                f"{target_key} of {tuple(batch[target_key].shape)} are not per token ([{rows}, {length}]); a head that "
                "pools the sequence has no context parallel form"
            )
        shifting = shifts if layout.shift_targets is None else layout.shift_targets
        if targets is not None and shifting:
            targets = _next_tokens(targets.masked_fill(starts, IGNORED))

        # This rank's tokens of every sequence.
        plan = self._plan(starts.cumsum(1), layout.order)
        own = self._own_tokens(plan, length, device)
        # A copy of the mapping: the caller's batch stays as it was.
        local: Any = copy.copy(batch)
        assert isinstance(local, MutableMapping)
        for key, dim in dims.items():
            padding = layout.pad_values.get(key, IGNORED if key == target_key else 0)
            local[key] = own.take(sequences[key], padding).movedim(1, dim)
        # Kernels for packed documents would read lengths of the whole sequence.
        for key in (*DOCUMENT_KEYS, *_PACKING_KEYS):
            local.pop(key, None)

        # Positions and targets that the model cannot find in its part.
        here = {key: dim for key, dim in dims.items() if key in local}
        split = SplitBatch(
            local, plan, length, self.group.rank, group=self.group, dims=here
        )
        split.last_position = position_ids.max()
        if self.learned is not None:
            position_ids = self.learned.positions(sequences, position_ids)
        split.position_ids = own.take_positions(position_ids)
        if (
            # Where position_ids alone tell the documents, chunked attention counts from
            # their first positions.
            sequences.get("position_ids") is not None
            and sequences.get("attention_mask") is None
        ):
            split.first_positions = positions_of_first_tokens(
                position_ids, starts, padded=plan.length > length
            )
        # A model would count positions from 0 on every rank.
        if tokens is not None:
            local["position_ids"] = split.position_ids
        if targets is not None:
            split.shift_labels = own.take(targets, IGNORED)
            if shifting:
                # A loss that shifts these labels once more is nan, and not one of wrong
                # targets.
                split.labels = local[target_key] = torch.full_like(
                    split.shift_labels, IGNORED
                )
                local["shift_labels"] = split.shift_labels
                split.divided_by_model = True
        return split

    def _split_sequence(self, batch: Sequence[Any], layout: BatchLayout) -> SplitBatch:
        """Split a tuple or list, each row of which is one document: phases 3 and 4 of
        this module's docstring."""
        # The tensors that have a sequence, and the one with the targets.
        dims = dict(layout.dims) if layout.dims else _dims_of_sequence(batch)
        rows, length = _common_shape(batch, dims)
        device = _device_of(batch)
        target = layout.targets
        if target is None and len(dims) > 1:
            target = _target_of(batch, dims)

        # This rank's tokens of every sequence.
        one_document = torch.zeros(1, length, dtype=torch.long, device=device)
        plan = self._plan(one_document, layout.order)
        own = self._own_tokens(plan, length, device)
        local = list(batch)
        split_target = values = None
        for place, dim in dims.items():
            assert isinstance(place, int)
            sequence = batch[place].movedim(dim, 1)
            # Values and masks take no -100 for a token without a target.
            has_labels = (
                place == target
                and not sequence.is_floating_point()
                and sequence.dtype != torch.bool
            )
            if has_labels and layout.shift_targets:
                sequence = _next_tokens(sequence)
            piece = own.take(
                sequence, layout.pad_values.get(place, IGNORED if has_labels else 0)
            )
            local[place] = piece.movedim(1, dim)
            if has_labels:
                split_target = piece
            elif place == target:
                # Values instead of labels: every token but padding has a target.
                values = None if piece.dtype == torch.bool else piece
                split_target = own.take(
                    torch.zeros(rows, length, device=device), IGNORED
                )

        split = SplitBatch(
            of_kind(type(batch), local),
            plan,
            length,
            self.group.rank,
            group=self.group,
            dims=dims,
        )
        split.shift_labels, split.values = split_target, values
        # Positions are places in the sequence, unless the model counts otherwise.
        if self.learned is not None and self.learned.skips_padding:
            places = torch.arange(length, device=device).expand(rows, -1)
            first = batch[0].movedim(dims[0], 1) if 0 in dims else None
            has_ids = first is not None and not first.is_floating_point()
            sequences: dict[Key, Any] = {"input_ids": first} if has_ids else {}
            split.position_ids = own.take_positions(
                self.learned.positions(sequences, places)
            )
        return split

    def _plan(self, documents: Tensor, order: Order) -> SequencePlan:
        """Plan sequences whose documents have the numbers ``documents`` [B, S]; padding
        is a document of its own."""
        length = documents.shape[1]
        padded = padded_length(length, self.degree)
        # Padding has a number that no document has, so that nothing attends to it.
        documents = F.pad(documents, (0, padded - length), value=-1)
        return SequencePlan(
            self.degree,
            padded,
            document_starts(documents.cpu()),
            order,
            self.group.number,
        )

    def _own_tokens(
        self, plan: SequencePlan, length: int, device: torch.device
    ) -> _OwnTokens:
        return _OwnTokens(
            plan.positions(self.group.rank).to(device), plan.length - length
        )

    def _count_targets(self, split: SplitBatch, weight: float | None) -> None:
        """Set ``tokens_per_rank`` and ``weight``. Collective over ``everyone``.

        Losses are means over ranks in training. Those of evaluations are weighted by
        the samples of each rank, so that they are divided by its share of the samples.
        """
        assert split.shift_labels is not None
        own = (split.shift_labels != IGNORED).sum().double()
        # In training every rank weighs the same; in evaluation, as many as it has
        # samples.
        samples = 1 if weight is None else len(split.shift_labels)
        counted = torch.stack([own, torch.full_like(own, samples)]) * (
            1.0 if weight is None else weight
        )
        if self._everyone is not None:
            dist.all_reduce(counted, group=self._everyone)
        total, all_samples = counted
        split.tokens_per_rank = total * samples / all_samples
        # Without any target on any rank the losses stay as they are.
        split.weight = torch.where(
            total > 0,
            own / split.tokens_per_rank,
            torch.ones_like(split.tokens_per_rank),
        )


@dataclass(frozen=True, eq=False)
class _OwnTokens:
    """The part of a sequence that is this rank's.

    Attributes:
        indices: [L], places in the padded sequence.
        missing: tokens of padding after the S of the batch.
    """

    indices: Tensor
    missing: int

    def take(self, sequence: Tensor, padding: Any) -> Tensor:
        """Return [B, L, ...] of [B, S, ...], padded with ``padding``."""
        if self.missing:
            shape = (len(sequence), self.missing, *sequence.shape[2:])
            sequence = torch.cat([sequence, sequence.new_full(shape, padding)], 1)
        return sequence.index_select(1, self.indices).contiguous()

    def take_positions(self, position_ids: Tensor) -> Tensor:
        """Return [B, L] of [B, S], where the positions of padding count from 0."""
        if self.missing:
            of_padding = torch.arange(
                self.missing, dtype=position_ids.dtype, device=position_ids.device
            )
            position_ids = torch.cat(
                [position_ids, of_padding.expand(len(position_ids), -1)], 1
            )
        return position_ids.index_select(1, self.indices).contiguous()


def _device_of(batch: Any) -> torch.device:
    """Return the device of a batch's first tensor; the CPU if it has none."""
    for _, tensor in iterate_tensors(batch, mapping=MutableMapping):
        return tensor.device
    return torch.device("cpu")


def _next_tokens(labels: Tensor) -> Tensor:
    """Return the label of the next token for each token [B, S]; the last one has
    none."""
    return F.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def _token_tensor(batch: Mapping[Any, Any]) -> Any:
    for key in ("input_ids", "inputs_embeds"):
        if batch.get(key) is not None:
            return batch[key]
    return None


def _dims_of_mapping(batch: Mapping[Any, Any], tokens: Any) -> dict[Key, int]:
    """Find the tensors of a mapping that have the sequence of ``tokens``, in dim 1."""
    if tokens is None:
        raise ValueError(
            f"a batch with the keys {', '.join(map(str, batch))} has neither input_ids nor inputs_embeds; say "
            "which keys have a sequence: BatchLayout(dims={'tokens': 1, ...}, targets='...')"
        )
    mask = batch.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        raise ValueError(
            "attention_mask has to be [B, S] with 1 for tokens and 0 for padding; packed documents are told by "
            "position_ids that start again, or by document_ids"
        )
    position_ids = batch.get("position_ids")
    if position_ids is not None and position_ids.dim() != 2:
        raise ValueError(
            f"position_ids of {position_ids.dim()} dims (multimodal positions) have no context parallel form yet"
        )
    dims: dict[Key, int] = {}
    # Whatever has the rows and length of the tokens is taken for a sequence.
    for key, item in batch.items():
        # One row of position_ids may stand for all rows.
        if has_sequence_of(item, tokens) or (
            key == "position_ids" and item is not None
        ):
            dims[key] = 1
    return dims


def _dims_of_sequence(batch: Sequence[Any]) -> dict[Key, int]:
    """Find the tensors of a tuple or list that have the sequence of the first one, in
    dim 1."""
    first = batch[0] if batch else None
    if not isinstance(first, Tensor) or first.dim() < 2:
        raise ValueError(
            "the first of a tuple's tensors has no sequence [B, S, ...]; say which have: BatchLayout(dims={0: 1, ...})"
        )
    return {
        place: 1 for place, item in enumerate(batch) if has_sequence_of(item, first)
    }


def _target_of(batch: Sequence[Any], dims: Mapping[Key, int]) -> Key:
    """Return the place of the targets: the last tensor that is no mask of booleans and
    not the first one."""
    places = sorted(dims, key=int)
    for place in reversed(places[1:]):
        assert isinstance(place, int)
        if batch[place].dtype != torch.bool:
            return place
    return places[-1]


def _common_shape(batch: Any, dims: Mapping[Key, int]) -> tuple[int, int]:
    """Return B and S, which the tensors with a sequence have in common."""
    lengths = {key: batch[key].shape[dim] for key, dim in dims.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"the batch's sequences differ in length: {lengths}; all that are split have to be alike"
        )
    # One row may stand for all (position_ids), so the most rows are the batch's.
    rows = max(batch[key].movedim(dim, 1).shape[0] for key, dim in dims.items())
    return rows, next(iter(lengths.values()))


def share_sequences(
    model: nn.Module,
    mesh: SmpMesh,
    plan: Plan,
    meter: CommMeter,
    learned: LearnedPositions | None,
) -> ContextParallel:
    """Make the model's attention one over the context ranks, in place.

    Args:
        learned: the model's table of learned positions; None: it has none.

    Returns:
        the splitter of batches.

    Raises:
        ValueError: a Transformers model that would be wrong (see
            :mod:`smp_core.context_parallel.transformers_models`).
    """
    # Transformers' attention goes through its interface; that of other models is
    # replaced per batch.
    adapt_transformers_models(model)
    head_groups = int(plan.knobs.collectives.context_head_groups)
    group = register_group(
        mesh.group(Axis.CONTEXT), head_groups=head_groups, meter=meter
    )
    # Coarse numbers allow the trial larger differences.
    coarse = plan.knobs.fp8 is not None or plan.knobs.compression.gather is not None
    trial = Trial(
        model, group, mesh.world_group, coarse=coarse, in_stages=plan.stages is not None
    )
    return ContextParallel(group, mesh.world_group, trial, learned)

"""Batches split along the sequence: what each rank's model gets, and how its loss is weighted.

    1. context peers get the first one's batch (an iterable data set or an augmenting worker may give each its own)
    2. documents are found: given ids, restarts of ``position_ids``, runs of ``attention_mask``
    3. labels are shifted while the sequence is whole (afterwards a token's target may be on another rank); the first
       token of a document is no target
    4. everything is padded to a multiple of 2R and each rank takes its tokens
    5. targets are counted over all ranks, so that losses can be divided by the same number everywhere

Shape letters: B rows, S tokens of a row, L tokens of a rank, R ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from smp_core.context_parallel.active import SplitBatch
from smp_core.context_parallel.plan import Order, SequencePlan, document_starts, padded_length
from smp_core.context_parallel.traffic import ContextGroup

IGNORED = -100
DOCUMENT_KEYS = ("document_ids", "seq_idx")
# What collators add for kernels that pack documents; the same is found from position_ids.
_PACKING_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
Key = str | int


@dataclass(frozen=True)
class BatchLayout:
    """Which tensors of a batch have a sequence, and what they mean.

    The default finds it out: in a mapping with ``input_ids`` or ``inputs_embeds`` every tensor [B, S, ...] is split; in
    a tuple or list ``(input, target)`` every tensor whose first two dims are the first one's.

    Args:
        dims: key (or place in a tuple) -> dim that is the sequence; others go to every rank whole. Default: as above.
        targets: key or place of the targets; -100 marks none. Default: ``labels``, or the tuple's last tensor.
        shift_targets: whether the target of a token is the next one's label, as in Transformers' causal models.
        Default: true
            for a mapping, except under models whose loss does not shift; false for a tuple.
        order: "zigzag" (default; the same work on every rank under a causal mask) or "contiguous".
        pad_values: key -> value for padding to a multiple of 2R; default 0, and -100 for targets.
    """

    dims: Mapping[Key, int] | None = None
    targets: Key | None = None
    shift_targets: bool | None = None
    order: Order = "zigzag"
    pad_values: Mapping[Key, Any] = field(default_factory=dict)


class ContextParallel:
    """Splits batches over a context group and puts results together again.

    Args:
        group: from :func:`smp_core.context_parallel.traffic.register_group`. everyone: the group over which targets are
        counted: all ranks that train on one global batch. None: the context group.
    """

    def __init__(self, group: ContextGroup, everyone: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self._everyone = group.process_group if everyone is None else everyone

    @property
    def degree(self) -> int:
        return self.group.degree

    def split(
        self, batch: Any, layout: BatchLayout | None = None, *, shifts: bool = True, count: bool = True
    ) -> SplitBatch:
        """This rank's part of the first context peer's ``batch``. Collective over the context group, and over everyone
        if targets are counted.

        Args:
            batch: tensors on this rank's device: a mapping or a tuple. The original is left as it is.
            shifts: whether the model's loss shifts labels, where the layout does not say.
            count: whether to count targets over all ranks.

        Raises:
            ValueError: no sequence is found, dims differ, an attention mask with holes or of 4 dims, labels per row.
        """
        layout = layout or BatchLayout()
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
        if split.shift_labels is not None and count:
            self._count(split)
        return split

    def gather(self, tensor: torch.Tensor, split: SplitBatch, dim: int = 1) -> torch.Tensor:
        """The whole sequence of a tensor of which every context rank has its tokens, without padding. Collective.

        Not differentiable: for predictions and metrics.
        """
        dim %= tensor.dim()
        if tensor.shape[dim] != split.plan.local_length:
            raise ValueError(
                f"dim {dim} of a tensor {tuple(tensor.shape)} is not the {split.plan.local_length} tokens of this rank"
            )
        first = tensor.detach().movedim(dim, 0).contiguous()
        if self.degree > 1:
            pieces = [torch.empty_like(first) for _ in range(self.degree)]
            dist.all_gather(pieces, first, group=self.group.process_group)
            first = split.plan.in_sequence_order(torch.cat(pieces))
        return first[: split.length].movedim(0, dim).contiguous()

    def gather_all(self, outputs: Any, split: SplitBatch) -> Any:
        """:meth:`gather` of every tensor [B, L, ...] in a nest of mappings, tuples and lists."""

        def whole(tensor: torch.Tensor) -> torch.Tensor:
            is_split = tensor.dim() >= 2 and tensor.shape[1] == split.plan.local_length
            return self.gather(tensor, split) if is_split else tensor

        return _map_tensors(outputs, whole)

    def broadcast(self, batch: Any) -> Any:
        """The first context peer's batch, on this rank's device."""
        if self.group.process_group is None:
            return batch
        tensors: list[torch.Tensor] = []
        device = _device_of(batch)

        def note(tensor: torch.Tensor) -> _Placeholder:
            tensors.append(tensor)
            return _Placeholder(len(tensors) - 1, tuple(tensor.shape), tensor.dtype)

        carried = [_map_tensors(batch, note) if self.group.rank == 0 else None]
        dist.broadcast_object_list(carried, src=self.group.ranks[0], group=self.group.process_group)

        def receive(place: _Placeholder) -> torch.Tensor:
            if self.group.rank == 0:
                tensor = tensors[place.index].contiguous()
            else:
                tensor = torch.empty(place.shape, dtype=place.dtype, device=device)
            dist.broadcast(tensor, src=self.group.ranks[0], group=self.group.process_group)
            return tensor

        return _map_tensors(carried[0], receive, _Placeholder)

    def _split_mapping(self, batch: Mapping[Any, Any], layout: BatchLayout, shifts: bool) -> SplitBatch:
        first = next((batch[key] for key in ("input_ids", "inputs_embeds") if batch.get(key) is not None), None)
        if layout.dims is None and first is None:
            raise ValueError(
                f"a batch with the keys {', '.join(map(str, batch))} has neither input_ids nor inputs_embeds; say "
                "which keys have a sequence: BatchLayout(dims={'tokens': 1, ...}, targets='...')"
            )
        dims = _dims_of_mapping(batch, first) if layout.dims is None else dict(layout.dims)
        target = layout.targets if layout.targets is not None else "labels"
        rows, length = _common_shape(batch, dims)
        device = _device_of(batch)
        whole = {key: _batch_first(batch[key], dims[key]) for key in dims}
        starts = _document_starts(whole, rows, length, device)
        documents = starts.cumsum(1)
        position_ids = whole.get("position_ids")
        if position_ids is None:
            position_ids = torch.arange(length, device=device).expand(rows, -1)
            if any(whole.get(key) is not None for key in DOCUMENT_KEYS):
                position_ids = position_ids - torch.where(starts, position_ids, 0).cummax(1).values
        labels, shift_labels = whole.get(target), None
        shifting = shifts if layout.shift_targets is None else layout.shift_targets
        if isinstance(batch.get(target), torch.Tensor) and labels is None:
            raise ValueError(
                f"{target} of {tuple(batch[target].shape)} are not per token ([{rows}, {length}]); a head that pools "
                "the sequence has no context parallel form"
            )
        if labels is not None:
            shift_labels = labels
            if shifting:
                shift_labels = F.pad(labels.masked_fill(starts, IGNORED), (0, 1), value=IGNORED)[:, 1:]
        plan = self._plan(documents, layout.order)
        take = self._taker(plan, length, device)
        local: Any = copy.copy(batch)
        assert isinstance(local, MutableMapping)
        for key in dims:
            padding = layout.pad_values.get(key, IGNORED if key == target else 0)
            local[key] = take(whole[key], padding).movedim(1, dims[key])
        for key in (*DOCUMENT_KEYS, *_PACKING_KEYS):
            local.pop(key, None)
        split = SplitBatch(local, plan, length, self.group.rank, group=self.group)
        split.position_ids, split.last_position = take(position_ids, None), position_ids.max()
        if whole.get("position_ids") is not None and whole.get("attention_mask") is None:
            split.first_positions = _first_positions(position_ids, starts, padded=plan.length > length)
        if first is not None:
            local["position_ids"] = split.position_ids
        if shift_labels is not None:
            split.shift_labels = take(shift_labels, IGNORED)
            if shifting:
                # Whoever shifts these again gets a loss of nan instead of wrong targets.
                split.labels = local[target] = torch.full_like(split.shift_labels, IGNORED)
                local["shift_labels"] = split.shift_labels
                split.divided_by_model = True
        return split

    def _split_sequence(self, batch: Sequence[Any], layout: BatchLayout) -> SplitBatch:
        dims: dict[Key, int] = dict(layout.dims or {})
        if not dims:
            first = batch[0] if batch else None
            if not isinstance(first, torch.Tensor) or first.dim() < 2:
                raise ValueError(
                    "the first of a tuple's tensors has no sequence [B, S, ...]; say which have: "
                    "BatchLayout(dims={0: 1, ...})"
                )
            dims = {place: 1 for place, item in enumerate(batch) if _starts_like(item, first)}
        rows, length = _common_shape(batch, dims)
        device = _device_of(batch)
        last = max(dims, key=int)
        target = layout.targets if layout.targets is not None else (last if len(dims) > 1 else None)
        plan = self._plan(torch.zeros(1, length, dtype=torch.long, device=device), layout.order)
        take = self._taker(plan, length, device)
        local = list(batch)
        split_target = None
        for place in dims:
            assert isinstance(place, int)
            whole = _batch_first(batch[place], dims[place])
            is_target = place == target and not whole.is_floating_point()
            if is_target and layout.shift_targets:
                whole = F.pad(whole, (0, 1), value=IGNORED)[:, 1:]
            piece = take(whole, layout.pad_values.get(place, IGNORED if is_target else 0))
            local[place] = piece.movedim(1, dims[place])
            if place == target:
                split_target = piece if is_target else take(torch.zeros(rows, length, device=device), IGNORED)
        made = type(batch)(*local) if hasattr(batch, "_fields") else type(batch)(local)  # type: ignore[call-arg]
        split = SplitBatch(made, plan, length, self.group.rank, group=self.group)
        split.shift_labels = split_target
        return split

    def _plan(self, documents: torch.Tensor, order: Order) -> SequencePlan:
        length = documents.shape[1]
        padded = padded_length(length, self.degree)
        documents = F.pad(documents, (0, padded - length), value=-1)
        return SequencePlan(self.degree, padded, document_starts(documents.cpu()), order, self.group.number)

    def _taker(
        self, plan: SequencePlan, length: int, device: torch.device
    ) -> Callable[[torch.Tensor, Any], torch.Tensor]:
        mine = plan.positions(self.group.rank).to(device)

        def take(whole: torch.Tensor, padding: Any) -> torch.Tensor:
            """This rank's tokens of [B, S, ...]; padding None counts on from 0."""
            missing = plan.length - length
            if missing:
                tail = whole.new_full((len(whole), missing, *whole.shape[2:]), 0 if padding is None else padding)
                if padding is None:
                    tail += torch.arange(missing, device=device)
                whole = torch.cat([whole, tail], 1)
            return whole.index_select(1, mine).contiguous()

        return take

    def _count(self, split: SplitBatch) -> None:
        assert split.shift_labels is not None
        mine = (split.shift_labels != IGNORED).sum().double()
        total, ranks = mine.clone(), self.degree
        if self._everyone is not None:
            dist.all_reduce(total, group=self._everyone)
            ranks = dist.get_world_size(self._everyone)
        split.tokens_per_rank = total / ranks
        split.weight = torch.where(total > 0, mine / split.tokens_per_rank, torch.ones_like(split.tokens_per_rank))


def labels_within_documents(batch: Mapping[str, Any]) -> torch.Tensor:
    """``batch["labels"]`` [B, S] without the first token of every document, which nothing predicts."""
    labels = batch["labels"]
    whole: dict[Key, Any] = {key: item for key, item in batch.items() if _starts_like(item, labels)}
    rows, length = labels.shape
    return labels.masked_fill(_document_starts(whole, rows, length, labels.device), IGNORED)


@dataclass(frozen=True)
class _Placeholder:
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _map_tensors(nest: Any, change: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    if isinstance(nest, kind):
        return change(nest)
    if isinstance(nest, MutableMapping):
        mapped = copy.copy(nest)
        for key in nest:
            mapped[key] = _map_tensors(nest[key], change, kind)
        return mapped
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(_map_tensors(item, change, kind) for item in nest))
    if isinstance(nest, (tuple, list)):
        return type(nest)(_map_tensors(item, change, kind) for item in nest)
    return nest


def _device_of(batch: Any) -> torch.device:
    found: list[torch.device] = []
    _map_tensors(batch, lambda tensor: found.append(tensor.device))
    return found[0] if found else torch.device("cpu")


def _starts_like(item: Any, first: torch.Tensor) -> bool:
    return isinstance(item, torch.Tensor) and item.dim() >= 2 and item.shape[:2] == first.shape[:2]


def _dims_of_mapping(batch: Mapping[str, Any], first: Any) -> dict[Key, int]:
    mask = batch.get("attention_mask")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
        raise ValueError(
            "attention_mask has to be [B, S] with 1 for tokens and 0 for padding; packed documents are told by "
            "position_ids that start again, or by document_ids"
        )
    position_ids = batch.get("position_ids")
    if position_ids is not None and position_ids.dim() != 2:
        raise ValueError(
            f"position_ids of {position_ids.dim()} dims (multimodal positions) have no context parallel form yet"
        )
    return {
        key: 1
        for key, item in batch.items()
        if _starts_like(item, first) or (key == "position_ids" and item is not None)
    }


def _batch_first(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.movedim(dim, 1)


def _common_shape(batch: Any, dims: Mapping[Key, int]) -> tuple[int, int]:
    lengths = {key: batch[key].shape[dim] for key, dim in dims.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"the batch's sequences differ in length: {lengths}; all that are split have to be alike")
    rows = max(_batch_first(batch[key], dim).shape[0] for key, dim in dims.items())
    return rows, next(iter(lengths.values()))


def _document_starts(whole: Mapping[Key, Any], rows: int, length: int, device: torch.device) -> torch.Tensor:
    """[B, S], True at the first token of every document and of every run of padding."""
    starts = torch.zeros(rows, length, dtype=torch.bool, device=device)
    ids = next((whole[key] for key in DOCUMENT_KEYS if whole.get(key) is not None), None)
    if ids is not None:
        starts[:, 1:] |= ids[:, 1:] != ids[:, :-1]
    elif whole.get("position_ids") is not None:
        starts[:, 1:] |= whole["position_ids"].diff(dim=1) != 1
    mask = whole.get("attention_mask")
    if mask is not None:
        mask = mask.bool()
        _refuse_holes(mask, starts.cumsum(1))
        starts[:, 1:] |= mask[:, 1:] != mask[:, :-1]
    starts[:, 0] = True
    return starts


def _first_positions(position_ids: torch.Tensor, starts: torch.Tensor, padded: bool) -> tuple[tuple[int, ...], ...]:
    """The position of every document's first token, row by row, where it says how chunks of attention are counted.

    As Transformers has it: in a batch with several documents in some row, and without ``attention_mask``. Otherwise
    they are counted from the first token that is not padding.
    """
    if int(starts.sum()) == len(starts):
        return ()
    of_padding = [0] if padded else []
    rows = zip(position_ids.expand(starts.shape).cpu(), starts.cpu(), strict=True)
    return tuple((*positions[begins].tolist(), *of_padding) for positions, begins in rows)


def _refuse_holes(mask: torch.Tensor, documents: torch.Tensor) -> None:
    """Padding inside a document would split it into two that do not see one another."""
    if bool(mask.all()):
        return
    for row, (kept, ids) in enumerate(zip(mask.cpu(), documents.cpu(), strict=True)):
        at = kept.nonzero().flatten()
        inside = (at.diff() > 1) & (ids[at].diff() == 0)
        if bool(inside.any()):
            raise ValueError(
                f"attention_mask: row {row} has zeros between tokens of one document (after token "
                f"{int(at[:-1][inside][0])}); allowed: padding before and after. Documents are told apart by "
                "position_ids or document_ids"
            )

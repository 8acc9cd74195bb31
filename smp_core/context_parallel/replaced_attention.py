"""The active split batch, and torch's attention under it.

:func:`enabled` is entered around forward and around backward (activation checkpointing
runs forward again there). Inside, ``F.scaled_dot_product_attention`` is attention over
the whole sequence, wherever it is called from; Transformers models look at
:func:`active_split` through their own attention function
(:mod:`smp_core.context_parallel.transformers_models`).

The state belongs to the process and not to a thread: on an accelerator backward runs on
threads of its own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_core.context_parallel.attention import SLICED, attention
from smp_core.context_parallel.documents import Key
from smp_core.context_parallel.key_value_exchange import ContextGroup
from smp_core.context_parallel.sequence_plan import SequencePlan
from smp_core.outside import changed
from smp_core.torch_facts import Args, Kwargs


class TriesCalls(Protocol):
    """The trial of the first calls of a model
    (:mod:`smp_core.context_parallel.trial`)."""

    def watching(
        self, split: SplitBatch
    ) -> contextlib.AbstractContextManager[None]: ...

    def of_call(
        self,
        module: nn.Module,
        args: Args,
        kwargs: Kwargs,
        split: SplitBatch,
        forward: Callable[..., Any] | None = None,
        part: int = 0,
    ) -> None: ...

    def of_output(self, module: nn.Module, output: Any, split: SplitBatch) -> None: ...


@dataclass(eq=False)
class SplitBatch:
    """The part of a batch that one rank has.

    Attributes:
        batch: the model's input.
        plan: the tokens of each rank.
        length: tokens per row before padding.
        rank: this rank's place in the plan.
        encoded: the plan as the kernels take it.
        position_ids: [B, L] or [1, L], this rank's positions in their documents.
        labels: the tensor in ``batch["labels"]``, by which the model's hook recognises
            this batch.
        shift_labels: [B, L], the target of each of this rank's tokens; -100: none.
        values: [B, L, ...], the targets themselves where they are values and no classes.
        tokens_per_rank: targets of all ranks / ranks, as 0-d tensor: (sum of losses) /
            this, averaged over ranks, is the mean over all targets.
        weight: this rank's targets / ``tokens_per_rank``: the factor from a mean over
            its targets to its part of the mean over all targets.
        count_targets: sets the two above, if they are not counted yet; collective over all
            ranks that train on the batch.
        divided_by_model: whether the model's loss divides by ``tokens_per_rank``, as
            Transformers' causal models do.
        weighted: whether :func:`weighted_mean` has been asked for this batch.
        loss_gradients: of losses that were weighted under a trial, their gradients after
            backward.
        last_position: 0-d tensor, the largest position in the whole sequences; None:
            ``length - 1``.
        first_positions: the positions at which documents begin, for
            :meth:`SequencePlan.in_chunks`.
        group: the context group. A plan has its number alone, and the group is
            registered only while it is referenced.
        dims: key (or place) in ``batch`` -> dim that is the sequence.
        sequences: the tensors in ``batch`` with tokens, whatever the code that trains
            takes out of it.
        trial: tries the model's first calls under a batch.
    """

    batch: Any
    plan: SequencePlan
    length: int
    rank: int
    encoded: Tensor = field(init=False)
    position_ids: Tensor | None = None
    labels: Tensor | None = None
    shift_labels: Tensor | None = None
    values: Tensor | None = None
    tokens_per_rank: Tensor | None = None
    weight: Tensor | None = None
    count_targets: Callable[[], None] | None = None
    divided_by_model: bool = False
    weighted: bool = False
    loss_gradients: list[Tensor] = field(default_factory=list)
    last_position: Tensor | None = None
    first_positions: tuple[tuple[int, ...], ...] = ()
    group: ContextGroup | None = None
    dims: Mapping[Key, int] = field(default_factory=dict)
    sequences: dict[Key, Tensor] = field(default_factory=dict)
    trial: TriesCalls | None = None
    _chunked: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.encoded = self.plan.encode()

    def at(self, key: Key) -> Tensor:
        """Return the tensor in ``batch``; one that was taken out of it (``labels =
        batch.pop("labels")``), too."""
        try:
            found: Tensor = self.batch[key]
        except LookupError:
            found = self.sequences[key]
        return found

    def encoded_in_chunks(self, size: int) -> Tensor:
        """Return the plan of attention within chunks of ``size`` positions, as the
        tensor that the kernels take."""
        if size not in self._chunked:
            self._chunked[size] = self.plan.in_chunks(
                size, self.first_positions
            ).encode()
        return self._chunked[size]


class _State:
    split: SplitBatch | None = None


_STATE = _State()


def active_split() -> SplitBatch | None:
    """Return the batch of the surrounding :func:`enabled`, or None."""
    return _STATE.split


@contextlib.contextmanager
def enabled(split: SplitBatch | None) -> Iterator[None]:
    """Make attention inside the block attend over the unsplit sequences of ``split``;
    None changes nothing.

    ``split`` comes from :meth:`ContextParallel.split`.

    Raises:
        ValueError: from an attention that has no such form: a mask, dropout, other
            lengths than the batch's.
    """
    if split is None:
        yield
        return
    # Nested blocks (a recomputation in backward) only exchange the batch: the names are
    # replaced already.
    is_outermost = _STATE.split is None
    with changed(_STATE, split=split), contextlib.ExitStack() as around:
        if is_outermost:
            around.enter_context(_torchs_attention_replaced())
            if split.trial is not None:
                around.enter_context(split.trial.watching(split))
        yield


def try_call(
    module: nn.Module,
    args: Args,
    kwargs: Kwargs,
    forward: Callable[..., Any] | None = None,
    part: int = 0,
) -> None:
    """Try a call under the active batch, as
    :meth:`smp_core.context_parallel.trial.Trial.of_call` says."""
    split = _STATE.split
    if split is not None and split.trial is not None:
        split.trial.of_call(module, args, kwargs, split, forward, part)


def try_output(module: nn.Module, output: Any) -> None:
    """Watch what the step's loss takes of a call's output, as
    :meth:`smp_core.context_parallel.trial.Trial.of_output` says."""
    split = _STATE.split
    if split is not None and split.trial is not None:
        split.trial.of_output(module, output, split)


def positions(tokens: Tensor) -> Tensor:
    """Return the positions of this rank's tokens in their documents: the indices for a
    table of positions.

    Args:
        tokens: [B, L, ...], this rank's.

    Returns:
        [B, L] or [1, L], int64; 0, 1, 2, ... when no batch is split.
    """
    split = _STATE.split
    if split is None:
        return torch.arange(tokens.shape[1], device=tokens.device)[None]
    # Without positions of the batch: places in the sequence.
    if split.position_ids is None:
        split.position_ids = split.plan.positions(split.rank)[None]
    # Another length is another tensor than the batch's tokens.
    if split.position_ids.shape[1] != tokens.shape[1]:
        raise ValueError(
            f"{tokens.shape[1]} tokens, but this rank has {split.position_ids.shape[1]} of the split batch; {SLICED}"
        )
    return split.position_ids.to(tokens.device)


def weighted_mean(loss: Tensor) -> Tensor:
    """Turn a mean over this rank's targets into its part of the mean over all ranks'
    targets.

    The average of the result over all ranks is the loss of the unsplit batch, however
    uneven the targets are: train on it, and log it with ``sync_dist=True``. Without a
    split batch, or if it has no targets, the result is ``loss`` itself. The loss that a
    Transformers model computes from the split batch is such a part already.
    """
    split = _STATE.split
    if split is None:
        return loss
    # A step that weights its loss itself is not weighted again (:func:`part_of_mean`).
    split.weighted = True
    return _part(loss, split)


def part_of_mean(loss: Tensor) -> Tensor:
    """Apply :func:`weighted_mean` once for a training step, unless the model or its
    code has weighted the loss."""
    split = _STATE.split
    if split is None or split.weighted:
        return loss
    if split.divided_by_model:
        _watch(loss, split)
        return loss
    return _part(loss, split)


def _part(loss: Tensor, split: SplitBatch) -> Tensor:
    """Multiply a mean over this rank's targets by this rank's weight."""
    if split.weight is None:
        return loss
    _watch(loss, split)
    # The mean over no targets is nan.
    weight = split.weight.to(loss.dtype)
    return torch.where(weight > 0, loss * weight, torch.zeros_like(loss))


def _watch(loss: Tensor, split: SplitBatch) -> None:
    """Keep the loss's own gradient where the step is tried: what the loss takes of
    outputs is compared with it."""
    if (
        split.trial is not None
        and loss.requires_grad
        and not torch.compiler.is_compiling()
    ):
        gradients = split.loss_gradients
        loss.register_hook(lambda gradient: gradients.append(gradient.detach()))


_TORCHS_ATTENTION = F.scaled_dot_product_attention
_TORCHS_MULTI_HEAD = F.multi_head_attention_forward
# (names of a module, name) of every reference to one of the two; found again when
# modules were imported since.
_known: list[tuple[dict[str, Any], str]] = []
# The number of modules at the last search.
_modules_seen = 0


@contextlib.contextmanager
def _torchs_attention_replaced() -> Iterator[None]:
    """Replace torch's attention by :func:`_attend`, in every module that refers to it
    by some name.

    Names are replaced, and no TorchFunctionMode is entered: a mode is off inside
    backward, where checkpointing recomputes, and breaks graphs that compile without it.

    The fast path of nn.TransformerEncoder, which calls neither, is off inside.
    """
    # Looking through all modules takes time: once, and when there are more of them.
    global _modules_seen
    if _modules_seen != len(sys.modules):
        _modules_seen = len(sys.modules)
        _known[:] = _references_to_torchs_attention()
    # Only names that still refer to torch's own function are replaced.
    before = [names.get(name) for names, name in _known]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    for (names, name), value in zip(_known, before, strict=True):
        if value is _TORCHS_ATTENTION:
            names[name] = _attend
        elif value is _TORCHS_MULTI_HEAD:
            names[name] = _multi_head
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        for (names, name), value in zip(_known, before, strict=True):
            names[name] = value
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _references_to_torchs_attention() -> list[tuple[dict[str, Any], str]]:
    """Find every (names of a module, name) but those in this module, that refers to one
    of torch's two functions."""
    found = []
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        # This module keeps torch's functions for its own use.
        if names is globals():
            continue
        for name, value in list(names.items()):
            if value is _TORCHS_ATTENTION or value is _TORCHS_MULTI_HEAD:
                found.append((names, name))
    return found


def _multi_head(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Call ``F.multi_head_attention_forward``, which calls torch's attention only if no
    weights are asked for."""
    if _STATE.split is not None and kwargs.get("need_weights", True):
        raise ValueError(
            "nn.MultiheadAttention with need_weights=True returns the weights of whole sequences, which no rank has; "
            "write need_weights=False"
        )
    return _TORCHS_MULTI_HEAD(*args, **kwargs)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend as ``F.scaled_dot_product_attention`` does, with queries, keys and values
    [B, H, L, D]."""
    split = _STATE.split
    # A module that was first imported inside of :func:`enabled` keeps this function.
    if split is None:
        return _TORCHS_ATTENTION(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    # A mask of a rank's own tokens says nothing of keys on other ranks.
    if attn_mask is not None:
        raise ValueError(
            "attn_mask: context parallelism keeps no mask of whole sequences; causality, documents and padding follow "
            "from is_causal=True and the batch (docs/context-batches.md), so pass attn_mask=None"
        )
    refuse_dropout(dropout_p)
    if key.shape[1] != query.shape[1] and not enable_gqa:
        raise ValueError(
            f"{query.shape[1]} query heads and {key.shape[1]} key heads; write enable_gqa=True if heads are grouped"
        )
    q, k, v = (tensor.transpose(1, 2) for tensor in common_dtype(query, key, value))
    return attention(q, k, v, split.encoded, causal=is_causal, scale=scale).transpose(
        1, 2
    )


def refuse_dropout(probability: float) -> None:
    """Raise where attention weights would be dropped."""
    if probability:
        raise ValueError(
            f"attention dropout of {probability}: dropping weights of one softmax on several ranks is not supported; "
            "set the model's attention dropout to 0"
        )


def common_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors to autocast's dtype where autocast is on, as torch's own attention
    does."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind) and all(
        tensor.dtype != torch.float64 for tensor in tensors
    ):
        return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)
    return tensors

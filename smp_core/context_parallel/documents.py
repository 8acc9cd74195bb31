"""The documents of a batch: the places where they begin, and the positions of tokens in
them.

Several texts may be packed into one row of a batch, and padding may stand before or
after them. Tokens of different documents do not attend to one another. In the order in
which they count, a batch tells its documents by

    1. ``document_ids`` or ``seq_idx``: one number for each document
    2. ``position_ids``: they start again in each document
    3. ``attention_mask``, besides 1 or 2: a run of padding is a document that nothing
       attends to

Shape letters: B rows, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from smp_core.context_parallel.chunked_loss import IGNORED

Key = str | int
DOCUMENT_KEYS = ("document_ids", "seq_idx")


def document_starts_of(
    sequences: Mapping[Key, Any], rows: int, length: int, device: torch.device
) -> Tensor:
    """Find the first token of every document and of every run of padding.

    Args:
        sequences: key -> tensor [B, S, ...] of the batch.
        rows: B.
        length: S.

    Returns:
        [B, S], bool.

    Raises:
        ValueError: padding between tokens of one document.
    """
    # Each source of documents adds its borders; ids count before positions.
    starts = torch.zeros(rows, length, dtype=torch.bool, device=device)
    ids = _document_ids(sequences)
    position_ids = sequences.get("position_ids")
    if ids is not None:
        starts[:, 1:] |= ids[:, 1:] != ids[:, :-1]
    elif position_ids is not None:
        starts[:, 1:] |= position_ids.diff(dim=1) != 1
    mask = sequences.get("attention_mask")
    if mask is not None:
        mask = mask.bool()
        # A run of padding is a document of its own, so that nothing attends to it.
        _refuse_holes(mask, starts.cumsum(1))
        starts[:, 1:] |= mask[:, 1:] != mask[:, :-1]
    starts[:, 0] = True
    return starts


def positions_in_documents(sequences: Mapping[Key, Any], starts: Tensor) -> Tensor:
    """Return the batch's ``position_ids``, or count them: in each document if ids tell
    documents, else in each row.

    Args:
        starts: [B, S], from :func:`document_starts_of`.

    Returns:
        [B, S] or [1, S], int64.
    """
    position_ids: Tensor | None = sequences.get("position_ids")
    if position_ids is not None:
        return position_ids
    rows, length = starts.shape
    in_row = torch.arange(length, device=starts.device).expand(rows, -1)
    if _document_ids(sequences) is None:
        return in_row
    # The latest start so far, at every token.
    start_of_document = torch.where(starts, in_row, 0).cummax(1).values
    return in_row - start_of_document


def positions_of_first_tokens(
    position_ids: Tensor, starts: Tensor, padded: bool
) -> tuple[tuple[int, ...], ...]:
    """List the position of every document's first token, row by row; none if every row
    is one document.

    Chunked attention counts its chunks from these positions, as in Transformers, in a
    batch with several documents in some row and without ``attention_mask``. In other
    batches it counts from the first token that is not padding.

    Args:
        position_ids: [B, S] or [1, S].
        starts: [B, S], from :func:`document_starts_of`.
        padded: whether the split adds a document of padding to each row.
    """
    if int(starts.sum()) == len(starts):
        return ()
    # Padding that the split adds counts from 0.
    of_padding = [0] if padded else []
    positions_BS = position_ids.expand(starts.shape).cpu()
    found = []
    for positions_S, starts_S in zip(positions_BS, starts.cpu(), strict=True):
        found.append((*positions_S[starts_S].tolist(), *of_padding))
    return tuple(found)


def labels_within_documents(batch: Mapping[str, Any]) -> Tensor:
    """Return ``batch["labels"]`` [B, S] without the first token of every document,
    which no token predicts."""
    labels = batch["labels"]
    sequences: dict[Key, Any] = {
        key: item for key, item in batch.items() if has_sequence_of(item, labels)
    }
    rows, length = labels.shape
    return labels.masked_fill(
        document_starts_of(sequences, rows, length, labels.device), IGNORED
    )


def has_sequence_of(item: Any, tokens: Tensor) -> bool:
    """Return whether an item of a batch has the rows and the length of ``tokens`` [B,
    S, ...]."""
    return (
        isinstance(item, Tensor)
        and item.dim() >= 2
        and item.shape[:2] == tokens.shape[:2]
    )


def _document_ids(sequences: Mapping[Key, Any]) -> Tensor | None:
    given = [sequences[key] for key in DOCUMENT_KEYS if sequences.get(key) is not None]
    return given[0] if given else None


def _refuse_holes(mask: Tensor, documents: Tensor) -> None:
    """Raise for padding inside a document: it would split the document into two that do
    not attend to one another.

    Args:
        mask: [B, S], False for padding.
        documents: [B, S], a number for each document.
    """
    if bool(mask.all()):
        return
    for row, (mask_S, documents_S) in enumerate(
        zip(mask.cpu(), documents.cpu(), strict=True)
    ):
        # Two neighbouring tokens of one document with padding between them.
        tokens = mask_S.nonzero().flatten()
        follows_padding = tokens.diff() > 1
        same_document = documents_S[tokens].diff() == 0
        holes = follows_padding & same_document
        if bool(holes.any()):
            last_before = int(tokens[:-1][holes][0])
            raise ValueError(
                f"attention_mask: row {row} has zeros between tokens of one document (after token {last_before}); "
                "allowed: padding before and after. Documents are told apart by position_ids or document_ids"
            )

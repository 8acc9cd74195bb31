"""A Transformers model's table of learned positions: which position each token of a
batch has in it, and sequences that are longer, refused in words.

Most models count the tokens of a row from 0, padding too. Some leave padding out (OPT,
by the mask; RoBERTa, by the token), and RoBERTa counts from ``padding_idx + 1``. A rank
that has a part of the sequence gets its positions from the unsplit one.

Torch says "index out of range in self" on a CPU, and ends the process by an assertion
on a GPU. Positions that are computed (RoPE) have no table, and no such end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from smp_core.context_parallel.documents import DOCUMENT_KEYS, Key
from smp_core.context_parallel.replaced_attention import active_split
from smp_core.torch_facts import Args, Kwargs, transformers_models


@dataclass(frozen=True)
class LearnedPositions:
    """A model's table of learned positions.

    Attributes:
        model: the name of the model's class.
        table: the name of the table in it.
        count: its positions.
        skips_padding: whether the model counts positions of unmasked tokens only.
        padding: the token that the model leaves out and counts from, as RoBERTa does;
            None: positions are from 0.
    """

    model: str
    table: str
    count: int
    skips_padding: bool
    padding: int | None = None

    def positions(self, sequences: Mapping[Key, Any], counted: Tensor) -> Tensor:
        """Return the ``position_ids`` that the model would make of whole sequences.

        Args:
            sequences: the batch's, of which some may be missing.
            counted: [B, S], positions in rows, or in documents if ids tell these.
        """
        if not self.skips_padding or sequences.get("position_ids") is not None:
            return counted
        # What the model leaves out: its padding token, or what is masked.
        tokens, mask = sequences.get("input_ids"), sequences.get("attention_mask")
        taken = mask if self.padding is None else tokens
        if taken is not None and not any(key in sequences for key in DOCUMENT_KEYS):
            has_place = (taken != (self.padding or 0)).long()
            counted = has_place.cumsum(1) * has_place - 1
        return counted if self.padding is None else counted + self.padding + 1

    def require(self, length: int, last_position: Tensor | None = None) -> None:
        """Refuse sequences of a length.

        Args:
            last_position: the largest position in them, where it is not the last
                token's: of packed documents, or padding. It is looked at only where the
                length alone is too large.

        Raises:
            ValueError: names the model's limit, the length, and what to type.
        """
        if length <= self.count or (
            last_position is not None and int(last_position) < self.count
        ):
            return
        raise ValueError(
            f"sequences of {length} tokens: {self.model} has learned {self.count} positions ({self.table}, "
            f"config.max_position_embeddings={self.count}); allowed: at most {self.count} tokens. Give it shorter "
            f"sequences, or make the model with max_position_embeddings={length}, whose further positions have to be "
            "learned"
        )

    def require_of_call(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Refuse the sequences of a model's call: a forward hook. Split ones were
        looked at when they were whole."""
        tokens = next(
            (
                kwargs[key]
                for key in ("input_ids", "inputs_embeds")
                if kwargs.get(key) is not None
            ),
            None,
        )
        if tokens is None and args:
            tokens = args[0]
        if (
            not isinstance(tokens, Tensor)
            or tokens.dim() < 2
            or active_split() is not None
        ):
            return
        length = tokens.shape[1]
        if length <= self.count:
            return
        # Longer rows may still have small positions: packed documents, or padding that
        # is not counted.
        given, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        last = None if given is None else given.max()
        if last is None and self.skips_padding and mask is not None and mask.dim() == 2:
            last = mask.sum(1).max() - 1
        self.require(length, last)


def learned_positions(model: nn.Module) -> LearnedPositions | None:
    """Find the table of learned positions of the first Transformers model in ``model``;
    None if it has none."""
    found = transformers_models(model)
    if not found:
        return None
    # A table is the one of positions if its size is the configuration's.
    limit = getattr(found[0].config.get_text_config(), "max_position_embeddings", None)
    for name, module in found[0].named_modules():
        if not isinstance(module, nn.Embedding) or not _is_of_positions(name):
            continue
        # Some tables begin with rows that no position has.
        before = (
            getattr(module, "offset", 0)
            if module.padding_idx is None
            else module.padding_idx + 1
        )
        count = module.num_embeddings - before
        if limit in (count, module.num_embeddings):
            return LearnedPositions(
                type(found[0]).__name__.removeprefix("FSDP"),
                name,
                count,
                before > 0,
                module.padding_idx,
            )
    return None


def require_lengths(model: nn.Module) -> LearnedPositions | None:
    """Refuse sequences longer than the table of learned positions, before each call of
    the model that has one.

    Returns:
        the table, for sequences that are split; None if there is none.
    """
    table = learned_positions(model)
    if table is not None:
        transformers_models(model)[0].register_forward_pre_hook(
            table.require_of_call, prepend=True, with_kwargs=True
        )
    return table


def _is_of_positions(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last == "wpe" or "position" in last

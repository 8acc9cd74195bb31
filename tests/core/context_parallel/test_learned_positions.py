"""Sequences longer than a table of learned positions are refused with the limit, the
length and what to type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from smp_core.context_parallel.batch import ContextParallel
from smp_core.context_parallel.key_value_exchange import ContextGroup
from smp_core.context_parallel.learned_positions import (
    learned_positions,
    require_lengths,
)
from smp_core.context_parallel.replaced_attention import enabled, positions

LIMIT, WORDS = 8, 11
SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": WORDS,
    "pad_token_id": 1,
}
MODELS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_positions=LIMIT, n_embd=8, n_layer=1, n_head=2
        )
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(
            **SMALL, max_position_embeddings=LIMIT, intermediate_size=8
        )
    ),
    # Tables that begin with rows of no position: 2 of OPT's, padding_idx + 1 of
    # RoBERTa's.
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            **SMALL, max_position_embeddings=LIMIT, ffn_dim=8, word_embed_proj_dim=8
        )
    ),
    "roberta": lambda: transformers.RobertaForMaskedLM(
        transformers.RobertaConfig(
            **SMALL, max_position_embeddings=LIMIT + 2, intermediate_size=8
        )
    ),
}


def ids(length: int) -> torch.Tensor:
    return torch.full((2, length), 5)


@pytest.mark.parametrize("name", MODELS)
def test_a_call_is_refused_from_the_first_length_that_the_model_cannot_take(
    name: str,
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    with pytest.raises((IndexError, RuntimeError)):
        model(ids(LIMIT + 1))  # what the model itself says
    require_lengths(model)
    model(ids(LIMIT))
    for call in (
        lambda: model(ids(LIMIT + 1)),
        lambda: model(input_ids=ids(LIMIT + 1)),
    ):
        with pytest.raises(ValueError) as refused:
            call()
        for words in (
            f"sequences of {LIMIT + 1} tokens",
            f"at most {LIMIT} tokens",
            type(model).__name__,
        ):
            assert words in str(refused.value)
        assert "shorter sequences" in str(
            refused.value
        ) and "max_position_embeddings=" in str(refused.value)


def test_documents_and_padding_count_by_their_own_positions() -> None:
    """They are in one row, which is longer than the table, and each fits."""
    gpt2, opt = MODELS["gpt2"](), MODELS["opt"]()
    for model in (gpt2, opt):
        require_lengths(model)
    packed = torch.cat([torch.arange(LIMIT), torch.arange(4)])[None]
    gpt2(input_ids=ids(LIMIT + 4), position_ids=packed.expand(2, -1))
    mask = torch.ones(2, LIMIT + 4)
    mask[:, LIMIT:] = 0
    opt(input_ids=ids(LIMIT + 4), attention_mask=mask)
    with pytest.raises(ValueError, match="sequences of 12 tokens"):
        gpt2(input_ids=ids(LIMIT + 4), position_ids=torch.arange(LIMIT + 4)[None])


@pytest.mark.parametrize("name", MODELS)
def test_a_split_batch_has_the_positions_that_the_model_counts(name: str) -> None:
    """With padding on both sides, with a padding token that is not masked, and in a
    pair: what the model looks up in its table is the same with them and without."""
    model = MODELS[name]()
    found = learned_positions(model)
    assert found is not None
    sequences = ContextParallel(ContextGroup(None, 0, (0,), 0), learned=found)
    looked_up: list[torch.Tensor] = []
    model.get_submodule(found.table).register_forward_hook(
        lambda _, args, values: looked_up.append(values)
    )
    tokens, mask = ids(6), torch.ones(2, 6, dtype=torch.long)
    tokens[0, :2], mask[0, :2] = 1, 0
    tokens[1, 4:], mask[1, 4:] = 1, 0
    tokens[1, 2] = 1
    mapping = sequences.split(
        {"input_ids": tokens, "attention_mask": mask}, count=False
    )
    pair = sequences.split((tokens, tokens), count=False)
    with enabled(pair):
        of_pair = {"input_ids": pair.batch[0], "position_ids": positions(tokens)}
    for split, given in (
        ({"input_ids": tokens, "attention_mask": mask}, mapping.batch),
        ({"input_ids": tokens}, of_pair),
    ):
        looked_up.clear()
        model(**split)
        model(**given)
        alone, ours = (values.expand(2, -1, -1) for values in looked_up)
        kept = split.get("attention_mask", torch.ones_like(tokens)).bool()
        assert torch.equal(alone[kept], ours[kept])


def test_a_model_without_a_table_has_no_limit() -> None:
    """A vocabulary as large as the context is none either."""
    config = transformers.LlamaConfig(
        **{**SMALL, "vocab_size": LIMIT},
        intermediate_size=8,
        max_position_embeddings=LIMIT,
    )
    model = transformers.LlamaForCausalLM(config)
    assert require_lengths(model) is None
    model(ids(LIMIT + 4))


def test_a_batch_is_refused_before_it_is_split() -> None:
    """A rank's part would fit."""
    sequences = ContextParallel(
        ContextGroup(None, 0, (0, 1), 0), learned=learned_positions(MODELS["gpt2"]())
    )
    assert sequences.split({"input_ids": ids(LIMIT)}, count=False).length == LIMIT
    with pytest.raises(
        ValueError, match=f"sequences of {LIMIT + 1} tokens: GPT2LMHeadModel"
    ):
        sequences.split({"input_ids": ids(LIMIT + 1)}, count=False)
    starts = torch.cat([torch.arange(LIMIT), torch.arange(4)])[None].expand(2, -1)
    assert (
        sequences.split(
            {"input_ids": ids(LIMIT + 4), "position_ids": starts}, count=False
        ).length
        == LIMIT + 4
    )

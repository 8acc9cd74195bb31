"""Muon's parameters are the matrices between embeddings and head, found in models that
name them in no common way."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers
from torch import nn

from smp_core.optim import muon_groups


def named_groups(model: nn.Module, **options: object) -> dict[str, tuple[str, object]]:
    """Algorithm and split of each parameter, by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for group in muon_groups(model, **options):  # type: ignore[arg-type]
        for parameter in group["params"]:
            found[names[id(parameter)]] = group["algorithm"], group.get("split")
    return found


def by_adamw(model: nn.Module, **options: object) -> set[str]:
    return {
        name
        for name, (algorithm, _) in named_groups(model, **options).items()
        if algorithm == "adamw"
    }


class Own(nn.Module):
    """A table that is no nn.Embedding, a convolution, a head that Transformers does not
    name."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 8), nn.Parameter(torch.zeros(16, 8))
        self.mix, self.inner = nn.Conv1d(8, 8, 3), nn.Linear(8, 12)
        self.frozen, self.out = (
            nn.Linear(8, 8).requires_grad_(False),
            nn.Linear(8, 50, bias=False),
        )


def test_of_an_own_model() -> None:
    model = Own()
    assert named_groups(model)["inner.weight"] == ("muon", None)
    assert by_adamw(model, by_adamw=["plac*"]) == {
        "words.weight", "places", "mix.weight", "mix.bias", "inner.bias", "out.weight",
    }  # fmt: skip
    assert not any("frozen" in name for name in named_groups(model))


def test_of_transformers_models() -> None:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 32,
    }
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, intermediate_size=24)
    )
    rest = by_adamw(llama)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= rest
    assert all(
        "norm" in name or name in ("model.embed_tokens.weight", "lm_head.weight")
        for name in rest
    )
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32)
    )
    found = named_groups(gpt2, split={"*.c_attn.weight": 3})
    # Conv1D: outputs in columns.
    assert found["transformer.h.0.attn.c_attn.weight"] == ("muon", (1, (16, 16, 16)))
    assert (
        found["transformer.wte.weight"][0]
        == found["transformer.wpe.weight"][0]
        == "adamw"
    )
    experts = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **sizes, intermediate_size=24, num_key_value_heads=1, num_local_experts=4
        )
    )
    stacks = [
        name for name, parameter in experts.named_parameters() if parameter.ndim == 3
    ]
    assert stacks and all(
        named_groups(experts)[name] == ("muon", None) for name in stacks
    )


def test_a_layer_as_wide_as_positions_are_many_is_no_head() -> None:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 32,
    }
    bert = transformers.BertForMaskedLM(
        transformers.BertConfig(
            **sizes, intermediate_size=24, max_position_embeddings=16
        )
    )
    rest = {
        name
        for name in by_adamw(bert)
        if not name.endswith(("bias", "LayerNorm.weight"))
    }
    assert rest == {
        f"bert.embeddings.{kind}_embeddings.weight"
        for kind in ("word", "position", "token_type")
    }


def test_heads_of_several_codebooks_are_all_heads() -> None:
    config = transformers.MusicgenDecoderConfig(
        vocab_size=32,
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_codebooks=2,
    )
    rest = by_adamw(transformers.MusicgenForCausalLM(config))
    assert {"lm_heads.0.weight", "lm_heads.1.weight"} <= rest
    assert not any(".fc1.weight" in name or ".q_proj.weight" in name for name in rest)


def test_options_that_fit_nothing_are_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"muon_groups: '\*\.qkv' names no trainable parameter"
    ):
        muon_groups(Own(), split={"*.qkv": 3})
    with pytest.raises(
        ValueError, match=r"inner.weight has 12 outputs, which \[5\] do not make up"
    ):
        muon_groups(Own(), split={"inner.weight": 5})
    with pytest.raises(
        ValueError, match=r"inner.weight is named by 'inner.w\*' and '\*.weight', which"
    ):
        muon_groups(Own(), split={"inner.w*": 3, "*.weight": (6, 6)})
    # Both say the same.
    muon_groups(Own(), split={"inner.w*": 3, "inner.weight": 3})


def test_says_which_parameters_are_whose(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "smp"):
        muon_groups(Own())
    assert "by muon: 2 parameters of 224 elements: places, inner.weight" in caplog.text
    assert "by adamw: 5 parameters" in caplog.text

"""Unmodified Transformers models cut into three stages, one after the other in one
process: losses and gradients are those of the whole model to the last bit (float64,
tiny)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from smp_core.config import SmpConfig
from smp_core.engine.decide import decide
from smp_core.pipeline.rehearsal import rehearse
from smp_core.pipeline.stage import Stage, StageDone
from smp_core.pipeline.stand_ins import played_of
from smp_core.plan.chain.chain import Chain
from smp_core.plan.chain.recording import with_chain
from smp_core.plan.shapes import Cluster, Shapes
from smp_core.plan.stages import Stages
from smp_core.topology import Topology

WORDS = 48
COMMON: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
GROUPED = {"num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "experts_implementation": "eager",
}
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "Mistral": GROUPED,
    "Qwen2": GROUPED,
    "Qwen3": HEADS,
    "Gemma": HEADS,
    "Gemma2": HEADS,
    "Gemma3Text": HEADS,
    "Phi": GROUPED,
    "Phi3": GROUPED,
    "Olmo": GROUPED,
    "Olmo2": GROUPED,
    "GPTNeoX": {},
    "GPT2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "GPTJ": {
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
        "rotary_dim": 4,
    },
    "GPTBigCode": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "Starcoder2": {**GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "Glm": HEADS,
    "Glm4": HEADS,
    "Cohere": GROUPED,
    "StableLm": GROUPED,
    "Granite": GROUPED,
    "Falcon": {"alibi": False},
    "Bloom": {"n_layer": 3, "n_head": 4},
    "OPT": {"ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 32},
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 64},
    "Persimmon": {},
    "Helium": HEADS,
    "Nemotron": GROUPED,
    "SmolLM3": GROUPED,
    "Mixtral": {**GROUPED, "num_local_experts": 4, "experts_implementation": "eager"},
    "Qwen3Moe": {**HEADS, **EXPERTS, "num_experts": 4},
    "Olmoe": {**GROUPED, **EXPERTS, "num_experts": 4},
}
TIED = ("Llama", "Gemma2", "OPT", "GPTNeoX")


def decoder(
    kind: str, tied: bool | None = None
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    flags = {} if tied is None else {"tie_word_embeddings": tied}
    config = getattr(transformers, f"{kind}Config")(
        **{**COMMON, **DECODERS[kind], **flags}
    )
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    )
    tokens = torch.randint(3, WORDS, (2, 12))
    return model, {"input_ids": tokens, "labels": tokens}


def bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    flags = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**{**COMMON, **flags}))
    tokens = torch.randint(3, WORDS, (2, 12))
    return model, {"input_ids": tokens, "labels": tokens}


def vit() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    flags = {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "image_size": 12,
        "patch_size": 4,
    }
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(**{**COMMON, **flags}, num_labels=5)
    )
    return model, {
        "pixel_values": torch.randn(2, 3, 12, 12, dtype=torch.float64),
        "labels": torch.tensor([1, 3]),
    }


class OneAfterTheOther:
    """The stages of a model as copies in one process."""

    def __init__(self, model: nn.Module, stages: Stages) -> None:
        self._stages = stages
        self.models = [copy.deepcopy(model) for _ in range(stages.n_chunks)]
        self._hooks = [
            Stage(
                each,
                stages,
                stage,
                played_of(each, stages.chain),
                dtype=None,
                outside=_never,
                entered=lambda: None,
                passed=lambda _: None,
                replaced=lambda _: None,
            )
            for stage, each in enumerate(self.models)
        ]

    def gradients(
        self, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        taken: list[torch.Tensor | None] = [None]
        given: list[torch.Tensor] = []
        for stage, model in zip(self._hooks, self.models, strict=True):
            stage.incoming, stage.calls, stage.is_running = taken[-1], 0, True
            try:
                given.append(model(**batch).loss)
            except StageDone as done:
                given.append(done.given)
            taken.append(given[-1].detach().requires_grad_())
        gradient = None
        for activation, end in zip(reversed(taken[:-1]), reversed(given), strict=True):
            torch.autograd.backward(end, gradient)
            gradient = None if activation is None else activation.grad
        found: dict[str, torch.Tensor] = {}
        for number, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                if number in self._stages.owners[name] and parameter.grad is not None:
                    found[name] = (
                        found[name] + parameter.grad
                        if name in found
                        else parameter.grad
                    )
        return given[-1].detach(), found


def _never(*_: Any) -> Any:
    raise AssertionError("a call outside of a step")


def recorded_on_meta(
    make: Callable[[], tuple[nn.Module, Any]], asked: SmpConfig, example: Any
) -> Chain | None:
    """The chain of the same model without values."""
    with torch.device("meta"):
        model: Any = make()[0].train()
    model.example_input_array = example
    if getattr(model.config, "num_local_experts", None) or getattr(
        model.config, "num_experts", None
    ):
        # The eager one asks which tokens come to which expert.
        model.set_experts_implementation("batched_mm")
    return with_chain(Shapes.of(model, asked), model).chain


def assert_bits(
    make: Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]], units: Any = "auto"
) -> None:
    torch.manual_seed(0)
    model, batch = make()
    model = model.double().train()
    model.example_input_array = {
        name: value for name, value in batch.items() if name != "labels"
    }  # type: ignore[assignment]
    asked = SmpConfig(
        shard_degree=1,
        pipeline_parallel_degree=3,
        pipeline={"split": [1, 1, 1]},
        units=units,
    )
    shapes = with_chain(Shapes.of(model, asked), model)
    assert recorded_on_meta(make, asked, model.example_input_array) == shapes.chain
    stages = decide(shapes, asked, Cluster(Topology.uniform(3, 1))).stages
    assert stages is not None
    loss, gradients = OneAfterTheOther(model, stages).gradients(batch)
    model(**batch).loss.backward()
    whole = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert torch.equal(loss, model(**batch).loss)
    assert gradients.keys() == whole.keys()
    different = [
        name for name in whole if not torch.equal(gradients[name], whole[name])
    ]
    assert not different, different[:5]


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_a_decoder_in_three_stages_computes_the_same_bits(kind: str) -> None:
    assert_bits(lambda: decoder(kind))


def test_a_vision_transformer_in_three_stages_computes_the_same_bits() -> None:
    assert_bits(vit)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DECODERS)
def test_decoders(kind: str) -> None:
    assert_bits(lambda: decoder(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", TIED)
def test_decoders_with_tied_embeddings(kind: str) -> None:
    assert_bits(lambda: decoder(kind, tied=True))


@pytest.mark.slow
def test_an_encoder() -> None:
    assert_bits(bert, units=["BertLayer"])


# Models whose input is no text, and encoders with a decoder: the example is found by
# the class's main input.

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_PICTURE: dict[str, Any] = {"image_size": 16, "patch_size": 4}
_STEPS: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 4,
    "dropout": 0.0,
}
_STEPS |= {
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
_WORDS: dict[str, Any] = {
    "vocab_size": WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_START: dict[str, Any] = {"decoder_start_token_id": 1, "use_cache": False}
_WAVES: dict[str, Any] = {
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (4, 4),
    "layerdrop": 0.0,
}
_WAVES |= {
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Dinov2ForImageClassification": (
        "Dinov2Config",
        {**_SMALL, **_PICTURE, "num_labels": 5},
    ),
    "ConvNextForImageClassification": (
        "ConvNextConfig",
        {
            "hidden_sizes": [8, 16, 32, 32],
            "depths": [1, 1, 2, 2],
            "image_size": 32,
            "num_labels": 5,
        },
    ),
    "VideoMAEForVideoClassification": (
        "VideoMAEConfig",
        {**_SMALL, **_PICTURE, "num_frames": 4, "tubelet_size": 2},
    ),
    "ASTForAudioClassification": (
        "ASTConfig",
        {**_SMALL, "patch_size": 4, "max_length": 24, "num_mel_bins": 16},
    ),
    "Wav2Vec2ForSequenceClassification": (
        "Wav2Vec2Config",
        {**_SMALL, **_WAVES, "mask_time_prob": 0.0},
    ),
    "HubertForSequenceClassification": (
        "HubertConfig",
        {**_SMALL, **_WAVES, "mask_time_prob": 0.0},
    ),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        {
            **_STEPS,
            **_WORDS,
            **_START,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 16,
        },
    ),
    "BartForConditionalGeneration": (
        "BartConfig",
        {**_STEPS, **_WORDS, **_START, "max_position_embeddings": 32},
    ),
    "T5ForConditionalGeneration": (
        "T5Config",
        {
            **_WORDS,
            **_START,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 3,
            "num_heads": 4,
        },
    ),
}


def in_stages(kind: str) -> str:
    """A model that brings no fitting example of its own in two stages: the same bits,
    or why not."""
    config, options = OTHERS[kind]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(
        getattr(transformers, config)(**options)
    ).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    asked = SmpConfig(shard_degree=1, pipeline_parallel_degree=2)
    try:
        shapes = with_chain(Shapes.of(model, asked), model)
        stages = decide(shapes, asked, Cluster(Topology.uniform(2, 1))).stages
        assert stages is not None
        rehearse(model, stages)
    except ValueError as error:
        return str(error)
    return (
        "exact"
        if all(parameter.grad is None for parameter in model.parameters())
        else "gradients"
    )


def test_models_of_other_inputs_and_encoder_decoders_are_cut_without_an_example() -> (
    None
):
    """The rehearsal compares with what the whole model gives. T5's first encoder block
    makes the positions of all."""
    found = {kind: in_stages(kind) for kind in OTHERS}
    refused = found.pop("T5ForConditionalGeneration")
    assert found == dict.fromkeys(found, "exact")
    assert refused.startswith(
        "pipeline_parallel_degree: T5ForConditionalGeneration cannot be cut into stages: "
    )

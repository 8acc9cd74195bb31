"""Architectures of Transformers that no other test names, tiny and at random, and a
training of each on two ranks.

Numbers are float64; casts to float32 in the models are left out
(:class:`tests.core.tensor_parallel.model_cases.Wide`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.utils.data import DataLoader

from tests.accelerate.running import fresh_accelerator
from tests.core.pipeline.cases import of_all_stages
from tests.core.tensor_parallel.model_cases import Training, Wide, full, optimizer_of

STEPS, SAMPLES, WORDS, TOKENS, LABELS = 2, 4, 48, 12, 5
MODES: dict[str, dict[str, Any]] = {
    "auto": {"tensor_parallel_degree": 2, "tensor_parallel": {"plan": "auto"}},
    "infer": {"tensor_parallel_degree": 2, "tensor_parallel": {"plan": "infer"}},
    "pipeline": {"pipeline_parallel_degree": 2, "pipeline": {"microbatches": 2}},
    "context": {"context_parallel_degree": 2, "shard_degree": 2},
}

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
_WORDS: dict[str, Any] = {
    "vocab_size": WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TEXT: dict[str, Any] = {
    **_SIZES,
    **_WORDS,
    "max_position_embeddings": 64,
    "use_cache": False,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8}
_MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_LATENT = {**_TEXT, **_MLA, "num_key_value_heads": 4, "head_dim": 4}
_EXPERTS = dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4
)
_EXPERTS |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MIXED = {"layer_types": ["linear_attention", "full_attention"] * 2}
_BOTH: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "max_position_embeddings": 64,
}
_BOTH |= {
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
_BOTH |= {**_WORDS, "decoder_start_token_id": 1, "use_cache": False}
_PICTURE = {**_SIZES, "image_size": 16, "patch_size": 4, "num_labels": LABELS}
_SHIFTED = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": LABELS,
    "drop_path_rate": 0.0,
}
_WAVES = {
    **_SIZES,
    "num_labels": LABELS,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "classifier_proj_size": 16,
}
_WAVES |= {
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (4, 4),
    "num_feat_extract_layers": 2,
}
_WAVES |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}


@dataclass(frozen=True)
class Kind:
    """One architecture: the model's class, its configuration's, and what a row of its
    batch is."""

    model: str
    config: str
    options: dict[str, Any]
    row: str = "text"


def _decoder(name: str, options: dict[str, Any], config: str = "") -> Kind:
    return Kind(f"{name}ForCausalLM", config or f"{name}Config", options)


def _encoder(name: str, **options: Any) -> Kind:
    return Kind(f"{name}ForMaskedLM", f"{name}Config", {**_TEXT, **options})


KINDS: dict[str, Kind] = {
    # Decoders: windows, capped scores, biases beside attention, several streams,
    # convolutions, states.
    "Exaone4": _decoder("Exaone4", {**_GROUPED, "sliding_window": 5, "sliding_window_pattern": 4}),
    "Cohere2": _decoder("Cohere2", {**_GROUPED, "sliding_window": 5}),
    "DiffLlama": _decoder("DiffLlama", _GROUPED),
    "BitNet": _decoder("BitNet", _GROUPED),
    "GPTNeo": _decoder(
        "GPTNeo", {**_TEXT, "num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 5}
    ),
    "GPTNeoXJapanese": _decoder("GPTNeoXJapanese", {**_TEXT, "intermediate_multiple_size": 2}),
    "RecurrentGemma": _decoder(
        "RecurrentGemma",
        {**_GROUPED, "attention_window_size": 8, "lru_width": 32, "block_types": ("recurrent", "attention")},
    ),
    "Mamba2": _decoder(
        "Mamba2", {**_TEXT, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 4}
    ),
    "Rwkv": _decoder("Rwkv", {**_TEXT, "attention_hidden_size": 32, "context_length": 64}),
    "XLNet": Kind(
        "XLNetLMHeadModel", "XLNetConfig", {**_SIZES, **_WORDS, "d_head": 8, "d_inner": 48, "use_mems_train": False}
    ),
    # Experts, latent attention, stacks of several kinds of layers.
    "DeepseekV2": _decoder("DeepseekV2", {**_LATENT, **_EXPERTS, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
    "DeepseekV3": _decoder("DeepseekV3", {**_LATENT, **_EXPERTS, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}),
    "Ernie4_5_Moe": _decoder(
        "Ernie4_5_Moe", {**_GROUPED, **_EXPERTS, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1}
    ),
    "Glm4Moe": _decoder("Glm4Moe", {**_GROUPED, **_EXPERTS, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
    "Phimoe": _decoder("Phimoe", {**_GROUPED, **_EXPERTS, "sliding_window": None}),
    "Jamba": _decoder(
        "Jamba",
        {
            **_GROUPED, **_EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
            "mamba_dt_rank": 4, "use_mamba_kernels": False,
        },
    ),
    "Qwen3Next": _decoder(
        "Qwen3Next",
        {
            **_GROUPED, **_EXPERTS, **_MIXED, "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4,
            "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        },
    ),
    # Encoders.
    "DistilBert": _encoder("DistilBert", dim=32, hidden_dim=48, n_layers=4, n_heads=4),
    "Electra": _encoder("Electra", embedding_size=16),
    "FNet": _encoder("FNet"),
    "ConvBert": _encoder("ConvBert", embedding_size=16, conv_kernel_size=3, head_ratio=2),
    "MegatronBert": _encoder("MegatronBert"),
    # Encoders with decoders.
    "Pegasus": Kind("PegasusForConditionalGeneration", "PegasusConfig", _BOTH, "pair"),
    "MBart": Kind("MBartForConditionalGeneration", "MBartConfig", _BOTH, "pair"),
    "ProphetNet": Kind(
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        {
            **_WORDS, "decoder_start_token_id": 1, "use_cache": False, "max_position_embeddings": 64,
            "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
            "hidden_size": 32, "num_encoder_layers": 4, "num_decoder_layers": 4, "ngram": 2, "num_buckets": 8,
            "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "relative_max_distance": 16,
        },
        "pair",
    ),
    "SwitchTransformers": Kind(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {
            **_WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
            "decoder_start_token_id": 0, "num_experts": 4, "expert_capacity": 64, "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1, "use_cache": False,
        },
        "pair",
    ),
    # Pictures and sound.
    "DeiT": Kind("DeiTForImageClassification", "DeiTConfig", _PICTURE, "picture"),
    "Dinov2WithRegisters": Kind(
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegistersConfig",
        {**_PICTURE, "num_register_tokens": 3},
        "picture",
    ),
    "ViTMAE": Kind(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        {
            **_PICTURE, "decoder_hidden_size": 32, "decoder_num_attention_heads": 4, "decoder_num_hidden_layers": 2,
            "decoder_intermediate_size": 48, "mask_ratio": 0.5,
        },
        "masked picture",
    ),
    "Segformer": Kind(
        "SegformerForImageClassification",
        "SegformerConfig",
        {
            "hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4],
            "sr_ratios": [4, 2, 1, 1], "num_labels": LABELS, "drop_path_rate": 0.0,
        },
        "large picture",
    ),
    # Windows that blocks shift, strides between stages of blocks, tokens in units of
    # masks; frames; sound beside words; pictures in the place of words.
    "Swin": Kind("SwinForImageClassification", "SwinConfig", _SHIFTED, "large picture"),
    "Swinv2": Kind("Swinv2ForImageClassification", "Swinv2Config", _SHIFTED, "large picture"),
    "Hiera": Kind(
        "HieraForImageClassification",
        "HieraConfig",
        {
            "image_size": [32, 32], "patch_size": [4, 4], "patch_stride": [4, 4], "patch_padding": [0, 0],
            "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "query_stride": [2, 2], "masked_unit_size": [4, 4],
            "num_query_pool": 1, "masked_unit_attention": [True, False], "num_labels": LABELS, "drop_path_rate": 0.0,
        },
        "large picture",
    ),
    "VideoMAE": Kind("VideoMAEForVideoClassification", "VideoMAEConfig", {**_PICTURE, "num_frames": 4}, "frames"),
    "Whisper": Kind(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**_BOTH, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
        "spectrum and text",
    ),
    "Idefics3": Kind(
        "Idefics3ForConditionalGeneration",
        "Idefics3Config",
        {
            "vision_config": {**_SIZES, "image_size": 16, "patch_size": 4},
            "text_config": {**_GROUPED, "model_type": "llama"},
            "image_token_id": WORDS - 1, "scale_factor": 2, "pad_token_id": 0,
        },
        "picture in text",
    ),
    "WavLM": Kind(
        "WavLMForSequenceClassification", "WavLMConfig", {**_WAVES, "num_buckets": 8, "max_bucket_distance": 16}, "wave"
    ),
    "Moonshine": Kind(
        "MoonshineForConditionalGeneration",
        "MoonshineConfig",
        {
            **_TEXT, "encoder_num_hidden_layers": 4, "decoder_num_hidden_layers": 4, "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4, "decoder_start_token_id": 1,
        },
        "wave and text",
    ),
}  # fmt: skip


def _row(
    kind: str,
    number: int,
    words: Callable[[], torch.Tensor],
    noise: Callable[..., torch.Tensor],
) -> dict[str, Any]:
    tokens = words()
    picture = {"pixel_values": noise(3, 16, 16)}
    label = {"labels": torch.tensor(number % LABELS)}
    return {
        "text": lambda: {"input_ids": tokens, "labels": tokens},
        "pair": lambda: {"input_ids": tokens, "labels": words()},
        "picture": lambda: {**picture, **label},
        "masked picture": lambda: {**picture, "noise": noise(16)},
        "large picture": lambda: {"pixel_values": noise(3, 32, 32), **label},
        "frames": lambda: {"pixel_values": noise(4, 3, 16, 16), **label},
        "picture in text": lambda: {
            "input_ids": torch.cat(
                [torch.full((4,), WORDS - 1), tokens[4:] % (WORDS - 1)]
            ),
            "pixel_values": noise(1, 3, 16, 16),
            "labels": tokens,
        },
        "spectrum and text": lambda: {"input_features": noise(8, 32), "labels": tokens},
        "wave": lambda: {"input_values": noise(256), **label},
        "wave and text": lambda: {"input_values": noise(4096), "labels": tokens},
    }[kind]()


def rows(name: str) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(7)

    def words() -> torch.Tensor:
        return torch.randint(9, WORDS, (TOKENS,), generator=generator)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return [
        _row(KINDS[name].row, number, words, noise) for number in range(STEPS * SAMPLES)
    ]


def build(name: str, seed: int = 0) -> Any:
    """The model with numbers at random in all of its parameters, and without
    dropout."""
    kind = KINDS[name]
    config = _without_dropout(getattr(transformers, kind.config)(**kind.options))
    # Products of groups are not there in float64.
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, kind.model)(config).double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def _without_dropout(config: Any) -> Any:
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            _without_dropout(value)
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)
    return config


def _loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return model(**batch).loss


def alone(name: str, micro_batches: int) -> Training:
    """The training in one process; the loss is the mean over parts of a batch."""
    seen, model = Training(), build(name)
    optimizer = optimizer_of(model)
    for number, batch in enumerate(DataLoader(rows(name), batch_size=SAMPLES)):
        parts = [
            {key: value.chunk(micro_batches)[n] for key, value in batch.items()}
            for n in range(micro_batches)
        ]
        total = 0.0
        for part in parts:
            with Wide():
                loss = _loss(model, part) / micro_batches
                loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        seen.take(model, total, norm.item(), number)
        optimizer.step()
        optimizer.zero_grad()
    seen.weights = {name: full(value) for name, value in model.named_parameters()}
    seen.gradients = _not_zero(seen.gradients)
    return seen


def _not_zero(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without those of parameters that nothing came of, which may as well be None."""
    return {
        name: gradient
        for name, gradient in gradients.items()
        if gradient.count_nonzero()
    }


def together(name: str, mode: str) -> Training:
    """The same over the ranks of the default group, under SmpAccelerator."""
    seen = Training()
    accelerator = fresh_accelerator(cpu=True, **{"shard_degree": 1, **MODES[mode]})
    model = build(name, seed=dist.get_rank())
    with Wide():
        model, optimizer, loader = accelerator.prepare(
            model, optimizer_of(model), DataLoader(rows(name), batch_size=SAMPLES)
        )

    def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if mode == "pipeline":
            return of_all_stages(accelerator.parallel, tensors)
        return {name: full(tensor) for name, tensor in tensors.items()}

    @accelerator.pipeline_step
    def step(batch: dict[str, Any]) -> torch.Tensor:
        return _loss(model, batch)

    for number, batch in enumerate(loader):
        with Wide(), accelerator.accumulate(model):
            loss = step(batch)
            accelerator.backward(loss)
        mean = loss.detach().clone().reshape(())
        dist.all_reduce(mean)
        seen.losses.append(mean.item() / dist.get_world_size())
        seen.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        gradients = whole(
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        )
        seen.gradients |= {
            f"{number} {name}": gradient for name, gradient in gradients.items()
        }
        optimizer.step()
        optimizer.zero_grad()
    seen.weights = whole(dict(model.named_parameters()))
    seen.gradients = _not_zero(seen.gradients)
    return seen


def outcomes(runs: list[tuple[str, str]]) -> list[Training | str]:
    """What each training came to, or the words in which it was refused before its first
    step."""
    found: list[Training | str] = []
    for name, mode in runs:
        try:
            found.append(together(name, mode))
        except ValueError as error:
            found.append(str(error))
        dist.barrier()
    return found

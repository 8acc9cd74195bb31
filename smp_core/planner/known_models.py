"""Model shapes by short names: the fields of published configurations, as Transformers'
AutoConfig takes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads}


def _llama(
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocabulary: int,
    family: str = "llama",
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": family,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        **more,
    }


def _experts(count: int, per_token: int, width: int | None = None) -> dict[str, Any]:
    """Return the fields of a mixture: experts, those of each token, and their inner
    width if it is not the FFN's."""
    fields = {
        "num_experts": count,
        "num_local_experts": count,
        "num_experts_per_tok": per_token,
    }
    return fields if width is None else {**fields, "moe_intermediate_size": width}


def _latent(queries: int | None) -> dict[str, Any]:
    """Return the fields of multi-head latent attention; ``queries``: the rank of their
    projection."""
    widths = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    return {"q_lora_rank": queries, **widths}


def _routed(
    experts: int,
    per_token: int,
    width: int,
    shared: int,
    dense: int,
    groups: int = 1,
    chosen_groups: int = 1,
) -> dict[str, Any]:
    """Return the fields of DeepSeek's mixtures: ``dense`` blocks come before them."""
    return {
        "n_routed_experts": experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": width,
        "n_shared_experts": shared,
        "first_k_dense_replace": dense,
        "n_group": groups,
        "topk_group": chosen_groups,
        **({"topk_method": "greedy"} if groups == 1 else {}),
    }


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
# Heads wider than their share of the hidden size.
_WIDE: dict[str, Any] = {"head_dim": 128}
_QWEN3_TIED: dict[str, Any] = {**_TIED, **_WIDE}
_GEMMA = {**_TIED, "head_dim": 256}

_SUFFIXES = re.compile(r"-(instruct|it|base|hf|chat|v0\.1)$")


def known_model(words: str) -> Mapping[str, Any] | None:
    """Return the fields of a short name, or of a name on the hub that differs from one
    by its owner, capitals, and a suffix that changes no shapes; None: of neither."""
    # Suffixes are taken off one at a time, as in "-Chat-HF".
    name = words.rpartition("/")[2].lower().removeprefix("meta-")
    while name not in KNOWN_MODELS and _SUFFIXES.search(name):
        name = _SUFFIXES.sub("", name)
    return KNOWN_MODELS.get(name)


KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = {
    # GPT-2's four sizes, and that of 30 billion which SMP's authors train (width 7,168,
    # 48 layers, 64 heads)
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "gpt2-30b": _gpt2(7168, 48, 64),
    # the config.json files of the releases
    "llama-2-7b": _llama(4096, 32, 32, 32, 11008, 32000),
    "llama-2-13b": _llama(5120, 40, 40, 40, 13824, 32000),
    "llama-2-70b": _llama(8192, 80, 64, 8, 28672, 32000),
    **dict.fromkeys(
        ("llama-3-8b", "llama-3.1-8b"), _llama(4096, 32, 32, 8, 14336, 128256)
    ),
    **dict.fromkeys(
        ("llama-3-70b", "llama-3.1-70b", "llama-3.3-70b"),
        _llama(8192, 80, 64, 8, 28672, 128256),
    ),
    "llama-3.1-405b": _llama(16384, 126, 128, 8, 53248, 128256),
    "llama-3.2-1b": _llama(2048, 16, 32, 8, 8192, 128256, head_dim=64, **_TIED),
    "llama-3.2-3b": _llama(3072, 28, 24, 8, 8192, 128256, **_TIED),
    "tinyllama-1.1b": _llama(2048, 22, 32, 4, 5632, 32000),
    "smollm2-1.7b": _llama(2048, 24, 32, 32, 8192, 49152, **_TIED),
    "olmo-2-7b": _llama(4096, 32, 32, 32, 11008, 100352, "olmo2"),
    "olmo-2-13b": _llama(5120, 40, 40, 40, 13824, 100352, "olmo2"),
    "mistral-7b": _llama(4096, 32, 32, 8, 14336, 32000, "mistral"),
    "mistral-nemo-12b": _llama(5120, 40, 32, 8, 14336, 131072, "mistral", **_WIDE),
    "mistral-small-24b": _llama(5120, 40, 32, 8, 32768, 131072, "mistral", **_WIDE),
    "mixtral-8x7b": _llama(4096, 32, 32, 8, 14336, 32000, "mixtral", **_experts(8, 2)),
    "mixtral-8x22b": _llama(6144, 56, 48, 8, 16384, 32000, "mixtral", **_experts(8, 2)),
    "qwen2.5-0.5b": _llama(896, 24, 14, 2, 4864, 151936, "qwen2", **_TIED),
    "qwen2.5-1.5b": _llama(1536, 28, 12, 2, 8960, 151936, "qwen2", **_TIED),
    "qwen2.5-3b": _llama(2048, 36, 16, 2, 11008, 151936, "qwen2", **_TIED),
    "qwen2.5-7b": _llama(3584, 28, 28, 4, 18944, 152064, "qwen2"),
    "qwen2.5-14b": _llama(5120, 48, 40, 8, 13824, 152064, "qwen2"),
    "qwen2.5-32b": _llama(5120, 64, 40, 8, 27648, 152064, "qwen2"),
    "qwen2.5-72b": _llama(8192, 80, 64, 8, 29568, 152064, "qwen2"),
    "qwen3-0.6b": _llama(1024, 28, 16, 8, 3072, 151936, "qwen3", **_QWEN3_TIED),
    "qwen3-1.7b": _llama(2048, 28, 16, 8, 6144, 151936, "qwen3", **_QWEN3_TIED),
    "qwen3-4b": _llama(2560, 36, 32, 8, 9728, 151936, "qwen3", **_QWEN3_TIED),
    "qwen3-8b": _llama(4096, 36, 32, 8, 12288, 151936, "qwen3", **_WIDE),
    "qwen3-14b": _llama(5120, 40, 40, 8, 17408, 151936, "qwen3", **_WIDE),
    "qwen3-32b": _llama(5120, 64, 64, 8, 25600, 151936, "qwen3", **_WIDE),
    "qwen3-30b-a3b": _llama(
        2048, 48, 32, 4, 6144, 151936, "qwen3_moe", **_WIDE, **_experts(128, 8, 768)
    ),
    "qwen3-235b-a22b": _llama(
        4096, 94, 64, 4, 12288, 151936, "qwen3_moe", **_WIDE, **_experts(128, 8, 1536)
    ),
    "gemma-2-2b": _llama(2304, 26, 8, 4, 9216, 256000, "gemma2", **_GEMMA),
    "gemma-2-9b": _llama(3584, 42, 16, 8, 14336, 256000, "gemma2", **_GEMMA),
    "gemma-2-27b": _llama(4608, 46, 32, 16, 36864, 256000, "gemma2", **_QWEN3_TIED),
    "phi-3-mini": _llama(3072, 32, 32, 32, 8192, 32064, "phi3"),
    "phi-4": _llama(5120, 40, 40, 10, 17920, 100352, "phi3"),
    "gpt-oss-20b": _llama(
        2880, 24, 64, 8, 2880, 201088, "gpt_oss", head_dim=64, **_experts(32, 4)
    ),
    "gpt-oss-120b": _llama(
        2880, 36, 64, 8, 2880, 201088, "gpt_oss", head_dim=64, **_experts(128, 4)
    ),
    "phi-3.5-moe": _llama(4096, 32, 32, 8, 6400, 32064, "phimoe", **_experts(16, 2)),
    "olmoe-1b-7b": _llama(2048, 16, 16, 16, 1024, 50304, "olmoe", **_experts(64, 8)),
    "qwen1.5-moe-a2.7b": {
        **_llama(2048, 24, 16, 16, 5632, 151936, "qwen2_moe", **_experts(60, 4, 1408)),
        "shared_expert_intermediate_size": 5632,
    },
    "glm-4.5-air": {
        **_llama(
            4096, 46, 96, 8, 10944, 151552, "glm4_moe", **_WIDE, attention_bias=True
        ),
        **_routed(128, 8, 1408, shared=1, dense=1),
    },
    "deepseek-v2-lite": {
        **_llama(2048, 27, 16, 16, 10944, 102400, "deepseek_v2"),
        **_latent(None),
        **_routed(64, 6, 1408, shared=2, dense=1),
    },
    "deepseek-v3": {
        **_llama(7168, 61, 128, 128, 18432, 129280, "deepseek_v3"),
        **_latent(1536),
        **_routed(256, 8, 2048, shared=1, dense=3, groups=8, chosen_groups=4),
    },
}

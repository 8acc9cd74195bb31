"""Model shapes by short names: the fields of published configurations, as Transformers' AutoConfig takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads}


def _llama(
    width: int, layers: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, family: str = "llama"
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
    }


KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = {
    # GPT-2's four sizes, and that of 30 billion which SMP's authors train (width 7,168, 48 layers, 64 heads)
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "gpt2-30b": _gpt2(7168, 48, 64),
    # the config.json files of the releases
    "llama-2-7b": _llama(4096, 32, 32, 32, 11008, 32000),
    "llama-2-13b": _llama(5120, 40, 40, 40, 13824, 32000),
    "llama-2-70b": _llama(8192, 80, 64, 8, 28672, 32000),
    "llama-3-8b": _llama(4096, 32, 32, 8, 14336, 128256),
    "llama-3-70b": _llama(8192, 80, 64, 8, 28672, 128256),
    "llama-3.1-8b": _llama(4096, 32, 32, 8, 14336, 128256),
    "llama-3.1-70b": _llama(8192, 80, 64, 8, 28672, 128256),
    "llama-3.1-405b": _llama(16384, 126, 128, 8, 53248, 128256),
    "mistral-7b": _llama(4096, 32, 32, 8, 14336, 32000, "mistral"),
}

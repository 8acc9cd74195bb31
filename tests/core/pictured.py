"""A small model of pictures and text by Transformers, and samples of which some have no
picture."""

from __future__ import annotations

from typing import Any

import torch

# Of two ranks, batch by batch, whether the sample has a picture: on both ranks, on
# either, on none.
PICTURED = [
    (True, False),
    (False, False),
    (False, True),
    (True, True),
    (False, False),
    (True, False),
]
_VOCABULARY, _PICTURE, _PATCHES, _SIZE = 32, 31, 4, 8


def small_llava() -> Any:
    """Return a Llava whose tower and text model have two layers each; its parameters
    are float64."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    heads: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 16,
    }
    vision = CLIPVisionConfig(
        image_size=_SIZE, patch_size=_SIZE // 2, intermediate_size=32, **heads
    )
    text = LlamaConfig(vocab_size=_VOCABULARY, intermediate_size=32, **heads)
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=_PICTURE,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(config).double()


def pictured_loss(model: Any, rank: int, index: int) -> torch.Tensor:
    """Return the loss of a rank's sample in the batch ``index``, with or without a
    picture."""
    generator = torch.Generator().manual_seed(10 * index + rank)
    tokens = torch.randint(_PICTURE, (1, 8), generator=generator)
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens.clone()}
    if PICTURED[index % len(PICTURED)][rank]:
        tokens[0, :_PATCHES] = _PICTURE
        pixels = torch.randn(
            1, 3, _SIZE, _SIZE, generator=generator, dtype=torch.float64
        )
        inputs["pixel_values"] = pixels
    loss: torch.Tensor = model(**inputs).loss
    return loss

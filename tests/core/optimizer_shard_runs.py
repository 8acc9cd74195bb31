"""Models and optimizers of the tests of `optimizer_shard`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.core.gpt import SmallGpt

RECIPES: dict[str, dict[str, Any]] = {"bfloat16 model": {}, "mixed": {"param_dtype": "bfloat16"}}


def bf16_model(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    model = SmallGpt(layers=2)
    return model.bfloat16() if recipe == "bfloat16 model" else model


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Not Adam, which makes steps out of the noise of gradients that are zero."""
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)

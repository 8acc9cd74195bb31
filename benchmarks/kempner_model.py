"""The model of KempnerForge's runs, for the planner's trace: Transformers' Llama with
their loss, torch's cross entropy of logits in bfloat16 (Transformers makes float32 of
them first), which are kept until backward has ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from smp_core.planner.model_source import build as build_source

FIELDS: dict[str, Any] = {}
"""Of the Transformers configuration that :func:`build` makes a model of."""


class WithTheirLoss(nn.Module):
    """A causal language model that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.logits: torch.Tensor | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of ids [B, S]."""
        logits = self.model(input_ids=ids).logits
        # Their loop over micro-batches has a name for it, so that it is there in
        # backward.
        self.logits = logits
        return cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1))


def batch(samples: int, tokens: int) -> Mapping[str, torch.Tensor]:
    return {"ids": torch.zeros(samples, tokens, dtype=torch.long)}


def build() -> tuple[nn.Module, Any]:
    """Return the model and its batch."""
    return WithTheirLoss(build_source("", 8192, FIELDS).model), batch

"""Towers: the sub-models of a Transformers model that no token goes through, for ``units.optional="auto"``.

A vision or audio tower is called where a sample has an image or sound, which ranks need not have in the same
micro-batches. The model itself shows which they are: its config has one of its own for text, and of the sub-models
(each a ``PreTrainedModel``) those for text hold the model's input embeddings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from smp_core.torch_facts import embeddings_of


def towers(model: nn.Module) -> list[str]:
    """Return the names of all towers in ``model``, outermost modules only; their projectors are no sub-models."""
    if "transformers" not in sys.modules:
        return []
    from transformers import PreTrainedModel

    def is_model(module: nn.Module) -> bool:
        return isinstance(module, PreTrainedModel)

    names = {module: name for name, module in model.named_modules()}
    found: dict[nn.Module, None] = {}
    for outer in filter(is_model, model.modules()):
        if not any(outer in tower.modules() for tower in found) and _is_composite(outer):
            found.update(dict.fromkeys(_beside_text(outer, is_model)))
    return [names[module] for module in found]


def _is_composite(model: Any) -> bool:
    return model.config.get_text_config() is not model.config


def _beside_text(model: Any, is_model: Any) -> Iterator[nn.Module]:
    """Yield the outermost sub-models without the input embeddings."""
    words, _ = embeddings_of(model)
    if words is None:
        return
    embeddings = set(words.parameters())
    skipped: set[nn.Module] = set()
    for module in model.modules():
        if module is not model and module not in skipped and is_model(module):
            if embeddings.isdisjoint(module.parameters()):
                yield module
                skipped.update(module.modules())

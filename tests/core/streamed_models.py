"""Small models that the stream sanitizer trains, and the loss of one micro-batch of
each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, BLOCKS = 64, 3
VOCABULARY, TOKENS, HEADS = 32, 16, 2
EXPERTS, CHOSEN = 4, 2


class Chain(nn.Module):
    """Blocks, of which the last can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        for block in list(self.blocks)[: BLOCKS - skips]:
            x = block(x)
        return x


class SomeExperts(nn.Module):
    """Experts as Transformers holds them; only their form with FP8 products is
    computed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.act_fn = EXPERTS, nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 8)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 8)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        raise NotImplementedError


class Mixture(nn.Module):
    """Blocks that send every row to some of their experts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"router": nn.Linear(WIDTH, EXPERTS), "experts": SomeExperts()}
            )
            for _ in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        for block in list(self.blocks)[: BLOCKS - skips]:
            weights, chosen = block["router"](x).softmax(-1).topk(CHOSEN)
            x = x + block["experts"](x, chosen, weights)
        return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for each in self.into(x).chunk(3, -1)
        )
        return x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


class Sentences(nn.Module):
    """A language model without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, VOCABULARY),
        )
        self.blocks = nn.ModuleList(Attention() for _ in range(BLOCKS))

    def forward(self, input_ids: torch.Tensor, skips: bool) -> torch.Tensor:
        x = self.embedding(input_ids)
        for block in list(self.blocks)[: BLOCKS - skips]:
            x = block(x)
        return self.head(x)


def of_transformers(kind: str) -> nn.Module:
    # Loads the core, which has to come after the played device.
    from tests.core.tensor_parallel.models import MODELS

    model: Any = MODELS[kind]()
    if kind == "mixtral":
        # One after the other, the host asks which have rows.
        model.set_experts_implementation("batched_mm")
    return model


OF_TRANSFORMERS = ("gpt2", "llama", "mixtral")
"""What tensor ranks divide: fused projections, key and value heads that ranks share,
fused experts."""
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{"chain": Chain, "mixture": Mixture, "sentences": Sentences},
    **{kind: functools.partial(of_transformers, kind) for kind in OF_TRANSFORMERS},
}


def loss_of(parallel: Any, model: str, dtype: torch.dtype, skips: bool) -> torch.Tensor:
    """The loss of one micro-batch, which is on the device."""
    if model in OF_TRANSFORMERS:
        tokens = torch.randint(VOCABULARY, (2, TOKENS))
        return parallel.module(input_ids=tokens, labels=tokens).loss
    if model != "sentences":
        x = torch.randn(8, WIDTH, dtype=dtype, requires_grad=True)
        return parallel.module(x, skips).float().pow(2).mean()
    from smp_core.context_parallel.replaced_attention import enabled, weighted_mean

    ids = torch.randint(VOCABULARY, (2, TOKENS))
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    split = parallel.context.split(
        {"input_ids": ids, "labels": ids, "attention_mask": mask}
    )
    with enabled(split):
        logits = parallel.module(split.batch["input_ids"], skips)
        return weighted_mean(
            F.cross_entropy(logits.float().flatten(0, 1), split.shift_labels.flatten())
        )

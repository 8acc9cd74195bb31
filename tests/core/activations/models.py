"""A GPT with dropout of twelve blocks or fewer, and training steps of it on the ranks
of a pool."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.config import SmpConfig
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from tests.core.gpt import GptBlock

VOCABULARY, WIDTH, HEADS, LENGTH = 37, 20, 5, 12

Observed = tuple[list[torch.Tensor], dict[str, torch.Tensor]]


class DroppingBlock(GptBlock):
    """A :class:`GptBlock` with dropout behind it, and a call counter."""

    def __init__(self, dropout: float) -> None:
        super().__init__(WIDTH, HEADS)
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.calls += 1
        return self.dropout(super().forward(x_BLD))


class DroppingGpt(nn.Module):
    """Returns the next-token loss."""

    def __init__(self, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(DroppingBlock(dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        x_BLD = self.tokens(tokens_BL[:, :-1])
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return F.cross_entropy(
            self.head(x_BLD).flatten(0, 1), tokens_BL[:, 1:].flatten()
        )


def build(layers: int = 4, dropout: float = 0.0, **knobs: Any) -> ParallelModel:
    torch.manual_seed(0)
    model = DroppingGpt(layers, dropout)
    return parallelize(model, SmpConfig(**knobs))


def tokens(seed: int, samples: int = 3, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (samples, length + 1), generator=generator)


def whole(value: torch.Tensor) -> torch.Tensor:
    return (
        (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    )


def observe(
    parallel: ParallelModel, steps: int = 2, micro_batches: int = 2
) -> Observed:
    """Losses of every micro-batch, and the gradients of the last step with the weights
    after it."""
    optimizer = torch.optim.AdamW(parallel.module.parameters(), lr=1e-2)
    losses, seen = [], {}
    torch.manual_seed(10 + parallel.mesh.rank)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            with parallel.window.accumulate(micro < micro_batches - 1):
                loss = parallel.module(
                    tokens(100 * step + 10 * micro + parallel.mesh.data_rank)
                )
                loss.backward()
            losses.append(loss.detach())
        parallel.clip_grad_norm_(0.5)
        optimizer.step()
    for name, parameter in parallel.module.named_parameters():
        seen[name] = whole(parameter)
        if parameter.grad is not None:
            seen[f"{name}.grad"] = whole(parameter.grad)
    return losses, seen


def assert_equal_bits(seen: Observed, expected: Observed, what: str) -> None:
    for number, (ours, theirs) in enumerate(zip(seen[0], expected[0], strict=True)):
        assert torch.equal(ours, theirs), (
            f"{what}: loss {number} is {ours}, expected {theirs}"
        )
    assert seen[1].keys() == expected[1].keys()
    different = [
        name
        for name, value in expected[1].items()
        if not torch.equal(seen[1][name], value)
    ]
    assert not different, f"{what}: {different} differ"

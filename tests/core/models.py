"""A small language model with everything that sharding can get wrong, and its
one-process training loop."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, LENGTH = 23, 8, 6


class Block(nn.Module):
    """Attention-free block: norm, two linear layers, a residual. 3 rows in ``narrow``:
    fewer than four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH)
        self.narrow = nn.Linear(WIDTH, 3)
        self.spread = nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(torch.tanh(self.up(h))) + self.spread(self.narrow(h))


class TroubledModel(nn.Module):
    """Tied head, a frozen block bias, an unused layer, uneven rows, a 0-d gain."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.unused = nn.Linear(WIDTH, 5)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[0].down.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gain)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token cross entropy, mean over the batch, in the logits' own dtype."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def global_batches(
    steps: int, micro_batches: int, samples: int, seed: int = 7
) -> torch.Tensor:
    """Tokens [steps, micro_batches, samples, LENGTH + 1], equal wherever it is
    called."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        VOCABULARY, (steps, micro_batches, samples, LENGTH + 1), generator=generator
    )


@dataclass
class Trajectory:
    """What a training run showed, as plain tensors."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def train_alone(
    dtype: torch.dtype,
    batches: torch.Tensor,
    *,
    lr: float = 1e-2,
    max_norm: float = 0.1,
) -> Trajectory:
    """One process, whole global batch."""
    torch.manual_seed(0)
    model = TroubledModel().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    seen = Trajectory()
    for micro in batches:
        total = 0.0
        for tokens in micro:
            loss = loss_of(model, tokens) / len(micro)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        seen.losses.append(total)
        seen.norms.append(norm.item())
    seen.weights = {
        name: value.detach().clone() for name, value in model.state_dict().items()
    }
    return seen

"""Families of small models for random runs.

Every model maps ``x`` [n, LENGTH, WIDTH] float64 to a tensor of which the loss is a
smooth function: kinks (ReLU, max) would turn a rounding error into another gradient.
``path`` says which ways through the model a call takes, so that what is used may depend
on the micro-batch and the rank. What custom parameters begin with is written by
``reset_parameters``, so that every family can be initialised on the meta device too.

``leave`` is used by every call and is never frozen: a backward pass has something to do
on every rank. Blocks of a list are called as the path says: ``"0 2"`` leaves the second
one out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, LENGTH, VOCABULARY = 6, 4, 11


def taken(blocks: nn.ModuleList, path: str) -> list[nn.Module]:
    """The blocks that the path names by their numbers."""
    return [block for number, block in enumerate(blocks) if str(number) in path]


def tokens(x: torch.Tensor) -> torch.Tensor:
    """Token ids [n, LENGTH] that depend on ``x`` [n, LENGTH, WIDTH]."""
    return (x[..., 0].detach() * 100).long() % VOCABULARY


class Mlp(nn.Module):
    """Layers of unequal widths, some with fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(
            nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 3), nn.Tanh(), nn.Linear(3, 5)
        )
        self.leave = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, path: str) -> torch.Tensor:
        return self.leave(torch.tanh(self.enter(x)))


class Cell(nn.Module):
    """A unit with two ways through it, a part that nobody uses, and another way in than
    forward."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, ways: str) -> torch.Tensor:
        if "l" in ways:
            x = x + torch.tanh(self.left(x))
        if "r" in ways:
            x = x + torch.sin(self.right(x))
        return x

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sigmoid(self.right(x))


class Cells(nn.Module):
    """Cells, called as the path says: ``"0l 1lr 2e"`` is cell 0 by its left way, cell 1
    by both, cell 2 by encode."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.cells = nn.ModuleList(Cell() for _ in range(3))
        self.leave = nn.Linear(WIDTH, 2)
        self.gain, self.shift = (
            nn.Parameter(torch.empty(())),
            nn.Parameter(torch.empty(3, WIDTH)),
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, 0.5)
        nn.init.constant_(self.shift, 0.1)

    def forward(self, x: torch.Tensor, path: str) -> torch.Tensor:
        x = self.enter(x)
        for step in path.split():
            cell = self.cells[int(step[0])]
            x = cell.encode(x) if step[1:] == "e" else cell(x, step[1:])
        return self.leave((x + self.shift.sum(0)) * self.gain)


class Attention(nn.Module):
    """torch's own MultiheadAttention, which reads the weight of a layer that it never
    calls."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        layers = (
            nn.TransformerEncoderLayer(WIDTH, 2, 7, 0.0, F.gelu, batch_first=True)
            for _ in range(2)
        )
        self.layers, self.leave = nn.ModuleList(layers), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, path: str) -> torch.Tensor:
        x = self.enter(x)
        for layer in taken(self.layers, path):
            x = layer(x)
        return self.leave(x)


class GptBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
        )
        self.out, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 13),
            nn.Linear(13, WIDTH),
        )

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2) / WIDTH**0.5 + bias).softmax(-1)
        x = x + self.out(weights @ v)
        return x + self.down(F.gelu(self.up(x)))


class Gpt(nn.Module):
    """Embeddings, blocks that share a mask, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Embedding(LENGTH, WIDTH),
        )
        self.blocks = nn.ModuleList(GptBlock() for _ in range(3))
        self.norm, self.leave = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, VOCABULARY, bias=False),
        )
        self.leave.weight = self.embed.weight
        self.register_buffer("mask", torch.empty(LENGTH, LENGTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.mask.copy_(torch.full((LENGTH, LENGTH), -10.0).triu(1))

    def forward(self, x: torch.Tensor, path: str) -> torch.Tensor:
        x = self.embed(tokens(x)) + self.places(torch.arange(LENGTH))
        for block in taken(self.blocks, path):
            x = block(x, self.mask)
        return self.leave(self.norm(x))


class Recurrent(nn.Module):
    """torch's GRU and LSTM, which keep their weights in lists of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.second = (
            nn.GRU(WIDTH, 5, batch_first=True),
            nn.LSTM(5, 3, batch_first=True),
        )
        self.leave = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, path: str) -> torch.Tensor:
        return self.leave(self.second(self.enter(x)[0])[0])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(6, 6, 3, padding=1, bias=False),
            nn.GroupNorm(2, 6),
            nn.SiLU(),
            nn.Conv1d(6, 6, 1),
        )
        self.norm = nn.BatchNorm1d(6).eval()

    def train(self, mode: bool = True) -> Residual:
        """Statistics of batches differ from rank to rank: they stay as they are, as in
        fine-tuning."""
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.body(x))


class Conv(nn.Module):
    """Convolutions, norms with and without statistics, and a resolution that changes on
    the way."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(LENGTH, 6, 3, padding=1)
        self.wide, self.down = (
            nn.Sequential(Residual(), Residual()),
            nn.Conv1d(6, 6, 2, stride=2),
        )
        self.narrow, self.leave = nn.Sequential(Residual(), Residual()), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, path: str) -> torch.Tensor:
        return self.leave(self.narrow(self.down(self.wide(self.enter(x)))).mean(-1))


class OddBlock(nn.Module):
    """Parameters of no elements, of one row, in column order, and without
    dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.nothing, self.row = (
            nn.Parameter(torch.empty(0, WIDTH)),
            nn.Parameter(torch.empty(1, WIDTH)),
        )
        self.columns = nn.Parameter(torch.empty(5, WIDTH).t())
        self.gate = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for number, parameter in enumerate(
            (self.nothing, self.row, self.columns, self.gate)
        ):
            nn.init.uniform_(parameter, -0.1 * number, 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.layer(x) * self.gate + self.row)
        return (
            x + torch.sin(x @ self.columns).sum(-1, keepdim=True) + self.nothing.sum()
        )


class Odd(nn.Module):
    """Blocks of odd parameters, and parameters in a list and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OddBlock() for _ in range(2))
        self.directions = nn.ParameterList(
            nn.Parameter(torch.empty(WIDTH)) for _ in range(3)
        )
        self.named = nn.ParameterDict(
            {
                "shift": nn.Parameter(torch.empty(WIDTH)),
                "gain": nn.Parameter(torch.empty(())),
            }
        )
        self.leave = nn.Linear(3, 2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in [*self.directions, *self.named.values()]:
            nn.init.uniform_(parameter, 0.1, 0.5)

    def forward(self, x: torch.Tensor, path: str) -> torch.Tensor:
        for block in taken(self.blocks, path):
            x = block(x)
        x = x * self.named["gain"] + self.named["shift"]
        return self.leave(
            torch.stack([x @ direction for direction in self.directions], -1)
        )


class Half(nn.Module):
    """An embedding and a block."""

    def __init__(self, embedding: nn.Embedding, pair: Pair) -> None:
        super().__init__()
        self.embedding, self.pair, self.own = embedding, pair, Pair()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.own(self.pair(self.embedding(ids)))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Shared(nn.Module):
    """An encoder and a decoder that share an embedding and a block; a block that is two
    layers; a weight of one block that is the head's too. In the path ``e`` is the
    encoder, ``d`` the decoder."""

    def __init__(self) -> None:
        super().__init__()
        embedding, pair = nn.Embedding(VOCABULARY, WIDTH), Pair()
        self.encoder, self.decoder = Half(embedding, pair), Half(embedding, pair)
        twice = Pair()
        self.layers, self.leave = (
            nn.ModuleList([twice, Pair(), twice]),
            nn.Linear(WIDTH, 7),
        )
        self.leave.weight = self.layers[1].up.weight

    def forward(self, x: torch.Tensor, path: str) -> torch.Tensor:
        coded = self.encoder(tokens(x)) if "e" in path else x
        if "d" in path:
            coded = coded * self.decoder(tokens(x.flip(1)))
        for layer in taken(self.layers, path):
            coded = layer(coded)
        return self.leave(coded)


class Experts(nn.Module):
    """Branches, of which a call takes those in its path; some blocks in them and around
    them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleDict(
            {name: nn.Sequential(Pair(), nn.Tanh(), Pair()) for name in "abc"}
        )
        self.leave = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, path: str) -> torch.Tensor:
        x = torch.tanh(self.enter(x))
        weights = self.gate(x).softmax(-1)
        for step in path.split():
            x = x + weights[..., "abc".index(step)].unsqueeze(-1) * self.experts[step](
                x
            )
        return self.leave(x)


class Adapted(nn.Module):
    """A frozen layer and what is trained beside it (LoRA), or was added to it
    (``merge``)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = (
            nn.Linear(WIDTH, 2, bias=False),
            nn.Linear(2, WIDTH, bias=False),
        )
        self.is_merged = False

    @torch.no_grad()
    def merge(self, enabled: bool) -> None:
        if enabled != self.is_merged:
            self.is_merged = enabled
            self.base.weight.data += (self.up.weight @ self.down.weight) * (
                1 if enabled else -1
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(
            self.base(x) if self.is_merged else self.base(x) + self.up(self.down(x))
        )


class Adapters(nn.Module):
    """Little that is trainable among much that is not; blocks that are frozen as a
    whole."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.frozen = nn.ModuleList(Pair().requires_grad_(False) for _ in range(2))
        self.blocks, self.leave = (
            nn.ModuleList(Adapted() for _ in range(2)),
            nn.Linear(WIDTH, 2),
        )

    def forward(self, x: torch.Tensor, path: str) -> torch.Tensor:
        x = self.enter(x)
        for block in taken(nn.ModuleList([*self.frozen, *self.blocks]), path):
            x = block(x)
        return self.leave(x)


class Turn(nn.Module):
    """A layer of its own, and one that it shares with another block."""

    def __init__(self, common: nn.Module) -> None:
        super().__init__()
        self.own, self.common = nn.Linear(WIDTH, WIDTH), common

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.common(torch.sin(self.own(x))))


class Ways(nn.Module):
    """Branches that share a layer, one with an adapter: ``l``, ``r`` and ``a`` in the
    path. Each can be called as a root."""

    def __init__(self) -> None:
        super().__init__()
        common = nn.Linear(WIDTH, WIDTH)
        self.enter, self.left, self.right = (
            nn.Linear(WIDTH, WIDTH),
            Turn(common),
            Turn(common),
        )
        self.adapted, self.leave = Adapted(), nn.Linear(WIDTH, 2, bias=False)

    def step(self, x: torch.Tensor, path: str) -> torch.Tensor:
        x = self.enter(x)
        for step in path.split():
            x = {"l": self.left, "r": self.right, "a": self.adapted}[step](x)
        return self.leave(x)

    forward = step


class Stepping(nn.Module):
    """Steps like a LightningModule: no forward of its own, roots inside, and parameters
    that it owns itself."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.shift = (
            nn.Parameter(torch.empty(1)),
            nn.Parameter(torch.empty(5, WIDTH)),
        )
        self.gate = nn.Parameter(torch.empty(()))
        self.first, self.leave = (
            nn.Sequential(Pair(), Pair()),
            nn.Sequential(Pair(), nn.Linear(WIDTH, 2)),
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.temperature, self.shift, self.gate):
            nn.init.constant_(parameter, 0.7)

    def step(self, x: torch.Tensor, path: str) -> torch.Tensor:
        x = self.first(x) + self.shift.sum(0)
        return self.leave(x * self.temperature) + self.gate


class Adversaries(nn.Module):
    """A generator and a critic, two roots with an optimizer each. The path: ``d``
    trains the critic (what is generated has no gradient), ``g`` goes through both."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(Pair(), nn.Tanh(), Pair())
        self.critic = nn.Sequential(Pair(), nn.Tanh(), nn.Linear(WIDTH, 2))

    def step(self, x: torch.Tensor, path: str) -> torch.Tensor:
        made = self.generator(x)
        return (
            self.critic(x) - self.critic(made.detach())
            if path == "d"
            else self.critic(made)
        )


# Those whose inputs, parameters and buffers meet in one dtype, and whose gradients are
# sums of two terms at most: sums of more would be rounded in the order in which
# autograd comes by.
IN_HALF_PRECISION = (Mlp, Cells, Shared, Adapters, Ways)
WITH_SHARED_LAYERS = (Shared, Ways)

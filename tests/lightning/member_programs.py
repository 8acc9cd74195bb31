"""Programs of Lightning by what their models are made of and what their steps do with
them: parts of layers (`MEMBERS`), of embeddings (`WORDS`), and ways to train (`WAYS`),
over the layouts of `PLACES`.

A program of `member_program` is one of `tests.lightning.axis_programs`, whose model has
such parts in its blocks and whose module has such methods.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.core.blocks import WIDTH
from tests.lightning.axis_programs import (
    LAYERS,
    VOCABULARY,
    Attention,
    OverAxes,
    Words,
)
from tests.lightning.member_ways import WAYS
from tests.lightning.program_parts import METHODS
from tests.lightning.programs import Program

PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "shard 2": (2, {"shard_degree": 2}),
    "replicas": (2, {"shard_degree": 1}),
    "world": (2, {"shard_degree": 1, "optimizer_shard": "world"}),
    "tensor 2": (
        2,
        {
            "shard_degree": 1,
            "tensor_parallel_degree": 2,
            "tensor_parallel": {"plan": LAYERS, "sequence_parallel": False},
        },
    ),
    "context 2": (
        2,
        {"shard_degree": 2, "context_parallel_degree": 2, "full_outputs": True},
    ),
    "pipeline 2": (
        2,
        {
            "shard_degree": 1,
            "pipeline_parallel_degree": 2,
            "pipeline": {"microbatches": 2, "schedule": "1f1b"},
        },
    ),
    "pipeline 2, one micro-batch": (
        2,
        {
            "shard_degree": 1,
            "pipeline_parallel_degree": 2,
            "pipeline": {"microbatches": 1, "schedule": "1f1b"},
        },
    ),
    "two nodes": (4, {"shard_degree": 2}),
    "two nodes, world": (4, {"shard_degree": 2, "optimizer_shard": "world"}),
}


# Members: [samples, tokens, WIDTH] -> the same.


class OwnScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale / (1 + self.temperature.square())


class ParameterLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(2))
        self.named = nn.ParameterDict(
            {
                "a": torch.randn(WIDTH),
                "b": nn.Parameter(torch.randn(WIDTH), requires_grad=False),
            }
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x + self.named["a"] * self.named["b"]


class Normalised(nn.Module):
    """Over the features of all samples and tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rnn(x)[0]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attend(x, x, x, need_weights=False)[0]


class Reweighted(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.layer = wrap(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x)


class Symmetric(nn.Module):
    def forward(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.triu() + matrix.triu(1).transpose(-1, -2)


def symmetric(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x.to(self.weight.dtype) @ self.weight).abs()


class Counted(nn.Module):
    """Buffers that the forward changes and replaces, alike on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("age", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.age = self.age * 0.9 + 1
        return self.linear(x) / (1 + 0.1 * self.calls + self.age)


class LowRank(nn.Module):
    """An adapter by hand on a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH))
        self.b = nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(x) + (x @ self.a.T) @ self.b.T


class MergedLowRank(LowRank):
    """The same, added up before the product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.linear(x, self.base.weight + self.b @ self.a, self.base.bias)


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return x + self.student(x) - 0.5 * target


class TwoWays(nn.Module):
    """A layer called with and without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.layer(x * 0.5)
        return x + self.layer(x) - 0.5 * target


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.also_unused = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.used(x)


class Branching(nn.Module):
    """One of two layers by turns, counted alike on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
        return x + self.ways[self.count // 2 % 2](x)


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2)


class Shared(nn.Module):
    """A layer called twice, and one whose weight is the other's, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.tanh(self.layer(torch.tanh(self.layer(x))))
        return x + F.linear(made, self.layer.weight.T)


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.slope = nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.slope(self.layer(torch.tanh(x), torch.tanh(x)))


MEMBERS: dict[str, Callable[[], nn.Module]] = {
    "own parameters": OwnScale,
    "lists of parameters": ParameterLists,
    "batch norm": Normalised,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru, two layers": lambda: Recurrent(nn.GRU, num_layers=2),
    "projected lstm": lambda: (
        Recurrent(nn.LSTM, proj_size=WIDTH // 2) if False else Recurrent(nn.RNN)
    ),
    "multihead": Attends,
    "encoder layer": lambda: nn.TransformerEncoderLayer(
        WIDTH, 2, 16, dropout=0.0, batch_first=True
    ),
    "weight norm": lambda: Reweighted(parametrizations.weight_norm),
    "old weight norm": lambda: Reweighted(torch.nn.utils.weight_norm),
    "spectral norm": lambda: Reweighted(parametrizations.spectral_norm),
    "old spectral norm": lambda: Reweighted(torch.nn.utils.spectral_norm),
    "orthogonal": lambda: Reweighted(parametrizations.orthogonal),
    "symmetric": lambda: Reweighted(symmetric),
    "complex": Complex,
    "counted": Counted,
    "adapter": LowRank,
    "merged adapter": MergedLowRank,
    "teacher": Student,
    "with and without gradients": TwoWays,
    "unused": Unused,
    "branching": Branching,
    "recomputed": lambda: Recomputed(False),
    "recomputed, reentrant": lambda: Recomputed(True),
    "convolution": Convolved,
    "called twice": Shared,
    "bilinear": Bilinear,
}

WORDS: dict[str, dict[str, Any]] = {
    "padding": {"padding_idx": 0},
    "by frequency": {"scale_grad_by_freq": True},
    "bounded": {"max_norm": 1.0},
    "sparse": {"sparse": True},
}


class Cell(nn.Module):
    def __init__(self, members: list[str]) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.members = nn.ModuleList(MEMBERS[name]() for name in members)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        for member in self.members:
            x = member(x)
        return x + self.down(torch.tanh(self.up(x)))


class Made(Words):
    """Words whose blocks have members."""

    def __init__(self, program: Program) -> None:
        super().__init__(program["layers"], False)
        self.blocks = nn.ModuleList(
            Cell(program["members"]) for _ in range(program["layers"])
        )
        if program["words"]:
            self.front = nn.Embedding(VOCABULARY, WIDTH, **WORDS[program["words"]])
            # A table of such gradients cannot be the head's too.
            self.back = nn.Linear(WIDTH, VOCABULARY, bias=False)


class OfMembers(OverAxes):
    def build(self) -> None:
        torch.manual_seed(self.program["seed"])
        self.net, self.other = self.build_networks()
        generator = torch.Generator().manual_seed(self.program["seed"])
        for name, parameter in self.named_parameters():
            if name.endswith(("original0", "weight_g", "orthogonal")):
                continue
            kind = torch.complex128 if parameter.dtype.is_complex else torch.float64
            parameter.data = 0.4 * torch.randn(
                parameter.shape, generator=generator, dtype=kind
            )
        self.finish()

    def finish(self) -> None:
        """What a way adds to what was built."""

    def build_networks(self) -> tuple[nn.Module, nn.Module | None]:
        return Made(self.program), None


def member_program(
    place: str,
    members: list[str] | None = None,
    words: str | None = None,
    ways: list[str] | None = None,
    seed: int = 0,
) -> Program:
    """A program of given parts on a place."""
    ranks, knobs = PLACES[place]
    ways = ways or []
    flags: dict[str, Any] = {"max_epochs": 2, "log_every_n_steps": 1}
    if members and "batch norm" in members:
        flags["sync_batchnorm"] = True
    by_hand = any(hasattr(WAYS[name], "automatic_optimization_is") for name in ways)
    return {
        "seed": seed,
        "place": place,
        "ranks": ranks,
        "axes": place,
        "judged": False,
        "layers": 2,
        "tokens": 8,
        "uneven": False,
        "experts": False,
        "all gather": False,
        "optimization": "by hand" if by_hand else "automatic",
        "optimizer": "SGD" if words == "sparse" else "AdamW",
        "schedule": "none",
        "train": 16,
        "val": 8,
        "loaders": "one",
        "val_loaders": 1,
        "overrides": [],
        "callbacks": [],
        "output": "tensor",
        "after": [],
        "flags": flags,
        "knobs": knobs,
        "members": members or [],
        "words": words,
        "ways": ways,
    }


def module_of_members(program: Program) -> LightningModule:
    methods: dict[str, Any] = {}
    for name in program["overrides"]:
        methods.update(METHODS.get(name, {}))
    ways = tuple(WAYS[name] for name in program["ways"])
    return type("Program", (*ways, OfMembers), methods)(program)


# What is beyond a place, and what is not as it should be yet.
_NOT_THERE: dict[str, tuple[str, ...]] = {
    # Each micro-batch is a forward; a step calls the model once.
    "pipeline 2": ("branching", "hidden"),
    "pipeline 2, one micro-batch": ("hidden",),
    # A part of the tokens is a part of this rank's; attention over split sequences has
    # no second derivative, and no trial inside of a compiled step.
    "context 2": ("two shapes", "gradient penalty", "compiled step"),
    # States are plain parts of this rank; nothing steps that could be looked at.
    "world": ("reads states", "steps weights"),
    "two nodes, world": ("reads states", "steps weights"),
}
# Gradients of parameters that torch.autograd.grad returns are this rank's own.
_NOWHERE = ("gradients by hand", "skips steps")


def is_there(place: str, name: str) -> bool:
    return name not in (*_NOWHERE, *_NOT_THERE.get(place, ()))


def draw_members(seed: int) -> Program:
    """A program of one or two members, sometimes words, and sometimes a way."""
    rng = random.Random(seed)
    place = rng.choice(list(PLACES))
    members = [name for name in MEMBERS if is_there(place, name)]
    ways = [name for name in WAYS if is_there(place, name)]
    members = rng.sample(members, rng.randint(0, 2))
    words = rng.choice([None, None, *WORDS])
    way = [rng.choice(ways)] if rng.random() < 0.7 or not members else []
    return member_program(place, members, words, way, seed)


def each_part(place: str) -> list[Program]:
    """A program for each member, each kind of words and each way alone."""
    programs = [member_program(place, members=[name]) for name in MEMBERS]
    programs += [member_program(place, words=name) for name in WORDS]
    programs += [member_program(place, ways=[name]) for name in WAYS]
    parts = [(*each["members"], each["words"], *each["ways"]) for each in programs]
    return [
        program
        for program, names in zip(programs, parts, strict=True)
        if all(is_there(place, name) for name in names)
    ]

"""Models that FSDP2 would refuse, or that use units in another way than calling them:
they train like one process, to 1e-12 in float64, or the error says what to type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.core.equivalence import full_weights
from tests.core.scenarios import Gradients, differences, parallel_model
from tests.harness import RanksFailed, run_ranks

WIDTH = 8


class Half(nn.Module):
    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layer = embedding, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(self.embedding(x)))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class SharedLayer(nn.Module):
    """Two units share a layer that is large enough for a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        embedding = nn.Linear(WIDTH, WIDTH)
        self.encoder, self.decoder = Half(embedding), Half(embedding)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))


class Attention(nn.Module):
    """Layers whose forward reads the weights of layers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 16, dropout=0.0, batch_first=True
        )
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(self.layer(x + self.attend(x, x, x)[0]))


class OddTensors(nn.Module):
    """Parameters of no elements, and some that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, 4 * WIDTH)
        self.convolve = nn.Conv2d(4, 4, 3, padding=1).to(
            memory_format=torch.channels_last
        )
        self.leave = nn.Linear(4 * WIDTH, WIDTH)
        self.leave.weight = nn.Parameter(torch.randn(4 * WIDTH, WIDTH).t() / WIDTH)
        self.nothing = nn.Parameter(torch.zeros(0, WIDTH))
        self.also_nothing = nn.Linear(WIDTH, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x.flatten(0, 1), self.nothing])
        x = self.convolve(self.enter(x).view(-1, 4, 2, 4)).flatten(1)
        x = self.leave(x)
        return torch.cat([x, self.also_nothing(x)], dim=1)


class Gaps(nn.Module):
    """Lists of blocks, and of norms around them, of which some are None
    (x-transformers)."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            [nn.ModuleList([norm, None]), Half(nn.Linear(WIDTH, WIDTH))]
            for norm in (None, nn.LayerNorm(WIDTH))
        ]
        self.layers = nn.ModuleList(map(nn.ModuleList, layers))
        self.blocks = nn.ModuleList(
            [None, Half(nn.Linear(WIDTH, WIDTH)), None, Half(nn.Linear(WIDTH, WIDTH))]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for (before, _), block in self.layers:
            x = x + block(x if before is None else before(x))
        for block in self.blocks:
            x = x if block is None else x + block(x)
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "shared layer": (
        SharedLayer,
        {"units": {"modules": ["Half"], "min_parameters": 70}},
    ),
    "shared layer, recomputed": (
        SharedLayer,
        {"units": {"modules": ["Half"], "min_parameters": 70}, "activations": "full"},
    ),
    "attention": (Attention, {"units": {"min_parameters": 8}}),
    "odd tensors": (OddTensors, {"units": {"min_parameters": 100}}),
    "odd tensors over the world": (OddTensors, {"optimizer_shard": "world"}),
    "gaps": (Gaps, {}),
    "gaps, recomputed": (Gaps, {"activations": "full"}),
}
STEPS = 3


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(
        2,
        3,
        WIDTH,
        generator=torch.Generator().manual_seed(10 * step + rank),
        dtype=torch.float64,
    )


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().double()


def evaluated(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(inputs(99, 0)).clone()


def alone(name: str, world_size: int) -> tuple[Gradients, torch.Tensor]:
    """Weights after a few steps, and what evaluation gives then."""
    model = built(name)
    # Walks in the order of memory.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        (
            sum(model(inputs(step, rank)).square().mean() for rank in range(world_size))
            / world_size
        ).backward()
        optimizer.step()
    weights = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.numel()
    }
    return weights, evaluated(model)


def together(
    cases: list[tuple[str, dict[str, Any]]],
) -> list[tuple[Gradients, torch.Tensor]]:
    found = []
    for name, knobs in cases:
        parallel = parallel_model(built(name), **MODELS[name][1], **knobs)
        optimizer = torch.optim.AdamW(parallel.module.parameters(), lr=0.1, fused=True)
        parallel.prepare_optimizer(optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            parallel.module(
                inputs(step, parallel.mesh.data_rank)
            ).square().mean().backward()
            optimizer.step()
        own = {
            name
            for name, parameter in parallel.module.named_parameters()
            if parameter.numel()
        }
        weights = {
            name: value
            for name, value in full_weights(parallel.module).items()
            if name in own
        }
        found.append((weights, evaluated(parallel.module)))
    return found


def test_models_that_fsdp2_would_refuse_train_like_one_process() -> None:
    degrees = {name: ({"shard_degree": 2}, {"shard_degree": 1}) for name in MODELS}
    degrees["odd tensors over the world"] = ({"shard_degree": 1},)
    cases = [(name, knobs) for name, each in degrees.items() for knobs in each]
    expected = {name: alone(name, 2) for name in MODELS}
    for rank in run_ranks(together, 2, cases):
        for (name, knobs), (weights, output) in zip(cases, rank, strict=True):
            assert differences(weights, expected[name][0]) == [], f"{name}, {knobs}"
            assert torch.allclose(output, expected[name][1], rtol=0, atol=1e-12), (
                f"{name}, {knobs}"
            )


class Functional(nn.Module):
    """Computes with a layer's weight, and never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.leave(x), self.project.weight)


class OtherMethod(nn.Module):
    """Calls another method of a unit than its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Half(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part.encode(x)


def fail(build: Callable[[], nn.Module], **knobs: Any) -> None:
    parallel_model(build(), shard_degree=2, **knobs).module(torch.randn(2, 3, WIDTH))


@pytest.mark.parametrize(
    ("build", "knobs", "message"),
    [
        (
            Functional,
            {"units": ["project", "leave"]},
            r"Functional\.forward computed with parameters of a unit that it had not called \('project'\).*"
            r"call the module, or leave it out of the units: units=\[\.\.\.\] without it, "
            r"units.min_parameters above 72",
        ),
        (
            OtherMethod,
            {"units": ["Half"]},
            r"Half\.encode was called, and the unit 'part' is gathered for its forward only; "
            r"write forward_methods=\('part\.encode',\)",
        ),
    ],
)
def test_a_unit_that_is_used_and_not_called_is_named_with_what_to_type(
    build: Callable[[], nn.Module], knobs: dict[str, Any], message: str
) -> None:
    with pytest.raises(RanksFailed, match=message):
        run_ranks(fail, 2, build, **knobs)

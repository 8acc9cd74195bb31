"""A small net with adapters beside a frozen base, on shards that store the base as
codes and in one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.codecs import RowCodec
from smp_core.config import SmpConfig
from smp_core.engine import ParallelModel
from smp_core.entry import parallelize
from smp_core.topology import Topology
from smp_core.torch_facts import CodedTensor, as_codes

VOCABULARY, WIDTH = 37, 24


class Adapted(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.a, self.b = (
            nn.Linear(inputs, 2, bias=False),
            nn.Linear(2, outputs, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class Block(nn.Module):
    """Uneven rows of several blocks of codes, fewer rows than ranks, rows too short for
    codes, vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Adapted(WIDTH, 300), Adapted(300, WIDTH)
        self.few, self.short, self.norm = (
            nn.Linear(WIDTH, 3),
            nn.Linear(3, WIDTH),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(self.up(x).tanh()) + self.short(self.few(x)))


class Net(nn.Module):
    """The embedding is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, VOCABULARY, bias=False),
        )
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(
            self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )


def net(seed: int = 0, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(seed)
    return frozen(Net().to(dtype))


def frozen(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith((".a.weight", ".b.weight")))
    return model


def is_coded(parameter: torch.Tensor) -> bool:
    return (
        not parameter.requires_grad
        and parameter.ndim > 1
        and parameter[0].numel() >= 16
    )


@torch.no_grad()
def with_decoded_base(model: Any, name: Any) -> Any:
    """The model that shards compute with, in one process."""
    for parameter in model.parameters():
        if is_coded(parameter):
            parameter.copy_(
                as_codes(parameter, parameter.shape, RowCodec(name)).decoded()
            )
    return model


def parallel_net(
    seed: int = 0, dtype: torch.dtype = torch.float64, **knobs: Any
) -> ParallelModel:
    return parallelize(
        net(seed, dtype),
        SmpConfig(units=["Block"], **knobs),
        topology=Topology.discover(),
    )


def adapters_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=1e-2
    )


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, VOCABULARY, (2, 6), generator=generator)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Iterable[int],
    steps: Iterable[int],
) -> None:
    for step in steps:
        optimizer.zero_grad()
        losses = [model(batch(step, rank)) for rank in ranks]
        (sum(losses) / len(losses)).backward()
        optimizer.step()


def alone(
    name: str, world: int, steps: int, dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    model = with_decoded_base(net(dtype=dtype), name)
    train(model, adapters_of(model), range(world), range(steps))
    return {key: value.detach() for key, value in model.named_parameters()}


def on_shards(
    steps: Iterable[int], dtype: torch.dtype = torch.float64, **knobs: Any
) -> ParallelModel:
    parallel = parallel_net(dist.get_rank(), dtype, **knobs)
    optimizer = adapters_of(parallel.module)
    parallel.prepare_optimizer(optimizer)
    train(parallel.module, optimizer, [dist.get_rank()], steps)
    return parallel


def furthest(parallel: ParallelModel, expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of a parameter, adapters and base."""
    differences = []
    for name, value in parallel.module.named_parameters():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        differences.append((whole - expected[name]).abs().max().item())
    return max(differences)


def codes_of(model: nn.Module) -> dict[str, CodedTensor]:
    """What this rank stores as codes."""
    found = {}
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if isinstance(local, CodedTensor):
            found[name] = local
    return found

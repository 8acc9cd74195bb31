"""Models and units of classes that ``fully_shard`` cannot derive from train as in one
process."""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.sharding.fsdp.wrapping import any_class
from tests.core.sharding.prepared_runs import difference, weights
from tests.harness import run_ranks

T = TypeVar("T")


class Slotted:
    __slots__ = ()


class WithDict(Slotted):
    """A mixin that has a ``__dict__``, of a base that has none."""


class Abstract(ABC, nn.Module):
    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...


def made(name: str, bases: tuple[object, ...]) -> type[nn.Module]:
    """A class of one linear layer."""

    def __init__(self: nn.Module) -> None:
        nn.Module.__init__(self)
        self.inner = nn.Linear(6, 6)

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))

    return types.new_class(
        name,
        bases,
        exec_body=lambda own: own.update(__init__=__init__, forward=forward),
    )


BLOCKS = {
    "abstract": made("Block", (ABC, nn.Module)),
    "inherited": made("Block", (Abstract,)),
    "generic": made("Block", (Generic[T], nn.Module)),
    "slots": made("Block", (Slotted, nn.Module)),
    "mixin": made("Block", (WithDict, nn.Module)),
    "usual": made("Block", (nn.Module, ABC)),
}


class Root(ABC, nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(BLOCKS[kind]() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def trained(kind: str, is_sharded: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Root(kind).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if is_sharded:
        parallel = parallelize(
            model, SmpConfig(shard_degree=2, units={"modules": ["Block"]})
        )
        parallel.prepare_optimizer(optimizer)
        for module in (model, *model.blocks):
            order = type(module).__mro__
            assert order.index(FSDPModule) < order.index(nn.Module)
    for seed in range(3):
        x = torch.randn(
            4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        rank = torch.distributed.get_rank() if is_sharded else None
        model(x if rank is None else x.chunk(2)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def differences() -> dict[str, float]:
    return {
        kind: difference(trained(kind, True), trained(kind, False)) for kind in BLOCKS
    }


def test_any_class_trains_like_one_process() -> None:
    """1e-12: sums in another order, in float64."""
    for found in run_ranks(differences, 2):
        assert found == {kind: pytest.approx(0, abs=1e-12) for kind in BLOCKS}


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_module_that_is_not_sharded_keeps_its_class(kind: str) -> None:
    block = BLOCKS[kind]()
    with pytest.raises(RuntimeError, match="refused"), any_class(block):
        raise RuntimeError("refused")
    assert type(block) is BLOCKS[kind]

"""Loads of experts, counted by hooks: what they are not told, and what they must not
disturb. On ranks: tests/lightning/test_monitor.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from smp_core.observe.router_loads import RouterLoads

EXPERTS, CPU = 4, torch.device("cpu")


class Router(nn.Module):
    """Sends tokens where the input says."""

    def __init__(self, top_k: int = 1) -> None:
        super().__init__()
        self.num_experts, self.top_k = EXPERTS, top_k
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, chosen: torch.Tensor) -> Any:
        return self.weight * chosen.float(), chosen


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Router()

    def forward(self, chosen: torch.Tensor) -> torch.Tensor:
        return self.gate(chosen)[0]


def alone(values: list[float], operation: str) -> list[float]:
    return values


def test_compiled_layers_are_one_graph_for_all() -> None:
    """Dynamo compiles anew for what differs between layers, eight times at most."""
    graphs: list[Any] = []

    def counting(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model = nn.ModuleList(Block() for _ in range(10))
    loads = RouterLoads([model], share_models=False, device=CPU)
    for block in model:
        block.compile(backend=counting, fullgraph=True)
    for _ in range(2):
        for block in model:
            block(torch.tensor([[0], [1], [1], [3]]))
    assert len(graphs) == 1
    assert loads.report(alone) == {"expert_load": 2.0, "idle_experts": 0.25}
    assert list(loads.by_router) == [f"{number}.gate" for number in range(10)]


def test_tokens_that_are_dropped_are_no_load() -> None:
    router = Router()
    loads = RouterLoads([router], share_models=False, device=CPU)
    router(torch.tensor([[-1], [0], [EXPERTS], [2]]))
    router.eval()
    router(torch.tensor([[3]]))
    assert loads.report(alone) == {"expert_load": 2.0, "idle_experts": 0.5}


def test_nothing_counted_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    router = Router(top_k=2)  # and returns one for each token
    loads = RouterLoads([router], share_models=False, device=CPU)
    for _ in range(2):
        router(torch.tensor([[0]]))
        assert loads.report(alone) == {}
    assert [record.message[:38] for record in caplog.records] == [
        "the monitor has counted no choice of t"
    ]


def test_nothing_stays_on_the_model() -> None:
    router = Router()
    before = set(vars(router))
    loads = RouterLoads([router], share_models=False, device=CPU)
    loads.end()
    assert not router._forward_hooks and set(vars(router)) == before
    router(torch.tensor([[0]]))

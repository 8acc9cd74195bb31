"""Compiled models under SmpAccelerator: equal losses, as many gathers, and nothing
compiled after the second step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from torch import nn
from torch._dynamo.utils import counters  # the compiler's only count of its graphs

from accelerate_smp import SmpAccelerator
from tests.accelerate.trainers import fit
from tests.harness import run_ranks

BLOCKS, STEPS = 3, 4
WAYS = (
    "not compiled",
    "blocks",
    "knob",
    "Accelerate's plugin",
    "Accelerate's plugin, by region",
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def trained(way: str) -> tuple[list[float], list[float], list[int]]:
    """Losses, gathers and graphs so far, step by step."""
    AcceleratorState._reset_state()  # or the first accelerator's plugin stays
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model, asked = Chain(), {}
    if way.startswith("Accelerate"):
        by_region = way.endswith("region")
        asked["dynamo_plugin"] = TorchDynamoPlugin(
            backend="eager", use_regional_compilation=by_region
        )
    if way == "blocks":
        for block in model.blocks:
            block.compile(backend="eager")
    if way == "whole":
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    if way == "knob":
        asked["compile"] = {"backend": "eager", "fullgraph": True}
    accelerator: Any = SmpAccelerator(
        cpu=True, shard_degree=2, activations="full", **asked
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    losses, gathers, graphs = [], [], []
    for step in range(STEPS):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = prepared(x).square().sum()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        gathers.append(accelerator.parallel.meter.per_step()["all_gather/calls"])
        graphs.append(counters["stats"]["unique_graphs"])
    accelerator.free_memory()
    return losses, gathers, graphs


def compiled_before() -> dict[str, tuple[list[float], list[float], list[int]]]:
    return {way: trained(way) for way in ("not compiled", "whole")}


def test_a_model_that_is_compiled_before_it_is_prepared_trains_alike() -> None:
    for found in run_ranks(compiled_before, 2):
        losses, gathers, _ = found["not compiled"]
        assert found["whole"][:2] == (losses, gathers)
        assert found["whole"][2][-1] > 0


def all_ways() -> dict[str, tuple[list[float], list[float], list[int]]]:
    return {way: trained(way) for way in WAYS}


@pytest.mark.slow
def test_compiled_models_gather_as_often_and_compile_nothing_after_two_steps() -> None:
    for found in run_ranks(all_ways, 2, timeout=600):
        losses, gathers, none = found["not compiled"]
        # Each block at least once in forward and once for its recomputation.
        assert none[-1] == 0 and min(gathers) >= 2 * BLOCKS
        for way in WAYS[1:]:
            assert found[way][0] == losses, "the same operators in the same order"
            assert found[way][1] == gathers, way
            graphs = found[way][2]
            assert graphs[1] == graphs[-1] > 0, (way, graphs)


def trainer_losses(folder: str, **flags: Any) -> tuple[list[float], int]:
    """Losses of a run of Trainer, and graphs that were compiled in it."""
    counters.clear()
    run = fit(folder, 8, 1, {"shard_degree": 2}, **flags)
    return run.losses, counters["stats"]["unique_graphs"]


def test_trainers_torch_compile_compiles_blocks_and_changes_no_loss(
    tmp_path: Path,
) -> None:
    flags = {"torch_compile": True, "torch_compile_backend": "eager"}
    plain = run_ranks(trainer_losses, 2, str(tmp_path / "plain"))
    for (expected, none), (losses, graphs) in zip(
        plain,
        run_ranks(trainer_losses, 2, str(tmp_path / "compiled"), **flags),
        strict=True,
    ):
        assert losses == expected and none == 0 < graphs

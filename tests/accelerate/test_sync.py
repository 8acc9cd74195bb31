"""Accelerate's own checks: its bundled scripts with sharding off, and a port of its
test_sync with sharding on.

In the port parameters are 1-D, gradients are compared whole (``full_tensor``), and in
the middle of a window ``.grad`` of a sharded model is what it was before the window
(None after ``zero_grad``), where DDP has this rank's own.
"""

from __future__ import annotations

import itertools
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.accelerate.running import fresh_accelerator
from tests.harness import ROOT, run_ranks, run_script

# Not test_sync with shard_degree=1: in the middle of a window it wants to see each
# rank's own ``.grad``, which is hidden there at every degree; the port below runs
# instead.
BUNDLED = [
    ("test_script", "off"),
    ("test_ops", "off"),
    ("test_sync", "off"),
    ("test_script", "whole"),
    ("test_ops", "whole"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sharding"), BUNDLED)
def test_accelerates_bundled_script_passes_when_nothing_is_sharded(
    name: str, sharding: str, tmp_path: Path
) -> None:
    script = ROOT / "tests" / "accelerate" / "scripts" / "bundled.py"
    finished = run_script(
        [script, name, sharding],
        nproc=2,
        env={"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-5000:]
    assert finished.stdout.count(f"ALL OF {name} PASSED") == 2


class Regression(nn.Module):
    """y = a x + b, elementwise; three rows, so that four ranks get unequal shards."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([0.5, -0.2, 0.1]))
        self.b = nn.Parameter(torch.tensor([0.0, 0.3, -0.7]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a * x + self.b


def setup(accelerator: Any) -> tuple[nn.Module, nn.Module, Any]:
    generator = torch.Generator().manual_seed(42)
    x = torch.randn(80, 3, generator=generator)
    samples = [{"x": row, "y": 2 * row + 3} for row in x]
    model = Regression()
    sharded, loader = accelerator.prepare(
        deepcopy(model), DataLoader(samples, batch_size=8)
    )
    return model, sharded, loader


def step(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    accelerator: Any,
    alone: bool = False,
) -> None:
    loss = F.mse_loss(model(x), y)
    if alone:
        (loss / accelerator.gradient_accumulation_steps).backward()
    else:
        accelerator.backward(loss)


def check(model: nn.Module, sharded: nn.Module, in_sync: bool, where: str) -> None:
    for (name, one), many in zip(
        model.named_parameters(), sharded.parameters(), strict=True
    ):
        if not in_sync:
            # What it shows, if anything, is the closed windows before (nobody zeroed
            # them), and it is sharded.
            if many.grad is not None:
                assert isinstance(many.grad, DTensor) == isinstance(many, DTensor), (
                    f"{where}: {name}"
                )
                assert not torch.allclose(whole(many.grad), one.grad), (
                    f"{where}: {name} is in sync"
                )
            continue
        assert many.grad is not None and isinstance(many.grad, DTensor) == isinstance(
            many, DTensor
        )
        torch.testing.assert_close(
            whole(many.grad), one.grad, rtol=1e-5, atol=1e-6, msg=f"{where}: {name}"
        )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def no_sync_case(degree: int) -> None:
    accelerator = fresh_accelerator(shard_degree=degree)
    model, sharded, loader = setup(accelerator)
    x, y = next(iter(loader)).values()
    for iteration in range(3):
        whole_x, whole_y = accelerator.gather((x, y))
        step(model, whole_x, whole_y, accelerator, alone=True)
        if iteration % 2 == 0:
            with accelerator.no_sync(sharded):
                step(sharded, x, y, accelerator)
            check(model, sharded, False, f"iteration {iteration}")
        else:
            step(sharded, x, y, accelerator)
            check(model, sharded, True, f"iteration {iteration}")


def several_forwards_case(degree: int) -> None:
    """Forwards first, backwards later; only the last backward synchronises."""
    accelerator = fresh_accelerator(shard_degree=degree)
    model, sharded, loader = setup(accelerator)
    losses = []
    for batch, _ in zip(loader, range(2), strict=False):
        x, y = batch.values()
        whole_x, whole_y = accelerator.gather((x, y))
        step(model, whole_x, whole_y, accelerator, alone=True)
        losses.append(F.mse_loss(sharded(x), y))
    for number, loss in enumerate(losses):
        if number < len(losses) - 1:
            with accelerator.no_sync(sharded):
                accelerator.backward(loss)
            check(model, sharded, False, f"backward {number}")
        else:
            with accelerator.trigger_sync_in_backward(sharded):
                accelerator.backward(loss)
            check(model, sharded, True, f"backward {number}")


def accumulate_case(
    degree: int, split: bool, dispatch: bool, each: bool, with_optimizer: bool
) -> None:
    accelerator = fresh_accelerator(
        shard_degree=degree,
        dataloader_config=DataLoaderConfiguration(
            split_batches=split, dispatch_batches=dispatch
        ),
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=2, sync_each_batch=each
        ),
    )
    model, sharded, loader = setup(accelerator)
    mine = torch.optim.AdamW(model.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(mine, lambda n: 0.65**n)
    theirs, their_schedule = accelerator.prepare(
        theirs, torch.optim.lr_scheduler.LambdaLR(theirs, lambda n: 0.65**n)
    )
    for iteration, batch in enumerate(loader):
        x, y = batch.values()
        whole_x, whole_y = accelerator.gather((x, y))
        step(model, whole_x, whole_y, accelerator, alone=True)
        stepped = (iteration + 1) % 2 == 0 or iteration == len(loader) - 1
        with accelerator.accumulate(sharded):
            step(sharded, x, y, accelerator)
            check(model, sharded, stepped or each, f"iteration {iteration}")
            if with_optimizer:
                theirs.step()
                their_schedule.step()
                theirs.zero_grad()
        if not with_optimizer:
            continue
        if stepped:
            mine.step()
            # As Accelerate's own test counts.
            for _ in range(1 if split else accelerator.num_processes):
                schedule.step()
            mine.zero_grad()
        assert mine.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    for one, many in zip(model.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(whole(many), one, rtol=1e-5, atol=1e-6)


def everything(degree: int, cases: list[tuple[bool, bool, bool]]) -> None:
    no_sync_case(degree)
    several_forwards_case(degree)
    for case, with_optimizer in itertools.product(cases, (False, True)):
        accumulate_case(degree, *case, with_optimizer)


@pytest.mark.parametrize("degree", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_port_of_test_sync(degree: int) -> None:
    """split_batches, dispatch_batches and sync_each_batch, each on its own."""
    cases = [
        (False, False, False),
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    run_ranks(everything, 4, degree, cases, ranks_per_node=2)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_port_of_test_sync_in_all_combinations(degree: int) -> None:
    run_ranks(
        everything,
        4,
        degree,
        list(itertools.product((False, True), repeat=3)),
        ranks_per_node=2,
    )

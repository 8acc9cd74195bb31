"""Models of one's own over context ranks in a bare loop: exact, or refused before a
step is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from tests.accelerate.running import fresh_accelerator, full_weights
from tests.core.context_parallel.own_models import (
    LENGTH,
    VOCABULARY,
    OwnModel,
    draw,
    loss_of,
)
from tests.harness import run_ranks

BATCH, STEPS = 4, 2
NORMAL = [2, 4, 10, 12, 13, 15, 28, 63, 73, 79]


def loops(seeds: list[int]) -> list[dict[str, torch.Tensor] | str]:
    """Weights after a loop in which nothing knows of context ranks, or what refused the
    model."""
    found: list[dict[str, torch.Tensor] | str] = []
    generator = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(
        VOCABULARY, (2, BATCH * STEPS, LENGTH), generator=generator
    )
    for seed in seeds:
        model: Any = OwnModel(draw(seed)).double()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(TensorDataset(tokens, targets), batch_size=BATCH)
        accelerator: Any = None
        if dist.is_initialized():
            loader = DataLoader(loader.dataset, batch_size=BATCH // 2)
            accelerator = fresh_accelerator(shard_degree=4, context_parallel_degree=2)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        try:
            for own_tokens, own_targets in loader:
                loss = loss_of(
                    model(own_tokens, own_targets), own_targets, draw(seed).step
                )
                loss.backward() if accelerator is None else accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        except ValueError as error:
            found.append(str(error))
            continue
        found.append(full_weights(model))
    return found


def check(seeds: list[int]) -> None:
    """float64; 1e-11 is summation order."""
    right = [seed for seed in seeds if draw(seed).is_right]
    expected = dict(zip(right, loops(right), strict=True))
    for seen in run_ranks(loops, 4, seeds, ranks_per_node=2, timeout=1200):
        for seed, ours in zip(seeds, seen, strict=True):
            if seed not in expected:
                assert isinstance(ours, str) and "context_parallel_degree=1" in ours, (
                    f"{draw(seed)}: {ours}"
                )
                continue
            assert isinstance(ours, dict), f"{draw(seed)}: {ours}"
            theirs = expected[seed]
            assert isinstance(theirs, dict)
            for name, value in theirs.items():
                assert (ours[name] - value).abs().max() <= 1e-11, (
                    f"{draw(seed)}: {name}"
                )


@pytest.mark.slow  # in the normal run: tests/core/context_parallel and tests/lightning
def test_own_models_are_exact_or_refused_before_a_step() -> None:
    check(NORMAL)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(80, 280, 20))
def test_many_own_models_are_exact_or_refused_before_a_step(first: int) -> None:
    check(list(range(first, first + 20)))

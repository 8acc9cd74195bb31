"""Hooks that a script registers before `prepare`, or a model brings to SmpTrainer, see
and change one process's gradients; float64, to 1e-12."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer

from tests.accelerate import trainers
from tests.accelerate.running import (
    SAMPLES,
    fresh_accelerator,
    full_weights,
    make_loader,
)
from tests.core.models import TroubledModel, loss_of
from tests.harness import run_ranks

STEPS, MICRO_BATCHES = 3, 2


def _registered(model: torch.nn.Module, norms: list[float]) -> None:
    first, *_, last, _ = (
        p for p in model.parameters() if p.requires_grad and p.ndim > 1
    )
    trained = torch.ones(len(first), 1)
    trained[::2] = 0
    first.register_hook(lambda gradient: gradient * trained)
    last.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    last.register_hook(lambda gradient: norms.append(float(gradient.norm())))


def looped(knobs: dict[str, Any] | None) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Accelerate's loop on ranks; plain torch with ``knobs`` None."""
    norms: list[float] = []
    torch.manual_seed(0)
    model = TroubledModel().double()
    _registered(model, norms)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    loader = make_loader(STEPS, MICRO_BATCHES, SAMPLES // ranks)
    if knobs is None:
        for number, batch in enumerate(loader, 1):
            (loss_of(model, batch["tokens"]) / MICRO_BATCHES).backward()
            if number % MICRO_BATCHES == 0:
                optimizer.step()
                optimizer.zero_grad()
        return full_weights(model), norms
    accelerator = fresh_accelerator(gradient_accumulation_steps=MICRO_BATCHES, **knobs)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch["tokens"]))
            optimizer.step()
            optimizer.zero_grad()
    return full_weights(model), norms


def trained(
    folder: str, knobs: dict[str, Any] | None
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """transformers' Trainer, and SmpTrainer on ranks."""
    norms: list[float] = []
    model = trainers.make_model().double()
    _registered(model, norms)
    trainer: Trainer
    trainer, _ = trainers.make_trainer(
        folder, 8, 2, knobs, model=model, max_steps=3, max_grad_norm=0.0
    )
    trainer.train()
    return trainers.whole_weights(trainer.model), norms


def together(folder: str) -> list[tuple[dict[str, torch.Tensor], list[float]]]:
    found = [looped({"shard_degree": degree}) for degree in (1, 2)]
    return [*found, trained(folder, {"shard_degree": 2})]


@pytest.mark.slow  # in the normal run: tests/core/sharding/test_parameter_hooks.py
def test_hooks_of_before_prepare_see_and_change_one_processs_gradients(
    tmp_path: Path,
) -> None:
    loop = looped(None)
    expected = [loop, loop, trained(str(tmp_path / "alone"), None)]
    for by_case in run_ranks(together, 4, str(tmp_path / "ranks"), ranks_per_node=2):
        for (weights, norms), (theirs, right) in zip(by_case, expected, strict=True):
            assert right
            assert norms == pytest.approx(right, rel=1e-11)
            for name, weight in theirs.items():
                assert torch.allclose(weights[name], weight, rtol=0, atol=1e-11), name

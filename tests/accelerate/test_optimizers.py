"""Optimizers as scripts bring them to ``prepare``: with states from a constructor, over
two models, a second time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerate.running import fresh_accelerator, full_weights
from tests.harness import run_ranks

STEPS = 3
LAYOUTS: list[dict[str, Any]] = [
    {"shard_degree": 2},
    {"shard_degree": 1, "optimizer_shard": "world"},
    {"shard_degree": 2, "state_offload": "optimizer"},
]


def models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Linear(5, 3).double(),
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(),
    ]


def adagrad(parts: list[nn.Module]) -> torch.optim.Optimizer:
    """torch makes its states in the constructor."""
    parameters = [parameter for part in parts for parameter in part.parameters()]
    return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1)


class Again(torch.optim.SGD):
    """Its step calls that of its base: torch calls the hooks of steps around each of
    both."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def rows(step: int, rank: int) -> torch.Tensor:
    return torch.randn(
        4,
        5,
        generator=torch.Generator().manual_seed(10 * step + rank),
        dtype=torch.float64,
    )


def alone(world: int) -> list[dict[str, torch.Tensor]]:
    first, second = parts = models()
    optimizer = adagrad(parts)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world):
            (second(first(rows(step, rank))).square().mean() / world).backward()
        optimizer.step()
    return [full_weights(part) for part in parts]


def together(knobs: dict[str, Any]) -> tuple[list[dict[str, torch.Tensor]], int]:
    """Weights, and the steps that were counted."""
    accelerator = fresh_accelerator(**knobs)
    parts = models()
    bare = adagrad(parts)
    first, second, optimizer = accelerator.prepare(*parts, bare)
    accelerator.prepare(bare)
    assert accelerator._watch is not None
    # It is the process's, which has trained other layouts.
    before = accelerator._watch.step
    for step in range(STEPS):
        optimizer.zero_grad()
        accelerator.backward(
            second(first(rows(step, accelerator.process_index))).square().mean()
        )
        optimizer.step()
    return [
        full_weights(part) for part in (first, second)
    ], accelerator._watch.step - before


def moved(folder: str) -> list[list[dict[str, torch.Tensor]]]:
    """Weights after a first step on one layout, and the others on another, by one
    optimizer over two models."""
    found = []
    for number, knobs in enumerate(LAYOUTS):
        for turn in (0, 1):
            accelerator = fresh_accelerator(**(LAYOUTS[number - 1] if turn else knobs))
            parts = models()
            prepared = accelerator.prepare(*parts, adagrad(parts))
            first, second, optimizer = prepared
            if turn:
                accelerator.load_state(f"{folder}/{number}")
            for step in range(1, STEPS) if turn else (0,):
                optimizer.zero_grad()
                inputs = rows(step, accelerator.process_index)
                accelerator.backward(second(first(inputs)).square().mean())
                optimizer.step()
            if not turn:
                accelerator.save_state(f"{folder}/{number}")
        found.append([full_weights(part) for part in (first, second)])
    return found


def counted() -> tuple[int, int, float]:
    """What watch, accelerator and schedule counted, after ``STEPS`` optimizer steps."""
    accelerator = fresh_accelerator(shard_degree=2)
    model = models()[0]
    # Torch hooks the steps of the classes that were made.
    torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Again(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    assert accelerator._watch is not None
    before = accelerator._watch.step
    for step in range(STEPS):
        optimizer.zero_grad()
        accelerator.backward(
            model(rows(step, accelerator.process_index)).square().mean()
        )
        optimizer.step()
        schedule.step()
    return (
        accelerator._watch.step - before,
        accelerator.optimizer_steps,
        schedule.get_last_lr()[0],
    )


def all_together() -> tuple[
    list[tuple[list[dict[str, torch.Tensor]], int]], tuple[int, int, float]
]:
    return [together(knobs) for knobs in LAYOUTS], counted()


def test_one_adagrad_over_two_models_prepared_twice_trains_as_in_one_process() -> None:
    expected = alone(2)
    for layouts, nested in run_ranks(all_together, 2):
        for seen, steps in layouts:
            for ours, theirs in zip(seen, expected, strict=True):
                for name, value in theirs.items():
                    torch.testing.assert_close(ours[name], value, atol=1e-12, rtol=0)
            assert steps == STEPS, (
                "neither two models nor a second prepare counts a step twice"
            )
        # Each step uses up a batch of each of the two ranks, and the schedule counts
        # batches.
        assert nested == (STEPS, STEPS, 2.0 * STEPS), (
            "a step that calls that of its base is one step"
        )


def test_one_optimizer_over_two_models_is_saved_and_goes_on_at_other_layouts(
    tmp_path: Path,
) -> None:
    """As scripts of diffusers have it, which train a text encoder too. float64: 1e-12."""
    expected = alone(2)
    for layouts in run_ranks(moved, 2, str(tmp_path)):
        for seen in layouts:
            for ours, theirs in zip(seen, expected, strict=True):
                for name, value in theirs.items():
                    torch.testing.assert_close(ours[name], value, atol=1e-12, rtol=0)


def test_steps_of_phases_are_added_up_and_begin_anew_with_free_memory() -> None:
    accelerator = fresh_accelerator(cpu=True)
    counts = []
    for phase in range(3):
        model = nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1)
        )
        for _ in range(STEPS):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
        counts.append(accelerator.optimizer_steps)
        if phase == 1:
            accelerator.free_memory()
    assert counts == [STEPS, 2 * STEPS, STEPS]


def halves(
    moves: list[tuple[dict[str, Any], dict[str, Any]]], folder: str
) -> list[dict[str, torch.Tensor]]:
    """Weights that `get_state_dict` gives of a bfloat16 model after two steps on one
    layout and one on another."""
    found = []
    for number, layouts in enumerate(moves):
        for turn, knobs in enumerate(layouts):
            accelerator = fresh_accelerator(**knobs)
            model = models()[0].bfloat16()
            model, optimizer = accelerator.prepare(
                model, torch.optim.AdamW(model.parameters(), lr=1e-4)
            )
            if turn == 1:
                accelerator.load_state(f"{folder}/{number}")
            for step in (0, 1) if turn == 0 else (2,):
                inputs = rows(step, accelerator.process_index).bfloat16()
                accelerator.backward(model(inputs).float().square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if turn == 0:
                accelerator.save_state(f"{folder}/{number}")
        found.append(accelerator.get_state_dict(model))
    return found


@pytest.mark.slow
def test_masters_of_a_bfloat16_model_are_saved_and_go_on_at_other_layouts(
    tmp_path: Path,
) -> None:
    """AdamW moves each weight by about 1e-4 in each step, a fifth of what bfloat16 can
    show of most. Gradients are rounded to bfloat16 before they are added up: 1 % of the
    way is allowed."""
    stored, world = (
        {"shard_degree": 2, "master_dtype": "float32"},
        {"shard_degree": 1, "optimizer_shard": "world"},
    )
    host = {"shard_degree": 1, "state_offload": "optimizer"}
    start = {
        name: value.bfloat16().float()
        for name, value in models()[0].state_dict().items()
    }
    moves = [(stored, stored), (stored, world), (world, host), (host, stored)]
    first, *others = run_ranks(halves, 2, moves, str(tmp_path))[0]
    for name, value in first.items():
        assert value.dtype == torch.float32
        assert (value - start[name]).abs().median() > 2e-4
        for other in others:
            assert (other[name] - value).abs().max() <= 3e-6, name

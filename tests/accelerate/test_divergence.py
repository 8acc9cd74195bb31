"""Ranks that take different ways through a model under SmpAccelerator: an error before
the step, or one process's numbers (1e-12 in float64) where the branches are optional
units."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from smp_core.sharding.gradients.divergence import RanksDiverged
from tests.accelerate.running import fresh_accelerator, full_weights
from tests.core.branching import WAYS, Branching, batch_of, loss_of
from tests.core.pictured import pictured_loss, small_llava
from tests.harness import run_ranks


def stopped() -> dict[str, Any]:
    """Two optimizer steps of two micro-batches; in the last of them every rank goes its
    own way."""
    rank = dist.get_rank()
    accelerator = fresh_accelerator(
        smp_config={"shard_degree": 2, "units": ["Block"]},
        gradient_accumulation_steps=2,
    )
    torch.manual_seed(0)
    model = Branching()
    model, optimizer = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.1)
    )
    start = full_weights(model)
    with pytest.raises(RanksDiverged) as error:
        for index in range(4):
            before = full_weights(model)
            with accelerator.accumulate(model):
                way = "lr"[rank] if index == 3 else "lr"
                accelerator.backward(loss_of(model, batch_of(rank, 0, index), way))
                optimizer.step()
                optimizer.zero_grad()
    after = full_weights(model)
    return {
        "said": str(error.value),
        "unchanged": all(torch.equal(before[name], after[name]) for name in after),
        "moved": any(not torch.equal(start[name], after[name]) for name in after),
    }


def test_ranks_that_go_apart_stop_before_the_step() -> None:
    for seen in run_ranks(stopped, 2):
        where = "in micro-batch 2, rank 0: all_gather of 'left.0' in forward; rank 1: all_gather of 'right.0'"
        assert where in seen["said"], seen["said"]
        assert seen["unchanged"] and seen["moved"]


def train(micro_batches: int, knobs: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """Three steps: on a rank with its own branches, or without knobs in one process
    with those of both ranks."""
    torch.manual_seed(0)
    model = Branching()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if knobs is not None:
        accelerator = fresh_accelerator(
            smp_config=knobs, gradient_accumulation_steps=micro_batches
        )
        model, optimizer = accelerator.prepare(model, optimizer)
    for index in range(3 * micro_batches):
        ways = WAYS[index % len(WAYS)].split(" ")
        losses = [
            loss_of(model, batch_of(rank, 0, index), way)
            for rank, way in enumerate(ways)
            if knobs is None
        ]
        if knobs is None:
            (sum(losses) / 2 / micro_batches).backward()
            if (index + 1) % micro_batches == 0:
                optimizer.step()
                optimizer.zero_grad()
            continue
        with accelerator.accumulate(model):
            rank = dist.get_rank()
            accelerator.backward(loss_of(model, batch_of(rank, 0, index), ways[rank]))
            optimizer.step()
            optimizer.zero_grad()
    return full_weights(model)


def train_with_pictures(knobs: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """Six optimizer steps of a model with a vision tower, which ranks without a picture
    do not call."""
    model = small_llava()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if knobs is not None:
        accelerator = fresh_accelerator(smp_config=knobs)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert accelerator.smp_config.units.optional == ("model.vision_tower",)
    for index in range(6):
        if knobs is not None:
            accelerator.backward(pictured_loss(model, dist.get_rank(), index))
        else:
            (
                (pictured_loss(model, 0, index) + pictured_loss(model, 1, index)) / 2
            ).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


def optional() -> list[dict[str, torch.Tensor]]:
    knobs: dict[str, Any] = {
        "shard_degree": 2,
        "units": {"modules": ["Block"], "optional": ["left", "right"]},
    }
    found = train_with_pictures({"shard_degree": 2, "units": {"optional": "auto"}})
    return [train(3, {**knobs, "activations": "full"}), train(1, knobs), found]


def test_optional_units_may_be_left_out_by_any_rank() -> None:
    expected = [train(3, None), train(1, None), train_with_pictures(None)]
    for runs in run_ranks(optional, 2):
        for ours, theirs in zip(runs, expected, strict=True):
            assert all(
                torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-12)
                for name in theirs
            )

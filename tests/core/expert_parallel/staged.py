"""Trainings through pipeline stages whose ranks divide experts, beside those of one
process."""

from __future__ import annotations

from typing import Any

import torch

from tests.core.expert_parallel import models as models  # makes its models known
from tests.core.pipeline.cases import Case, together
from tests.core.tensor_parallel.model_cases import (
    Training,
    Wide,
    alone,
    batches,
    build,
    differences,
    full,
    loss_of,
    optimizer_of,
    own_loss,
)
from tests.harness import run_ranks


def problems(cases: list[Case]) -> list[list[str]]:
    """What is further off than 1e-12 from one process, by case; run by each rank."""
    found = []
    for case in cases:
        lines = differences(together(case), alone(case.kind, case.windows))
        found.append([f"{case}: {line}" for line in lines])
    return found


def assert_like_one_process(cases: list[Case], world: int = 4) -> None:
    for found in run_ranks(problems, world, cases, ranks_per_node=4, timeout=900):
        assert [line for lines in found for line in lines] == []


def in_micro_batches(case: Case, data_size: int) -> Training:
    """The training of one process that accumulates over the micro-batches of all ranks
    together: an auxiliary loss is of one of them, and is not the mean of those of its
    parts."""
    seen = Training()
    model: Any = build(case.kind)
    model.loss_function = own_loss
    optimizer = optimizer_of(model)
    for step, windows in enumerate(batches(case.windows)):
        total, count = 0.0, case.windows * case.micro_batches
        for window in windows:
            parts_of_ranks = [
                each.chunk(case.micro_batches) for each in window.chunk(data_size)
            ]
            for parts in zip(*parts_of_ranks, strict=True):
                with Wide():
                    loss = loss_of(model, torch.cat(parts)) / count
                    loss.backward()
                total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        seen.take(model, total, norm.item(), step)
        optimizer.step()
        optimizer.zero_grad()
    seen.weights = {name: full(value) for name, value in model.state_dict().items()}
    return seen


def problems_of_losses(cases: list[Case], data_size: int) -> list[list[str]]:
    """As :func:`problems`, beside one process with the same micro-batches."""
    found = []
    for case in cases:
        lines = differences(together(case), in_micro_batches(case, data_size))
        found.append([f"{case}: {line}" for line in lines])
    return found

"""Schedules played without ranks: idle time, activations that wait for backward, and messages in an order in which
nobody waits in a circle; and the activations that ranks keep, by count."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from fractions import Fraction
from typing import Any

import pytest
import torch

from smp_core.plan.schedules import Step, chunks_of, computations, forward_only, with_messages
from tests.core.pipeline.cases import Case
from tests.core.tensor_parallel.model_cases import Wide, batches
from tests.harness import run_ranks

CASES = [
    ("1f1b", 2, 4), ("1f1b", 4, 8), ("1f1b", 4, 2), ("gpipe", 2, 4), ("gpipe", 4, 8),
    ("interleaved:2", 2, 4), ("interleaved:2", 4, 8), ("interleaved:3", 2, 2), ("interleaved:3", 4, 8),
]  # fmt: skip


def orders_of(schedule: str, stages: int, micro_batches: int) -> list[list[Step]]:
    return [computations(schedule, stages, stage, micro_batches) for stage in range(stages)]


def idle_share(orders: list[list[Step]], chunks: int) -> Fraction:
    """Of all stages' time, where backward takes twice as long as forward and messages take none."""
    stages = len(orders)
    ends: dict[tuple[bool, int, int], int] = {}
    clocks, left = [0] * stages, [deque(order) for order in orders]
    while any(left):
        for stage, steps in enumerate(left):
            while steps:
                step = steps[0]
                before = (
                    (True, step.chunk - 1, step.micro_batch) if step.is_forward and step.chunk else
                    (False, step.chunk + 1, step.micro_batch) if not step.is_forward and step.chunk + 1 < chunks else
                    None
                )  # fmt: skip
                if before is not None and before not in ends:
                    break
                begin = max(clocks[stage], ends[before] if before is not None else 0)
                clocks[stage] = begin + (1 if step.is_forward else 2)
                ends[step.is_forward, step.chunk, step.micro_batch] = clocks[stage]
                steps.popleft()
    busy = sum(1 if step.is_forward else 2 for order in orders for step in order)
    return 1 - Fraction(busy, max(clocks) * stages)


@pytest.mark.parametrize(("schedule", "stages", "micro_batches"), CASES)
def test_the_idle_share_is_that_of_the_papers(schedule: str, stages: int, micro_batches: int) -> None:
    per_stage = chunks_of(schedule)
    orders = orders_of(schedule, stages, micro_batches)
    assert idle_share(orders, stages * per_stage) == Fraction(stages - 1, micro_batches * per_stage + stages - 1)


@pytest.mark.parametrize(("schedule", "stages", "micro_batches"), CASES)
def test_every_micro_batch_goes_once_through_every_chunk(schedule: str, stages: int, micro_batches: int) -> None:
    chunks = stages * chunks_of(schedule)
    done = [
        (step.is_forward, step.chunk, step.micro_batch)
        for order in orders_of(schedule, stages, micro_batches)
        for step in order
    ]
    assert len(done) == len(set(done)) == 2 * chunks * micro_batches
    for stage, order in enumerate(orders_of(schedule, stages, micro_batches)):
        assert {step.chunk % stages for step in order} == {stage}
        for chunk in range(stage, chunks, stages):  # so gradients are added up as on one process
            backwards = [step.micro_batch for step in order if not step.is_forward and step.chunk == chunk]
            assert backwards == sorted(backwards)


def most_waiting(order: list[Step]) -> int:
    """Chunks' activations that are kept for backward at one time."""
    waiting = most = 0
    for step in order:
        waiting += 1 if step.is_forward else -1
        most = max(most, waiting)
    return most


def test_stages_keep_as_many_activations_as_the_schedule_says() -> None:
    assert [most_waiting(order) for order in orders_of("1f1b", 4, 8)] == [4, 3, 2, 1]
    assert [most_waiting(order) for order in orders_of("gpipe", 4, 8)] == [8, 8, 8, 8]
    # Megatron-LM: 2 (stages - stage - 1) + (chunks - 1) stages + 1 chunks, each a half of a stage.
    assert [most_waiting(order) for order in orders_of("interleaved:2", 4, 8)] == [11, 9, 7, 5]


@pytest.mark.parametrize(("schedule", "stages", "micro_batches"), CASES)
def test_nobody_waits_in_a_circle_even_for_sends(schedule: str, stages: int, micro_batches: int) -> None:
    chunks = stages * chunks_of(schedule)
    evaluation = [forward_only(stages, stage, chunks) for stage in range(stages)]
    for orders in (orders_of(schedule, stages, micro_batches), evaluation):
        left = [deque(steps) for steps in with_messages(orders, chunks)]
        while any(left):
            before = sum(map(len, left))
            for stage, steps in enumerate(left):
                while steps and steps[0].act == "compute":
                    steps.popleft()
                if not steps or steps[0].act != "send":
                    continue
                sent, peer = steps[0], left[steps[0].peer]
                if peer and peer[0] == Step("receive", sent.is_forward, sent.chunk, sent.micro_batch, stage):
                    steps.popleft()
                    peer.popleft()
            assert sum(map(len, left)) < before, [steps[0] for steps in left if steps]


class _Kept(torch.autograd.Function):
    """Identity whose place in the graph is counted while it is there."""

    alive = most = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.token = _Token()
        weakref.finalize(ctx.token, _Kept.left)
        _Kept.alive += 1
        _Kept.most = max(_Kept.most, _Kept.alive)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad

    @staticmethod
    def left() -> None:
        _Kept.alive -= 1


class _Token:
    pass


SCHEDULES = ("1f1b", "gpipe", "interleaved:2")


def most_kept() -> list[int]:
    """Of each schedule the most chunks whose graphs this stage held at one time."""
    found = []
    for schedule in SCHEDULES:
        case = Case("llama_deep", micro_batches=4, schedule=schedule)
        parallel = case.parallel()
        assert parallel.pipeline is not None
        stages = parallel.pipeline.stages
        for chunk in stages.chunks(parallel.mesh.stage):
            block: Any = parallel.module.get_submodule(stages.chain.blocks[stages.blocks(chunk).start])
            block.input_layernorm.register_forward_hook(lambda *given: _Kept.apply(given[2]))
        gc.collect()
        _Kept.alive = _Kept.most = 0
        with Wide():
            case.backward(parallel, batches(1)[0, 0])
        found.append(_Kept.most)
        parallel.window.abandon()
    return found


def test_a_stage_keeps_as_many_activations_as_its_schedule_says() -> None:
    for stage, found in enumerate(run_ranks(most_kept, 2)):
        orders = [computations(schedule, 2, stage, 4) for schedule in SCHEDULES]
        assert found == [most_waiting(order) for order in orders], [chunks_of(schedule) for schedule in SCHEDULES]

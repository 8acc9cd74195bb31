"""What a stage's times are made of, and how many micro-batches' activations it keeps, by count. Nothing is timed."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from smp_core.pipeline import times as module
from smp_core.pipeline.schedule import chunks_of, computations
from smp_core.pipeline.times import Computation, StageTimes, draw_timeline, idle_shares
from tests.core.pipeline.cases import Case
from tests.core.pipeline.test_schedule import most_waiting
from tests.core.tensor_parallel.model_cases import Wide, batches
from tests.harness import run_ranks


def test_a_batch_lasts_from_its_beginning_to_the_last_computation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = iter([100.0, 101.0, 103.0, 110.0, 114.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    times, entered = StageTimes(), []

    @contextmanager
    def around(direction: str) -> Any:
        entered.append(direction)
        yield

    times.around = around
    with times.batch():
        with times.computing("forward", 1, 0):  # 101 to 103
            pass
        with times.computing("backward", 1, 0):  # 110 to 114
            pass
    with times.computing("forward", 1, 0):  # of an evaluation
        pass
    assert times.last == [Computation("forward", 1, 0, 1.0, 3.0), Computation("backward", 1, 0, 10.0, 14.0)]
    assert entered == ["forward", "backward"]
    assert times.take() == (6.0, 14.0) and times.take() == (0.0, 0.0)
    draw_timeline([times.last, times.last], tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_stages_are_idle_until_the_last_of_their_column_ends() -> None:
    # Two columns of two stages: (computed, lasted).
    assert idle_shares([[(6.0, 10.0), (8.0, 9.0)], [(9.0, 10.0), (3.0, 7.0)]]) == [1 - 15 / 20, 1 - 11 / 20]


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

"""Schedules played without ranks: idle time, activations that wait for backward, and
messages in an order in which nobody waits in a circle; and the activations that ranks
keep, by count."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from fractions import Fraction
from typing import Any

import pytest
import torch

from smp_core.plan.schedules import (
    Step,
    chunks_of,
    computations,
    forward_only,
    with_messages,
)
from tests.core.pipeline.cases import Case
from tests.core.tensor_parallel.model_cases import Wide, batches
from tests.harness import run_ranks

CASES = [
    ("1f1b", 2, 4), ("1f1b", 4, 8), ("1f1b", 4, 2), ("gpipe", 2, 4), ("gpipe", 4, 8),
    ("interleaved:2", 2, 4), ("interleaved:2", 4, 8), ("interleaved:3", 2, 2), ("interleaved:3", 4, 8),
]  # fmt: skip


def orders_of(schedule: str, stages: int, micro_batches: int) -> list[list[Step]]:
    return [
        computations(schedule, stages, stage, micro_batches) for stage in range(stages)
    ]


def idle_share(orders: list[list[Step]], chunks: int) -> Fraction:
    """Of all stages' time, where backward takes twice as long as forward and messages
    take none."""
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
def test_the_idle_share_is_that_of_the_papers(
    schedule: str, stages: int, micro_batches: int
) -> None:
    per_stage = chunks_of(schedule)
    orders = orders_of(schedule, stages, micro_batches)
    assert idle_share(orders, stages * per_stage) == Fraction(
        stages - 1, micro_batches * per_stage + stages - 1
    )


@pytest.mark.parametrize(("schedule", "stages", "micro_batches"), CASES)
def test_every_micro_batch_goes_once_through_every_chunk(
    schedule: str, stages: int, micro_batches: int
) -> None:
    chunks = stages * chunks_of(schedule)
    done = [
        (step.is_forward, step.chunk, step.micro_batch)
        for order in orders_of(schedule, stages, micro_batches)
        for step in order
    ]
    assert len(done) == len(set(done)) == 2 * chunks * micro_batches
    for stage, order in enumerate(orders_of(schedule, stages, micro_batches)):
        assert {step.chunk % stages for step in order} == {stage}
        # So gradients are added up as on one process.
        for chunk in range(stage, chunks, stages):
            backwards = [
                step.micro_batch
                for step in order
                if not step.is_forward and step.chunk == chunk
            ]
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
    # Megatron-LM: 2 (stages - stage - 1) + (chunks - 1) stages + 1 chunks, each a half
    # of a stage.
    assert [most_waiting(order) for order in orders_of("interleaved:2", 4, 8)] == [
        11,
        9,
        7,
        5,
    ]


Message = tuple[bool, int, int]
"""Whether it is an activation, the chunk and the micro-batch."""


class _Device:
    """A stage of which computations are one queue, and the messages of a group another.
    A message begins behind the computations that were queued before it, and behind the
    messages before it in its group; a computation behind the message that it takes."""

    def __init__(
        self, steps: list[Step], groups: dict[bool, str], *, host_waits: bool
    ) -> None:
        self._steps, self._groups, self._host_waits = deque(steps), groups, host_waits
        self._awaited = {_message(step) for step in steps if step.act == "receive"}
        self._computing: deque[Message | None] = deque()
        self._queued = self._computed = 0
        self.messages: dict[str, deque[tuple[Step, int]]] = {
            name: deque() for name in groups.values()
        }
        self.arrived: set[Message] = set()

    @property
    def has_ended(self) -> bool:
        return not (self._steps or self._computing or any(self.messages.values()))

    def go_on(self) -> None:
        while self._steps:
            step = self._steps[0]
            group = self.messages[self._groups[step.is_forward]]
            if step.act == "compute":
                taken = (
                    step.is_forward,
                    step.chunk - 1 if step.is_forward else step.chunk + 1,
                    step.micro_batch,
                )
                self._computing.append(taken if taken in self._awaited else None)
                self._queued += 1
            elif self._host_waits and group:
                break
            else:
                group.append((step, self._queued))
            self._steps.popleft()
        while self._computing and (
            self._computing[0] is None or self._computing[0] in self.arrived
        ):
            self._computing.popleft()
            self._computed += 1

    def next_of(self, group: str) -> Step | None:
        """Return the message that has begun."""
        if not self.messages[group] or self.messages[group][0][1] > self._computed:
            return None
        return self.messages[group][0][0]


def _message(step: Step) -> Message:
    return (step.is_forward, step.chunk, step.micro_batch)


def ends(
    lists: list[list[Step]], groups: dict[bool, str], *, host_waits: bool = False
) -> bool:
    """Whether all stages come to the end of their lists.

    Args:
        groups: of activations (True) and of their gradients.
        host_waits: whether hosts wait in each message until those before it in its
            group are over.
    """
    devices = [_Device(steps, groups, host_waits=host_waits) for steps in lists]
    while True:
        for device in devices:
            device.go_on()
        is_over = True
        for stage, device in enumerate(devices):
            for group in set(groups.values()):
                sent = device.next_of(group)
                if sent is None or sent.act != "send":
                    continue
                peer = devices[sent.peer]
                if peer.next_of(group) == Step("receive", *_message(sent), stage):
                    device.messages[group].popleft()
                    peer.messages[group].popleft()
                    peer.arrived.add(_message(sent))
                    is_over = False
        if is_over:
            return all(device.has_ended for device in devices)


GROUPS = {True: "activations", False: "gradients"}
PLAYED = [
    (schedule, stages, micro_batches)
    for schedule in ("1f1b", "gpipe", "interleaved:2", "interleaved:3")
    for stages in (2, 3, 4, 8)
    for micro_batches in (
        stages,
        2 * stages,
        4 * stages,
        *(() if ":" in schedule else (1, 3, stages + 1)),
    )
]


@pytest.mark.parametrize("host_waits", [False, True])
def test_nobody_waits_in_a_circle(host_waits: bool) -> None:
    """Played as NCCL does it: one message of a group at a time, none before its peer
    has come to it."""
    for schedule, stages, micro_batches in PLAYED:
        chunks = stages * chunks_of(schedule)
        evaluation = [forward_only(stages, stage, chunks) for stage in range(stages)]
        for orders in (orders_of(schedule, stages, micro_batches), evaluation):
            lists = with_messages(orders, chunks)
            assert ends(lists, GROUPS, host_waits=host_waits), (
                schedule,
                stages,
                micro_batches,
            )


def test_receives_are_begun_ahead_which_one_group_could_not_carry() -> None:
    lists = with_messages(orders_of("1f1b", 4, 8), 4)
    assert not ends(lists, dict.fromkeys(GROUPS, "all"))
    # Activations and gradients; of 8 each, those of the steady part.
    assert [hidden(steps) for steps in lists] == [(0, 5), (5, 6), (6, 7), (7, 0)]


def hidden(steps: list[Step]) -> tuple[int, int]:
    """Receives of activations and of gradients that are begun before a computation that
    does not take them."""
    found: list[bool] = []
    for place, step in enumerate(steps):
        if step.act == "receive":
            taking = (
                step.is_forward,
                step.chunk + 1 if step.is_forward else step.chunk - 1,
                step.micro_batch,
            )
            following = next(each for each in steps[place:] if each.act == "compute")
            found += [step.is_forward] * (_message(following) != taking)
    return found.count(True), found.count(False)


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
            block: Any = parallel.module.get_submodule(
                stages.chain.blocks[stages.blocks(chunk).start]
            )
            block.input_layernorm.register_forward_hook(
                lambda *given: _Kept.apply(given[2])
            )
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
        assert found == [most_waiting(order) for order in orders], [
            chunks_of(schedule) for schedule in SCHEDULES
        ]

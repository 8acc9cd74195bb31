"""In which order a stage takes its micro-batches forward and backward, and what it sends and receives meanwhile.

GPipe (arXiv 1811.06965): all forwards, then all backwards. 1F1B (PipeDream-Flush, arXiv 2006.09503): each stage goes
ahead by as many forwards as there are stages behind it, and then takes one backward for each forward, so that it holds
activations of no more micro-batches than that. Interleaved 1F1B (Megatron-LM, arXiv 2104.04473, section 2.2): a stage
holds several chunks of blocks, every (number of stages)-th, and begins the next chunk after as many micro-batches as
there are stages. With p stages of v chunks and m micro-batches (p - 1) / (m v + p - 1) of the time is idle.

All add gradients up in the order of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from smp_core.pipeline.messages import Messages, Pending
from smp_core.pipeline.times import StageTimes

Forward = Callable[[int, int, torch.Tensor | None], torch.Tensor]
"""(chunk, micro-batch, activation of the chunk before) -> this chunk's; of the last chunk the loss."""


Within = Callable[[int], AbstractContextManager[None]]
"""micro-batch -> what its forward and backward computations run in."""


@dataclass(frozen=True)
class Step:
    """One thing that a stage does with a micro-batch: compute a chunk, or send or receive its activation or gradient.

    Attributes:
        chunk: that is computed, or that gave the activation, or whose input's gradient it is.
        peer: the stage to which it goes or from which it comes; -1 of computations.
    """

    act: Literal["compute", "send", "receive"]
    is_forward: bool
    chunk: int
    micro_batch: int
    peer: int = -1


def chunks_of(schedule: str) -> int:
    """Return how many chunks each stage holds under a schedule."""
    return int(schedule.partition(":")[2]) if schedule.startswith("interleaved") else 1


def computations(schedule: str, stages: int, stage: int, micro_batches: int) -> list[Step]:
    """Return the computations of one stage, in order."""
    per_stage = chunks_of(schedule)
    forwards, backwards = [], []
    for number in range(micro_batches * per_stage):
        round_, within = divmod(number, stages * per_stage)
        turn, place = divmod(within, stages)
        # Without chunks a round is as good as any other order: micro-batch after micro-batch.
        micro_batch = round_ * stages + place if per_stage > 1 else number
        turn = turn if per_stage > 1 else 0
        forwards.append(Step("compute", True, turn * stages + stage, micro_batch))
        backwards.append(Step("compute", False, (per_stage - 1 - turn) * stages + stage, micro_batch))
    ahead = stages - stage - 1
    if per_stage > 1:
        ahead = 2 * ahead + (per_stage - 1) * stages
    if schedule == "gpipe":
        ahead = len(forwards)
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead :]


def forward_only(stages: int, stage: int, chunks: int) -> list[Step]:
    """Return the computations of one stage for one batch that goes forward."""
    return [Step("compute", True, chunk, 0) for chunk in range(stage, chunks, stages)]


def with_messages(orders: list[list[Step]], chunks: int) -> list[list[Step]]:
    """Complete the computations of all stages by their messages.

    The stages are played together. A message enters both lists when its content is there, so that all lists keep to one
    order of the whole pipeline: no two stages wait for each other, also where each has to wait for its sends.
    """
    stages = len(orders)
    lists: list[list[Step]] = [[] for _ in orders]
    left = [list(reversed(order)) for order in orders]
    there: set[tuple[bool, int, int]] = set()
    while any(left):
        # What is ready at the same time, before any of it sends.
        ready = [stage for stage, steps in enumerate(left) if steps and _is_ready(steps[-1], there, chunks)]
        assert ready, "a schedule whose computations wait for each other"
        done = []
        for stage in ready:
            step = left[stage].pop()
            lists[stage].append(step)
            done.append((stage, step))
        for stage, step in done:
            there.add((step.is_forward, step.chunk, step.micro_batch))
            further = step.chunk + 1 if step.is_forward else step.chunk - 1
            if 0 <= further < chunks:
                peer = further % stages
                lists[stage].append(Step("send", step.is_forward, step.chunk, step.micro_batch, peer))
                lists[peer].append(Step("receive", step.is_forward, step.chunk, step.micro_batch, stage))
    return lists


def _is_ready(step: Step, there: set[tuple[bool, int, int]], chunks: int) -> bool:
    if step.is_forward:
        return step.chunk == 0 or (True, step.chunk - 1, step.micro_batch) in there
    own = (True, step.chunk, step.micro_batch) in there
    return own and (step.chunk == chunks - 1 or (False, step.chunk + 1, step.micro_batch) in there)


def run(
    steps: list[Step], forward: Forward, messages: Messages, times: StageTimes, within: Within = lambda _: nullcontext()
) -> None:
    """Take a step's micro-batches through one stage.

    Args:
        steps: this stage's, of :func:`with_messages`.
        forward: of one chunk and micro-batch.
        times: told of every computation.
        within: entered around a micro-batch's computations.
    """
    arriving: dict[tuple[bool, int, int], Pending] = {}  # by what gave it
    taken: dict[tuple[int, int], torch.Tensor | None] = {}
    given: dict[tuple[int, int], torch.Tensor] = {}
    gradients: dict[tuple[int, int], torch.Tensor | None] = {}
    for step in steps:
        place = (step.chunk, step.micro_batch)
        if step.act == "receive":
            if step.is_forward:
                arriving[(True, *place)] = messages.receive_activation(step.chunk, step.peer)
            else:
                # No name of its own for the activation here: it would keep a graph beyond its backward pass.
                arriving[(False, *place)] = messages.receive_gradient(
                    given[step.chunk - 1, step.micro_batch], step.peer
                )
        elif step.act == "send":
            if step.is_forward:
                messages.send_activation(step.chunk, given[place], step.peer)
            else:
                messages.send_gradient(gradients.pop(place), step.peer)
        elif step.is_forward:
            arrived = arriving.pop((True, step.chunk - 1, step.micro_batch), None)
            taken[place] = None if arrived is None else arrived.wait()
            with times.computing("forward", *place), within(step.micro_batch):
                given[place] = forward(step.chunk, step.micro_batch, taken[place])
        else:
            arrived = arriving.pop((False, step.chunk + 1, step.micro_batch), None)
            gradient = None if arrived is None else arrived.wait()
            with times.computing("backward", *place), within(step.micro_batch):
                gradients[place] = backward(taken.pop(place), given.pop(place), gradient)
    messages.finish()


def backward(taken: torch.Tensor | None, given: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Take one micro-batch backward through a chunk, if anything in it or before it is trained.

    Args:
        taken: the activation it began with; None on the first stage.
        given: what its forward ended with.
        gradient: of that; None for the loss.

    Returns:
        the gradient of ``taken``; None if none is wanted.
    """
    if not given.requires_grad:
        return None
    torch.autograd.backward(given, gradient)
    if taken is None or not taken.requires_grad:
        return None
    return torch.zeros_like(taken) if taken.grad is None else taken.grad

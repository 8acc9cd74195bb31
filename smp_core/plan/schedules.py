"""In which order a stage takes its micro-batches forward and backward, and what it
sends and receives meanwhile, as lists: :mod:`smp_core.pipeline.schedule` runs them, and
a planner plays them.

GPipe (arXiv 1811.06965): all forwards, then all backwards. 1F1B (PipeDream-Flush, arXiv
2006.09503): each stage goes ahead by as many forwards as there are stages behind it,
and then takes one backward for each forward, so that it holds activations of no more
micro-batches than that. Interleaved 1F1B (Megatron-LM, arXiv 2104.04473, section 2.2):
a stage holds several chunks of blocks, every (number of stages)-th, and begins the next
chunk after as many micro-batches as there are stages. With p stages of v chunks and m
micro-batches (p - 1) / (m v + p - 1) of the time is idle.

All add gradients up in the order of micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal


@dataclass(frozen=True)
class Step:
    """One thing that a stage does with a micro-batch: compute a chunk, or send or
    receive its activation or gradient.

    Attributes:
        chunk: that is computed, or that gave the activation, or whose input's gradient
            it is.
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


def computations(
    schedule: str, stages: int, stage: int, micro_batches: int
) -> list[Step]:
    """Return the computations of one stage, in order."""
    # Backward takes chunks in the reverse order, micro-batches in the same one.
    per_stage = chunks_of(schedule)
    forwards, backwards = [], []
    for number in range(micro_batches * per_stage):
        round_, within = divmod(number, stages * per_stage)
        turn, place = divmod(within, stages)
        # Without chunks a round is as good as any other order: micro-batch after
        # micro-batch.
        micro_batch = round_ * stages + place if per_stage > 1 else number
        turn = turn if per_stage > 1 else 0
        forwards.append(Step("compute", True, turn * stages + stage, micro_batch))
        backwards.append(
            Step("compute", False, (per_stage - 1 - turn) * stages + stage, micro_batch)
        )
    # Forwards before the first backward: one for each stage behind this one.
    ahead = stages - stage - 1
    if per_stage > 1:
        ahead = 2 * ahead + (per_stage - 1) * stages
    if schedule == "gpipe":
        ahead = len(forwards)
    ahead = min(ahead, len(forwards))
    # Then one backward for each forward, and the rest of the backwards.
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead :]


@lru_cache(maxsize=4096)
def blocks_kept(
    schedule: str, stages: int, stage: int, micro_batches: int, sizes: tuple[int, ...]
) -> int:
    """Return the most blocks of a stage whose activations wait for backward at one
    time, those of several micro-batches counted one by one.

    Args:
        sizes: blocks of each of the stage's chunks.
    """
    if schedule != "gpipe":
        # By then it has as many as it ever will.
        micro_batches = min(micro_batches, 3 * stages)
    kept = most = 0
    for step in computations(schedule, stages, stage, micro_batches):
        blocks = sizes[step.chunk // stages]
        kept += blocks if step.is_forward else -blocks
        most = max(most, kept)
    return most


def forward_only(stages: int, stage: int, chunks: int) -> list[Step]:
    """Return the computations of one stage for one batch that goes forward."""
    return [Step("compute", True, chunk, 0) for chunk in range(stage, chunks, stages)]


def with_messages(orders: list[list[Step]], chunks: int) -> list[list[Step]]:
    """Complete the computations of all stages by their messages.

    The stages are played together. A message enters both lists when its content is
    there, so that all lists keep to one order of the whole pipeline: no two stages wait
    for each other, also where each has to wait for its sends. Then receives are begun a
    computation earlier where that goes the other way (:func:`_begun_ahead`).
    """
    # Played in rounds: stages that are ready compute, and messages follow.
    stages = len(orders)
    lists: list[list[Step]] = [[] for _ in orders]
    left = [list(reversed(order)) for order in orders]
    there: set[tuple[bool, int, int]] = set()
    while any(left):
        # What is ready at the same time, before any of it sends.
        ready = [
            stage
            for stage, steps in enumerate(left)
            if steps and _is_ready(steps[-1], there, chunks)
        ]
        assert ready, "a schedule whose computations wait for each other"
        done = []
        for stage in ready:
            step = left[stage].pop()
            lists[stage].append(step)
            done.append((stage, step))
        for stage, step in done:
            there.add((step.is_forward, step.chunk, step.micro_batch))
            # A forward goes to the next chunk, a backward to the one before.
            further = step.chunk + 1 if step.is_forward else step.chunk - 1
            if 0 <= further < chunks:
                peer = further % stages
                lists[stage].append(
                    Step("send", step.is_forward, step.chunk, step.micro_batch, peer)
                )
                lists[peer].append(
                    Step(
                        "receive", step.is_forward, step.chunk, step.micro_batch, stage
                    )
                )
    return [_begun_ahead(steps) for steps in lists]


def _begun_ahead(steps: list[Step]) -> list[Step]:
    """Return a stage's list with receives before the computation that they would
    follow, so that it hides them: a device begins a receive behind what it was given
    before.

    Only before a computation that goes the other way. What is sent behind that one uses
    the other way's group, so activations among themselves, and gradients among
    themselves, stay in the order in which no stages wait in a circle.
    """
    order: list[Step] = []
    computed = 0  # the place of the last computation
    held = {True: False, False: False}  # by its way, whether a message follows it
    for step in steps:
        if step.act == "compute":
            computed, held = len(order), {True: False, False: False}
            order.append(step)
            continue
        if (
            # No earlier message of its way may be passed, or the order would change.
            step.act == "receive"
            and not held[step.is_forward]
            and computed < len(order)
        ):
            if _may_pass(step, order[computed]):
                order.insert(computed, step)
                computed += 1
                continue
        held[step.is_forward] = True
        order.append(step)
    return order


def _may_pass(message: Step, computation: Step) -> bool:
    """Return whether a receive may be begun before a computation."""
    # The same way: what is sent behind the computation uses the same group.
    if message.is_forward == computation.is_forward:
        return False
    if message.is_forward:
        # The first may bring its form with it, for which the host waits.
        return message.micro_batch > 0
    is_gradient_of_it = (message.chunk - 1, message.micro_batch) == (
        computation.chunk,
        computation.micro_batch,
    )
    return not is_gradient_of_it  # which has the form of what is received


def _is_ready(step: Step, there: set[tuple[bool, int, int]], chunks: int) -> bool:
    if step.is_forward:
        return step.chunk == 0 or (True, step.chunk - 1, step.micro_batch) in there
    # Backward needs the chunk's own forward, and the next chunk's gradient.
    own = (True, step.chunk, step.micro_batch) in there
    return own and (
        step.chunk == chunks - 1 or (False, step.chunk + 1, step.micro_batch) in there
    )

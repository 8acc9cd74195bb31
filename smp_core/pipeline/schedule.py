"""A stage's part of a step, run: computations and messages in the order of
:mod:`smp_core.plan.schedules`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from smp_core.pipeline.messages import Activations, Gradients, Messages, Pending
from smp_core.pipeline.times import StageTimes
from smp_core.plan import Step

Forward = Callable[[int, int, Activations | None], Activations]
"""(chunk, micro-batch, activations of the chunk before) -> this chunk's; of the last
chunk the loss."""

Around = Callable[[Step], AbstractContextManager[None]]
"""A computation -> what it runs in."""


def run(
    steps: list[Step],
    forward: Forward,
    messages: Messages,
    times: StageTimes,
    around: Around = lambda _: nullcontext(),
) -> None:
    """Take a step's micro-batches through one stage.

    Args:
        steps: this stage's, of :func:`smp_core.plan.schedules.with_messages`.
        forward: of one chunk and micro-batch.
        times: told of every computation.
        around: entered around every computation.

    Raises:
        Exception: what ``forward`` raised; in the first forward of a new kind on all
            stages.
    """
    arriving: dict[tuple[bool, int, int], Pending | None] = {}  # by what gave it
    taken: dict[tuple[int, int], Activations | None] = {}
    given: dict[tuple[int, int], Activations] = {}
    gradients: dict[tuple[int, int], Gradients] = {}
    # The last chunk sends nothing forward: its output is the loss.
    sending = {step.chunk for step in steps if step.act == "send" and step.is_forward}
    problem: Exception | None = None
    has_failed = False
    for step in steps:
        place = (step.chunk, step.micro_batch)
        # The first micro-batch of a new kind: the stages meet behind it, whether it
        # failed or not.
        is_first = (
            step.micro_batch == 0
            and step.is_forward
            and step.act != "receive"
            and messages.is_new(step.chunk)
        )
        if step.act == "receive":
            if step.is_forward and has_failed:
                continue  # nothing else will come
            if step.is_forward:
                arriving[(True, *place)] = messages.receive_activations(
                    step.chunk, step.peer
                )
            else:
                # No name of its own for the activations here: it would keep a graph
                # beyond its backward pass.
                arriving[(False, *place)] = messages.receive_gradients(
                    given[step.chunk - 1, step.micro_batch], step.peer
                )
        elif step.act == "send":
            # The forward has failed; the next stage gets a failure in the place of a
            # shape.
            if step.is_forward and place not in given:
                messages.send_failure(step.peer)
            elif step.is_forward:
                messages.send_activations(step.chunk, given[place], step.peer)
            else:
                messages.send_gradients(gradients.pop(place), step.peer)
        elif step.is_forward:
            source = (True, step.chunk - 1, step.micro_batch)
            # None for a receive means that the chunk before has failed on its stage.
            has_failed = source in arriving and arriving[source] is None
            arrived = arriving.pop(source, None)
            taken[place] = None if arrived is None else arrived.wait()
            # A failed first forward is kept until all stages meet; any later failure
            # ends this rank.
            try:
                if not has_failed:
                    with times.computing("forward", *place), around(step):
                        given[place] = forward(
                            step.chunk, step.micro_batch, taken[place]
                        )
                    if is_first and step.chunk in sending:
                        messages.require_format(given[place])
            except Exception as error:
                if not is_first:
                    raise
                problem, has_failed = error, True
                given.pop(place, None)
        else:
            # Gradients of what this chunk gave; None where it gave the loss.
            arrived = arriving.pop((False, step.chunk + 1, step.micro_batch), None)
            wanted = None if arrived is None else arrived.wait()
            with times.computing("backward", *place), around(step):
                gradients[place] = backward(
                    taken.pop(place) or (), given.pop(place), wanted
                )
        if is_first and (step.act == "send" or step.chunk not in sending):
            messages.agree(step.chunk, problem)
    messages.finish()


def backward(
    taken: Activations, given: Activations, gradients: Gradients | None
) -> Gradients:
    """Take one micro-batch backward through a chunk, if anything in it or before it is
    trained.

    Args:
        taken: the activations it began with; none on the first stage.
        given: what its forward ended with.
        gradients: of that; None for the loss.

    Returns:
        the gradients of ``taken``.
    """
    # Activations that want no gradient got none sent.
    trained = [number for number, tensor in enumerate(given) if tensor.requires_grad]
    if trained:
        arrived = (
            None if gradients is None else [gradients[number] for number in trained]
        )
        torch.autograd.backward([given[number] for number in trained], arrived)
    return tuple(map(_gradient, taken))


def _gradient(of: Tensor) -> Tensor | None:
    if not of.requires_grad:
        return None
    # A stage that did not use what it took still sends a gradient, which is awaited.
    return torch.zeros_like(of) if of.grad is None else of.grad

"""In which order a stage takes its micro-batches forward and backward.

GPipe (arXiv 1811.06965): all forwards, then all backwards. 1F1B (PipeDream-Flush, arXiv 2006.09503): each stage goes
ahead by as many forwards as there are stages behind it, and then takes one backward for each forward, so that it holds
activations of no more micro-batches than that. Both leave (stages - 1) / (micro-batches + stages - 1) of the time idle,
and add gradients up in the order of micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

import torch

from smp_core.pipeline.messages import Messages

Kind = Literal["1f1b", "gpipe"]
Forward = Callable[[int, torch.Tensor | None], torch.Tensor]
"""(micro-batch, activation of the stage before) -> this stage's; on the last stage the loss."""


def run(kind: Kind, stages: int, stage: int, micro_batches: int, forward: Forward, messages: Messages) -> None:
    """Take all micro-batches of a step through one stage, forward and backward.

    Args:
        forward: of one micro-batch.
    """
    ahead = micro_batches if kind == "gpipe" else min(stages - stage - 1, micro_batches)
    waiting: deque[tuple[torch.Tensor | None, torch.Tensor]] = deque()

    # Phase 1: forwards only.
    for number in range(ahead):
        taken, _ = messages.exchange(next_activation=True)
        waiting.append((taken, forward(number, taken)))
        messages.exchange(activation=waiting[-1][1])

    # Phase 2: one forward, one backward.
    taken = messages.exchange(next_activation=True)[0] if ahead < micro_batches else None
    for number in range(ahead, micro_batches):
        waiting.append((taken, forward(number, taken)))
        _, gradient = messages.exchange(activation=waiting[-1][1], gradient_of=waiting[0][1])
        to_send = backward(*waiting.popleft(), gradient)
        taken, _ = messages.exchange(gradient=to_send, next_activation=number + 1 < micro_batches)

    # Phase 3: backwards only.
    while waiting:
        _, gradient = messages.exchange(gradient_of=waiting[0][1])
        messages.exchange(gradient=backward(*waiting.popleft(), gradient))
    messages.finish()


def backward(taken: torch.Tensor | None, given: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Take one micro-batch backward through a stage, if anything in it or before it is trained.

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


def run_forward(forward: Forward, messages: Messages) -> None:
    """Take one batch forward through one stage."""
    taken, _ = messages.exchange(next_activation=True)
    messages.exchange(activation=forward(0, taken))
    messages.finish()

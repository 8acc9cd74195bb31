"""Parameters that the first and the last stage both hold (tied embeddings): equal at the start, their gradients added
up whenever a window closes, so that both optimizers take the same step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


class TiedGradients:
    """Gradients of tied parameters on one of their two stages.

    Args:
        parameters: sharded alike on both stages, in one order.
        group: the two ranks that hold the same shards.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._parameters, self._group = list(parameters), group

    @contextlib.contextmanager
    def added_up(self) -> Iterator[None]:
        """Add up over the stages the gradients that parameters receive inside; what was in ``.grad`` before stays as it
        is."""
        before = {parameter: parameter.grad for parameter in self._parameters}
        for parameter in self._parameters:
            parameter.grad = None
        yield
        for parameter in self._parameters:
            if parameter.requires_grad:
                self._add_up(parameter)
            earlier = before[parameter]
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad

    @torch.no_grad()
    def _add_up(self, parameter: nn.Parameter) -> None:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        own = parameter.grad
        sent = torch.zeros(local.numel() + 1, dtype=local.dtype, device=local.device)
        if own is not None:
            sent[:-1] = (own.to_local() if isinstance(own, DTensor) else own).reshape(-1)
            sent[-1] = 1.0
        dist.all_reduce(sent, group=self._group)
        if not bool(sent[-1] > 0):  # neither stage has one
            return
        if own is None:
            own = parameter.grad = torch.zeros_like(parameter)
        (own.to_local() if isinstance(own, DTensor) else own).copy_(sent[:-1].view_as(local))

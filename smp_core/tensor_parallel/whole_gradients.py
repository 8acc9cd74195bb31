"""Gradients of parameters that every tensor rank holds whole, where sums travel in codes.

A block of codes shares one scale, and blocks hold elements of several parameters: what is rounded off a norm's gradient
depends on the split weights beside it, which differ between tensor ranks. The norms would drift apart. So the sums of
the first tensor rank are everyone's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.distributed.tensor import DTensor

from smp_core.tensor_parallel.operators import TensorAxis


class WholeGradients:
    """Gradients of parameters that are whole on every rank of a tensor axis.

    Args:
        device: where collectives run.
        stepped: what an optimizer steps in the place of these parameters: themselves, or masters.
    """

    def __init__(self, axis: TensorAxis, device: torch.device, stepped: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._axis, self._device, self._stepped = axis, device, stepped

    @torch.no_grad()
    def take_the_first_ranks(self) -> None:
        """Let every rank have those of the first. Collective over the axis; all ranks have gradients of the same."""
        gradients = [tensor.grad for tensor in self._stepped() if tensor.grad is not None]
        locals_ = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
        if not locals_:
            return
        flat = torch.cat([each.reshape(-1) for each in locals_]).to(self._device)
        if self._axis.rank != 0:
            flat.zero_()
        total = self._axis.all_reduce(flat)
        for each, of_first in zip(locals_, total.split([each.numel() for each in locals_]), strict=True):
            each.copy_(of_first.view_as(each))

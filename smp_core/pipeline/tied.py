"""Parameters that the first and the last stage both hold (tied embeddings): equal at
the start, their gradients added up whenever a window closes, so that both optimizers
take the same step.

With ``optimizer_shard="world"`` the ranks hold gradients of masters, of parts that are
cut in other places on the two stages. Each brings its part among zeros; what is added
up over stages and replicas is the sum of both, and each rank takes its part of that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_core.torch_facts import local_part


class Masters(Protocol):
    """The interface of what an optimizer steps in the place of parameters."""

    def stepped(self, parameters: Iterable[Tensor]) -> list[Tensor]: ...
    def own_slice(self, parameter: Tensor) -> slice: ...


class TiedGradients:
    """Gradients of tied parameters on one of their two stages.

    Args:
        parameters: sharded alike on both stages, in one order.
        group: the two ranks that hold the same shards.
        replicas: the ranks of this stage that hold the same shards.
        world: masters of this rank's part, where there are any by now.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup,
        world: Callable[[], Masters | None],
    ) -> None:
        self._parameters = list(parameters)
        self._group = group
        self._replicas = replicas
        self._world = world

    @contextlib.contextmanager
    def added_up(self) -> Iterator[None]:
        """Add up over the stages the gradients that parameters, or their masters,
        receive inside; what was in ``.grad`` before stays as it is."""
        # With masters, what optimizers step are these, which hold other elements on
        # each stage.
        world = self._world()
        stepped = self._parameters if world is None else world.stepped(self._parameters)
        before = [each.grad for each in stepped]
        for each in stepped:
            each.grad = None
        try:
            yield
        except BaseException:
            # Nothing is added up, and what was there before is not lost.
            for each, earlier in zip(stepped, before, strict=True):
                each.grad = earlier
            raise
        # Added up and put in place, then what was there before is added again.
        for parameter, each, earlier in zip(
            self._parameters, stepped, before, strict=True
        ):
            if parameter.requires_grad:
                own = (
                    slice(None)
                    if each is parameter or world is None
                    else world.own_slice(parameter)
                )
                self._add_up(parameter, each, own)
            if earlier is not None:
                each.grad = earlier if each.grad is None else earlier + each.grad

    @torch.no_grad()
    def _add_up(self, parameter: nn.Parameter, stepped: Tensor, own: slice) -> None:
        """Add up one parameter's gradient.

        Args:
            stepped: the parameter or its master.
            own: where that lies in the elements of the parameter's shard.
        """
        # One place more counts the stages that have a gradient.
        is_master = stepped is not parameter
        dtype = stepped.grad_dtype or stepped.dtype
        shard = local_part(parameter)
        sent = torch.zeros(shard.numel() + 1, dtype=dtype, device=shard.device)
        if stepped.grad is not None:
            sent[:-1][own] = local_part(stepped.grad).reshape(-1)
            sent[-1] = 1.0
        dist.all_reduce(sent, group=self._group)
        # The other stage's parts of these elements may have come to other replicas.
        if is_master:
            dist.all_reduce(sent, group=self._replicas)
        # This stage received none: whether the other one did shows in the sum.
        if stepped.grad is None:
            # Only a rank without a gradient asks, as the question waits for the device.
            if not is_received(sent[-1]):
                return
            stepped.grad = torch.zeros_like(stepped, dtype=dtype)
        local = local_part(stepped.grad)
        local.copy_(sent[:-1][own].view_as(local))


def is_received(stages: Tensor) -> bool:
    """Return whether any stage has a gradient, by how many have."""
    return bool(stages > 0)

"""FSDP2 of torch 2.13 and 2.14: unsharded gradients that wait for a later pass lie
beside the unsharded parameter, in a dtype of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from smp_core.sharding.fsdp.param_group import GivenPolicy, ParamGroup


class ParamGroup213(ParamGroup):
    """The parameter group of torch 2.13 and 2.14."""

    def reduction_order(self) -> list[int]:
        return list(range(len(self.members)))  # grad_dtype is not looked at

    def see_dtypes(self, indices: Iterable[int]) -> None:
        # This generation passes over frozen parameters, so they pose as trainable for
        # the look.
        frozen = [
            shard
            for index in indices
            if not (shard := self.parameters()[index]).requires_grad
        ]
        for shard in frozen:
            shard.requires_grad_(True)
        self._group._init_mp_dtypes()
        for shard in frozen:
            shard.requires_grad_(False)

    def policy(self) -> GivenPolicy:
        return self._policy(self._group.mp_policy)

    def sum_dtype(self, index: int) -> torch.dtype:
        policy = self.policy()
        return (
            policy.reduce_dtype or policy.param_dtype or self.parameters()[index].dtype
        )

    def take_gradients_as_they_come(self) -> None:
        """Do nothing: they come like this."""

    def let_go_of_sum(self) -> None:
        """Do nothing: it is not held."""

    def hand_over(self, index: int, gradient: torch.Tensor) -> None:
        self.members[index].unsharded_accumulated_grad = gradient

    def forget_gradients(self) -> None:
        super().forget_gradients()
        for member in self.members:
            member.unsharded_accumulated_grad = None


def queue_callback(callback: Callable[[], None]) -> None:
    """Do what ``torch.autograd.graph.queue_callback`` of torch >= 2.15 does."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]

"""Capacity: the most tokens of a micro-batch that an expert takes in training, chosen
as one process would choose.

Of the T tokens of all ranks, with K experts each, an expert of E takes ``factor * T * K
/ E``: those in which it has the largest weights, with all that are as large as the last
of these. For other tokens it is left out, as if its weight were 0.

All ranks find the weight of the last token that is taken, digit by digit: how many
weights have each digit, [E, 256] numbers, is added up over ranks for every eight bits
of a float32, from the first ones on. So no weights are gathered, nothing waits for the
device, and ranks may hold different numbers of tokens. Shape letters as in dispatch.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from smp_core.expert_parallel.losses import Sums
from smp_core.plan import DROPPED, Plan, keep_outputs_of
from smp_core.torch_facts import is_absent

_SHIFTS, _DIGITS = (24, 16, 8, 0), 256
_numbers = itertools.count()
_by_number: WeakValueDictionary[int, Capacity] = WeakValueDictionary()


class Capacity:
    """The capacity of a model's experts.

    Args:
        factor: of an even share, > 0.
        sums: over the ranks that hold different tokens.
    """

    def __init__(self, factor: float, sums: Sums) -> None:
        self.factor, self.sums = factor, sums
        self._number = next(_numbers)
        _by_number[self._number] = self

    def limit(self, model: nn.Module, plan: Plan, device: torch.device) -> None:
        """Let all experts of a model take no more, in training."""
        for site in plan.shapes.experts:
            experts: Any = model.get_submodule(site.name)
            if any(map(is_absent, experts.parameters())):
                continue  # on another pipeline stage
            setattr(experts, DROPPED, torch.zeros(2, dtype=torch.int64, device=device))
            # Rows that are left out do not travel: they are for an expert that there is
            # not.
            nowhere = None if plan.knobs.expert_parallel_degree == 1 else site.experts
            signature = inspect.signature(
                functools.partial(type(experts).forward, experts)
            )
            drop = functools.partial(
                _leave_out, self._number, signature, site.experts, nowhere
            )
            experts.register_forward_pre_hook(drop, with_kwargs=True)


@torch.compiler.disable
def _leave_out(
    number: int,
    signature: inspect.Signature,
    n_experts: int,
    nowhere: int | None,
    experts: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Give the experts' forward weights of 0 where an expert is full, and an expert
    ``nowhere`` if that is not None."""
    # Evaluation and generation take all tokens.
    if not (experts.training and torch.is_grad_enabled()):
        return None
    hidden, chosen, weights = signature.bind(*args, **kwargs).arguments.values()
    # Decided for all ranks' tokens together, without a gradient.
    taken = torch.ops.smp.taken_choices(weights.detach(), chosen, n_experts, number)
    left_out = taken.logical_not()
    getattr(experts, DROPPED).add_(
        torch.stack([left_out.sum(), chosen.new_full((), chosen.numel())])
    )
    # A weight of 0 takes the expert out of the token's sum.
    weights = weights.masked_fill(left_out, 0)
    chosen = chosen if nowhere is None else chosen.masked_fill(left_out, nowhere)
    return (hidden, chosen, weights), {}


@torch.library.custom_op("smp::taken_choices", mutates_args=())
def _taken_choices(
    weights: torch.Tensor, chosen: torch.Tensor, n_experts: int, number: int
) -> torch.Tensor:
    """Return which choices of this rank's tokens experts take, of all ranks' together:
    bool, [T, K]."""
    capacity = _by_number[number]
    # Weights are compared as float32, whose bits are ordered as they are.
    key_R = weights.abs().float().contiguous().view(torch.int32).reshape(-1)
    expert_R = chosen.reshape(-1)
    # The first digits of the last weight that an expert takes.
    last_E = key_R.new_zeros(n_experts)
    free_E = key_R.new_zeros(n_experts, dtype=torch.int64)
    for shift in _SHIFTS:
        # How many weights with these first digits go on with each digit.
        is_tied_R = (key_R >> shift >> 8) == last_E[expert_R]
        place_R = expert_R * _DIGITS + (key_R >> shift) % _DIGITS
        counts = free_E.new_zeros(n_experts * _DIGITS).scatter_add_(
            0, place_R, is_tied_R.long()
        )
        capacity.sums(counts)
        # How many an expert may take follows from all choices, which the first sums
        # tell.
        if shift == _SHIFTS[0]:
            free_E = (
                (counts.sum() * capacity.factor / n_experts)
                .ceil()
                .long()
                .expand(n_experts)
            )
        # The next digit is the largest with which there are enough of them.
        from_digit = counts.view(n_experts, _DIGITS).flip(1).cumsum(1).flip(1)
        digit_E = ((from_digit >= free_E[:, None]).sum(1) - 1).clamp(min=0)
        larger_E = (
            torch.nn.functional.pad(from_digit, (0, 1))
            .gather(1, digit_E[:, None] + 1)
            .squeeze(1)
        )
        # Those with a larger digit are taken; the rest of the places is for those with
        # this one.
        free_E = free_E - larger_E
        last_E = last_E * _DIGITS + digit_E.int()
    return (key_R >= last_E[expert_R]).view(chosen.shape)


@_taken_choices.register_fake
def _(
    weights: torch.Tensor, chosen: torch.Tensor, n_experts: int, number: int
) -> torch.Tensor:
    return torch.empty_like(chosen, dtype=torch.bool)


keep_outputs_of(torch.ops.smp.taken_choices, in_all_modes=True)

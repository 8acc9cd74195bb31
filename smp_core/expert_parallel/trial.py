"""A trial of experts of one's own before ranks divide them: does their forward compute
for each expert's rows by themselves what it computes for all of them?

Where experts are divided a rank calls the forward with fewer experts, counted from 0,
and with one expert for each row, whose weight is 1; the sum of a token's experts, each
times its weight, is taken where the token is. Buffers by expert, weights that multiply
inputs or are normalised inside, and terms that belong to no expert would be other
numbers in silence. So a forward runs twice on a few random rows, on one rank.

Shape letters: T tokens, K experts of a token, E experts, H features.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from smp_core.fp8 import unquantized
from smp_core.plan.chain import state_restored
from smp_core.torch_facts import seed_generators

logger = logging.getLogger("smp")

_ROWS = 8
_ROUNDING = 1e3
"""Sums in another order differ by many roundings; what is meant here differs by far
more."""

WithExperts = Callable[[int, int], Any]
"""(first, number) -> a context in which the module has these experts alone."""

_FORM = (
    "its forward has to be the sum of the chosen experts' outputs, each times its weight, and nothing more, for fewer "
    "experts too. Move what else it does (weights that are normalised or multiply inputs, terms of no expert) to the "
    "module around it, make a buffer with a row for each expert a parameter with requires_grad=False, or write "
    "expert_parallel_degree=1"
)


@torch.no_grad()
def try_experts(
    module: Any, name: str, degree: int, with_experts: WithExperts
) -> str | None:
    """Compare the forward of a module that holds all experts with that of its parts;
    say how they differ, or that the forward writes into buffers. Random states, buffers
    and attributes stay as they were."""
    example = next(module.parameters())
    forward = type(module).forward
    local = module.num_experts // degree
    label = f"expert_parallel_degree={degree}: {name} ({type(module).__name__})"
    training = {each: each.training for each in module.modules()}
    devices = [example.device] if example.is_cuda else []
    problem = ""
    with torch.random.fork_rng(devices), state_restored(module), unquantized():
        buffers = {key: each.clone() for key, each in module.named_buffers()}
        seed_generators(0)
        try:
            # Dropout inside would draw other numbers for other rows.
            module.eval()
            for features in _sizes(module):
                hidden, chosen, weights = _drawn(module.num_experts, features, example)
                try:
                    whole = forward(module, hidden, chosen, weights)
                    parts = torch.zeros_like(hidden)
                    for first in range(0, module.num_experts, local):
                        with with_experts(first, local):
                            parts += _part(
                                module, hidden, chosen, weights, first, local
                            )
                except Exception as error:
                    # Another size may be the one of its inputs.
                    said = str(error).splitlines() or [""]
                    problem = problem or f"{type(error).__name__}: {said[0][:200]}"
                    continue
                found = _problem(module, whole, parts, buffers)
                return found and f"{label} {found}"
        finally:
            for each, mode in training.items():
                each.training = mode
    logger.warning(
        "%s could not be tried with a part of its experts (%s); %s",
        label,
        problem,
        _FORM,
    )
    return None


def _part(
    module: Any,
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
    first: int,
    number: int,
) -> Tensor:
    """Return what a rank with these experts adds to each token, as a dispatch does."""
    total = torch.zeros_like(hidden)
    for place in range(chosen.shape[1]):
        expert_T = chosen[:, place] - first
        rows = ((expert_T >= 0) & (expert_T < number)).nonzero().squeeze(1)
        if not len(rows):
            continue
        alone = expert_T[rows][:, None]
        made = type(module).forward(
            module, hidden[rows], alone, weights.new_ones(alone.shape)
        )
        total[rows] += made * weights[rows, place][:, None]
    return total


def _problem(
    module: nn.Module, whole: Tensor, parts: Tensor, buffers: dict[str, Tensor]
) -> str | None:
    for key, buffer in module.named_buffers():
        if key not in buffers or not torch.equal(buffer, buffers[key]):
            return (
                f"writes into its buffer {key}, where each rank would have what other tokens and experts make of it; "
                "write into one of the module around it, or write expert_parallel_degree=1"
            )
    limit = _ROUNDING * torch.finfo(whole.dtype).eps * whole.abs().max()
    if whole.shape != parts.shape or not bool(((whole - parts).abs() <= limit).all()):
        return f"computes something else with a part of its experts: {_FORM}"
    return None


def _sizes(module: nn.Module) -> list[int]:
    """Return the sizes that the features of its inputs may have."""
    sizes = [size for each in module.parameters() for size in each.shape[1:]]
    return list(dict.fromkeys(sizes))


def _drawn(
    experts: int, features: int, example: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return [T, H], [T, K] and [T, K]: each expert is chosen as often."""
    of_each = min(2, experts)
    count = _ROWS * experts
    hidden = torch.randn(count, features, device=example.device).to(example.dtype)
    firsts = torch.arange(count, device=example.device)[:, None]
    chosen = (firsts + torch.arange(of_each, device=example.device)) % experts
    weights = torch.rand(count, of_each, device=example.device) + 0.1
    return hidden, chosen, weights.to(example.dtype)

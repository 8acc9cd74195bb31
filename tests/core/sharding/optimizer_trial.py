"""What an optimizer does to parts of a tensor and to some tensors alone, on small
tensors: how the lists of smp_core.sharding.optimizer.kinds are checked.

A few steps do not show everything: DAdapt, Prodigy, GaLore and Shampoo pass, and begin
to look further later."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smp_core.checkpoint.tree import iterate_tensors
from smp_core.sharding.optimizer.kinds import made_like

# The lengths of the parts are multiples of every processor's vectors, which would round
# what is left over differently.
_WHOLE, _PARTS = (12, 8), (32, 64)
_EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12, "equal_nan": True}
_GRADIENT_SCALES = (1e-4, 1.0, 1e4)


def difference(optimizer: torch.optim.Optimizer) -> str | None:
    """Return what an optimizer does to a tensor and not to its parts; None: nothing was
    found."""
    values = torch.linspace(-1.0, 1.0, 96, dtype=torch.float64).view(_WHOLE)
    for group in optimizer.param_groups:
        for scale in _GRADIENT_SCALES:
            gradients = [scale * gradient for gradient in _gradients(values)]
            whole = _stepped(optimizer, group, values, gradients)
            pieces = [tensor.view(-1).split(_PARTS) for tensor in (values, *gradients)]
            parts = [
                _stepped(optimizer, group, value, each)
                for value, *each in zip(*pieces, strict=True)
            ]
            if any(each is None for each in (whole, *parts)):
                return "keeps states that are not shaped like their parameter"
            if not torch.allclose(whole.view(-1), torch.cat(parts), **_EXACT):
                return "looks across a tensor, or across all its parameters"
    return None


def difference_together(optimizer: torch.optim.Optimizer) -> str | None:
    """Return what an optimizer does to two tensors and not to each of them; None:
    nothing was found."""
    values = torch.linspace(-1.0, 1.0, 96, dtype=torch.float64).view(_WHOLE)
    two = [values, 3.0 * values.flip(0)]
    for group in optimizer.param_groups:
        for scale in _GRADIENT_SCALES:
            gradients = [scale * gradient for gradient in _gradients(values)]
            of_two = [gradients, [7.0 * gradient.flip(1) for gradient in gradients]]
            together = [
                p.detach() for p, _ in _stepped_together(optimizer, group, two, of_two)
            ]
            alone = [
                _stepped_together(optimizer, group, [value], [each])[0][0].detach()
                for value, each in zip(two, of_two, strict=True)
            ]
            if not all(
                torch.allclose(a, b, **_EXACT)
                for a, b in zip(together, alone, strict=True)
            ):
                return "looks across all its parameters"
    return None


def _gradients(values: torch.Tensor) -> list[torch.Tensor]:
    """Make gradients for the trial: falling ones at right angles to the weights, which
    is where some optimizers begin to project, then four of no pattern."""
    waves = torch.sin(torch.arange(4 * values.numel(), dtype=values.dtype)).view(
        4, *values.shape
    )
    across = torch.cos(torch.arange(values.numel(), dtype=values.dtype)).view_as(values)
    across -= (across * values).sum() / (values * values).sum() * values
    return [*(factor * across for factor in (8.0, 2.0, 0.5, 0.1, 0.02)), *waves]


def _stepped(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    values: torch.Tensor,
    gradients: list[torch.Tensor],
) -> Any:
    """Return what becomes of a tensor, alone in an optimizer; None: that keeps states
    of another shape."""
    ((parameter, state),) = _stepped_together(optimizer, group, [values], [gradients])
    states = [tensor for _, tensor in iterate_tensors(state)]
    fits = all(state.ndim == 0 or state.shape == values.shape for state in states)
    return parameter.detach() if fits else None


def _stepped_together(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    values: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
) -> list[tuple[nn.Parameter, dict[str, Any]]]:
    """Return what becomes of tensors in one optimizer, each with its state."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    tried = made_like(optimizer, [(group, parameters)])
    for of_step in zip(*gradients, strict=True):
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        tried.step()
    return [(parameter, dict(tried.state[parameter])) for parameter in parameters]

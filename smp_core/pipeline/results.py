"""What a step of several micro-batches returns: means of what each of them returned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smp_core.checkpoint import map_tensors


def loss_of(result: Any, step: str) -> Tensor:
    """Return the loss of what a step returned: itself, or under "loss".

    Args:
        step: what the user calls it.

    Raises:
        ValueError: neither is a tensor of one element.
    """
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            f"{step} returned {type(result).__name__}; with pipeline_parallel_degree it returns a loss, or a "
            "dict with one under 'loss', for each micro-batch"
        )
    return loss


def mean_of(results: list[Any], step: str) -> Any:
    """Return what a whole batch would have given, detached: means of numbers.

    Raises:
        ValueError: something beside the loss that is no number.
    """
    results = [map_tensors(result, Tensor.detach) for result in results]
    first = results[0]
    if isinstance(first, Tensor):
        return torch.stack(results).mean(0)
    unlike = [key for key, value in first.items() if not is_number(value)]
    if unlike:
        raise ValueError(
            f"{step} returned {unlike[0]!r} beside the loss, which is no number; with pipeline_parallel_degree "
            "only numbers can be averaged over micro-batches"
        )
    means = {}
    for key in first:
        means[key] = _mean([result[key] for result in results])
    return means


def _mean(values: list[Any]) -> Tensor:
    """Return the mean in the values' dtype; of integers and booleans, whose mean may lie
    between two of them, in float64."""
    tensors = [torch.as_tensor(value) for value in values]
    mean = torch.stack(tensors).double().mean(0)
    dtype = tensors[0].dtype
    return mean.to(dtype) if dtype.is_floating_point else mean


def is_number(value: Any) -> bool:
    """Return whether it is a number, or a tensor of one element."""
    return isinstance(value, (int, float)) or (
        isinstance(value, Tensor) and value.numel() == 1
    )

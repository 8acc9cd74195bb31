"""Counts of a forward's arguments, and the figures of a job, for the monitors of
Trainer and of bare loops."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smp_core.engine import ParallelModel
from smp_core.observe import JobFigures

# The arguments of forward that hold one number per token, in the order of preference.
TOKEN_INPUTS = ("input_ids", "decoder_input_ids")


def sizes_of(args: Any, kwargs: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return the samples and the tokens of a forward's arguments; None: not known."""
    # Named inputs first, then the rest in the order of the call.
    token_ids = [
        kwargs[name] for name in TOKEN_INPUTS if isinstance(kwargs.get(name), Tensor)
    ]
    inputs = [
        each
        for each in (*token_ids, *args, *kwargs.values())
        if isinstance(each, Tensor)
    ]
    samples = [each.shape[0] for each in inputs if each.ndim]
    tokens = token_ids[0].numel() if token_ids else None
    return samples[0] if samples else 0, tokens


def _over_ranks(
    values: list[float], operation: str, device: torch.device
) -> list[float]:
    """Return the sums ("sum") or maxima ("max") of all ranks' values. Collective over
    the world."""
    if not dist.is_initialized() or not values:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(
        tensor, op=dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX
    )
    return tensor.tolist()


def figures_of_job(
    handle: ParallelModel | None,
    device: torch.device,
    step: int,
    peak_tflops: float | None,
    flops_per_sample: float | None,
) -> JobFigures:
    """Return the figures of a run behind ``step`` optimizer steps; the rest as of
    :class:`JobFigures`."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return JobFigures(
        handle,
        device=device,
        world_size=world_size,
        data_size=world_size if handle is None else handle.mesh.data_size,
        over_ranks=functools.partial(_over_ranks, device=device),
        peak_tflops=peak_tflops,
        flops_per_sample=flops_per_sample,
        step=step,
    )

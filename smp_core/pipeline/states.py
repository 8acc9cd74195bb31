"""Optimizer states of all stages, for checkpoints that do not depend on stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import like_parameter, map_tensors
from smp_core.cluster import of_all_ranks
from smp_core.plan import Stages


@dataclass(frozen=True)
class _Elsewhere:
    """A sharded tensor of another stage."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def states_of_all_stages(
    named: dict[str, Any],
    model: nn.Module,
    stages: Stages,
    stage: int,
    group: dist.ProcessGroup,
) -> dict[str, Any]:
    """Complete a named optimizer state by those of other stages. Collective over the
    stages.

    Args:
        named: of :func:`smp_core.checkpoint.optimizers.named_optimizer_state`, with
            this stage's states.

    Returns:
        the same with states of all parameters: numbers and unsharded tensors as they
            are; for sharded ones of other
        stages tensors of which this rank has nothing, as of their parameters.
    """
    own = stages.owned(stage)
    # States of unsharded things belong to no stage, and are the same on all.
    held = {
        name: entry
        for name, entry in named["state"].items()
        if name in own or name not in stages.owners
    }
    # Other stages learn names, shapes and dtypes, and values only of numbers and
    # unsharded tensors.
    own_words = {name: map_tensors(entry, _told) for name, entry in held.items()}
    told: list[Any] = of_all_ranks(own_words, group)
    parameters = dict(model.named_parameters())
    complete: dict[str, Any] = {}
    # In the model's order, so that every stage writes the same list.
    for name in [*parameters, *(name for name in held if name not in parameters)]:
        if name in held:
            complete[name] = held[name]
            continue
        entry = next((theirs[name] for theirs in told if name in theirs), None)
        if entry is not None:
            complete[name] = _absent(entry, parameters[name])
    return {**named, "state": complete}


def _told(tensor: torch.Tensor) -> Any:
    return (
        _Elsewhere(tuple(tensor.shape), tensor.dtype)
        if isinstance(tensor, DTensor)
        else tensor.cpu()
    )


def _absent(entry: Any, parameter: nn.Parameter) -> Any:
    if isinstance(entry, _Elsewhere):
        return like_parameter(parameter, entry.shape, entry.dtype, by_rows=True)
    if isinstance(entry, dict):
        return {key: _absent(value, parameter) for key, value in entry.items()}
    if isinstance(entry, (list, tuple)):
        return type(entry)(_absent(value, parameter) for value in entry)
    return entry

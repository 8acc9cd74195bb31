"""Counts over the ranks of a run, in which every batch counts once.

Tensor ranks and pipeline stages hold copies of what a batch gave, context ranks the
parts of its sequences. So sums, metrics and gathered values go over
``SmpMesh.gradient_group``, one rank for each part of a batch: a sum over tokens is one
process's. What context ranks count by sample they count once each; it belongs into
``SmpMesh.data_group``. A number does not show which of the two it is, so equal numbers
of context ranks are reported once.

torchmetrics synchronise over the whole world unless they are given a group. Their
public ``Metric.sync`` is replaced (:mod:`smp_core.sharding.patched`), because metrics
may live anywhere (in lists, callbacks and wrappers of other metrics), and because a
metric that holds a group could no longer be copied. Which of their states are
concatenated says ``_reductions`` alone, a private name.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smp_core.checkpoint import map_tensors
from smp_core.cluster import SmpMesh, mesh_of_run, of_all_ranks

logger = logging.getLogger("smp")

_reported: set[str] = set()


def gather_with_gradient(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Stack the tensors of all ranks of ``group``, which have one shape; gradients are
    added up over them. Collective, in backward too.

    Returns:
        [ranks, *tensor.shape]
    """
    return _Gather.apply(tensor, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        # One row for each rank, filled in place.
        stacked = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
        dist.all_gather(list(stacked), tensor.contiguous(), group=group)
        return stacked

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        # Each rank's part was used on all ranks, so its gradient is the sum of theirs.
        return _SumOwn.apply(gradient, ctx.group), None


class _SumOwn(torch.autograd.Function):
    """The sum over ranks of the row that is this rank's."""

    @staticmethod
    def forward(ctx: Any, stacked: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = stacked.clone(memory_format=torch.contiguous_format)
        # Rows of other ranks are summed for them; each takes its own.
        dist.all_reduce(total, group=group)
        return total[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _Gather.apply(gradient, ctx.group), None


def report_equal_terms(tensor: Tensor, mesh: SmpMesh, what: str, instead: str) -> None:
    """Compare the terms of a sum over ranks, as long as nothing was reported.
    Collective over those that hold different tokens, where ranks share sequences;
    arguments as in :func:`report_equal_parts`."""
    # One report is enough; without context ranks nothing is shared.
    if mesh.context_degree == 1 or what in _reported:
        return
    tensor = tensor.detach().contiguous()
    parts = [torch.empty_like(tensor) for _ in range(mesh.gradient_degree)]
    dist.all_gather(parts, tensor, group=mesh.gradient_group)
    report_equal_parts(parts, mesh, what, instead)


def report_equal_parts(
    parts: Sequence[Tensor], mesh: SmpMesh, what: str, instead: str
) -> None:
    """Warn once where all ranks that share a sequence counted the same number, which
    are added up.

    Args:
        parts: of all ranks that hold different tokens, in order.
        what: is counted.
        instead: what to write where samples are counted.
    """
    context = mesh.context_degree
    if context == 1 or what in _reported:
        return
    # The first rank of each sequence stands for the others.
    firsts = [parts[place - place % context] for place in range(len(parts))]
    equal = all(
        torch.equal(part, first) for part, first in zip(parts, firsts, strict=True)
    )
    # Zeros on all ranks say nothing about what was counted.
    if not equal or not any(part.count_nonzero() for part in parts):
        return
    _reported.add(what)
    if mesh.rank == 0:
        logger.warning(
            "%s: context_parallel_degree=%d ranks that share a sequence counted the same and were added up, which is "
            "right for counts of tokens. Where samples are counted, each would count %d times: %s",
            what,
            context,
            context,
            instead,
        )


def sync_metric(
    before: Callable[..., None],
    metric: Any,
    dist_sync_fn: Any = None,
    process_group: Any = None,
    should_sync: bool = True,
    distributed_available: Any = None,
) -> None:
    """Let a metric count over the ranks of the mesh of the present run; in the place of
    ``torchmetrics.Metric.sync``.

    Of pipeline stages the last one's metrics count, which see what the model returned.
    Ranks without a batch take part.
    """
    mesh = mesh_of_run()
    given = process_group or metric.process_group
    # A group that the user gave is the user's choice.
    if mesh is not None and given is None and should_sync:
        # Ranks without a batch first take the states that the sum needs.
        process_group = mesh.gradient_group
        _take_last_stages_state(metric, mesh)
        _match_states(metric, mesh)
        if dist_sync_fn is None and mesh.context_degree > 1:
            dist_sync_fn = functools.partial(
                _gather_state, mesh=mesh, what=type(metric).__name__
            )
    before(metric, dist_sync_fn, process_group, should_sync, distributed_available)


def _take_last_stages_state(metric: Any, mesh: SmpMesh) -> None:
    if mesh.pipeline_degree == 1:
        return
    # Through the host: metrics may have states of any kind.
    carried = [map_tensors(dict(metric.metric_state), Tensor.cpu)]
    dist.broadcast_object_list(
        carried, group=mesh.column.host, group_src=mesh.pipeline_degree - 1
    )
    for name, value in map_tensors(
        carried[0], lambda tensor: tensor.to(metric.device)
    ).items():
        setattr(metric, name, value)


def _match_states(metric: Any, mesh: SmpMesh) -> None:
    """Give a metric's states the dtypes, and empty ones the shapes, that they have on
    ranks that counted something.

    A rank without a batch has states as they begin, and collectives of other sizes than
    the others'.
    """
    own = {name: _kind_of(value) for name, value in metric.metric_state.items()}
    told = of_all_ranks(own, mesh.gradient_group)
    for name, value in metric.metric_state.items():
        # Ranks that have counted nothing have no say.
        kinds = [kind for kinds in told if (kind := kinds[name]) is not None]
        if not kinds:
            continue
        dtype = functools.reduce(torch.promote_types, [kind[0] for kind in kinds])
        if isinstance(value, Tensor):
            setattr(metric, name, value.to(dtype))
        elif value:
            setattr(metric, name, [each.to(dtype) for each in value])
        # Only lists that are concatenated need an empty part of the right shape.
        elif getattr(metric._reductions[name], "__name__", "") == "dim_zero_cat":
            setattr(
                metric,
                name,
                [torch.empty(0, *kinds[0][1], dtype=dtype, device=metric.device)],
            )


def _kind_of(state: Any) -> tuple[torch.dtype, tuple[int, ...]] | None:
    first = state[0] if isinstance(state, list) and state else state
    return (first.dtype, tuple(first.shape[1:])) if isinstance(first, Tensor) else None


def _gather_state(
    tensor: Tensor, group: Any, *, mesh: SmpMesh, what: str
) -> list[Tensor]:
    gather: Any = sys.modules["torchmetrics"].utilities.distributed.gather_all_tensors
    parts: list[Tensor] = gather(tensor, group)
    instead = "metric.process_group = trainer.strategy.data_group, in on_fit_start (accelerator.data_group)"
    report_equal_parts(parts, mesh, what, instead)
    return parts

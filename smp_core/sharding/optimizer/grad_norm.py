"""Norm and clipping of gradients over every mesh axis, DTensor and plain parameters
together.

The p-th powers of what this rank holds are added up over the axes on which a tensor is
sharded, which its placements say: a DTensor's over the mesh axes on which it is not
repeated, a plain parameter's over none, because every rank holds the whole of it. A
master's gradient (``optimizer_shard="world"``) is a part that no other rank has: its
powers are added up over all ranks whose gradients are added up. What is repeated (on
replicas, on tensor ranks, on all ranks) is counted once, and they all find the same
norm. ``torch._foreach_norm`` and ``torch._foreach_mul_`` are what
``torch.nn.utils.clip_grad_norm_`` uses for one kernel per list instead of one per
gradient; they have no public names. (torch's ``get_total_norm`` would take one
collective for each DTensor, and finds the norm of bfloat16 gradients in bfloat16; its
``clip_grads_with_norm_`` scales DTensors as such, which takes fifteen times as long.)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from smp_core.sharding.operands import take_part_of_gradient
from smp_core.torch_facts import is_rank_0, local_part, model_parameter
from smp_core.watch import here

logger = logging.getLogger("smp")

_DOUBLE = (torch.float64, torch.complex128)

OnNonfinite = Literal["ignore", "skip", "raise"]


class NonfiniteGradNormError(RuntimeError):
    """The gradient norm is inf or nan and ``on_nonfinite_grad_norm="raise"``."""


@torch.no_grad()
def grad_norm(
    parameters: Iterable[torch.Tensor],
    *,
    masters_over: dist.ProcessGroup,
    norm_type: float = 2.0,
    stages: dist.ProcessGroup | None = None,
    counts: Callable[[torch.Tensor], bool] = lambda _: True,
) -> torch.Tensor:
    """Return the norm of all gradients, as one process would find it. Collective over
    the axes that parameters are sharded on.

    Args:
        parameters: the same on all ranks, in one order; those whose ``.grad`` is None
            count nothing.
        masters_over: the ranks that hold the parts of masters.
        norm_type: p of the p-norm, > 0, or ``inf``.
        stages: the ranks that hold other layers of the model; None: there are none.
        counts: whether a parameter counts here; one that several stages hold counts on
            one of them.

    Returns:
        a plain 0-d tensor, float32 (float64 if a gradient is), equal on all ranks that
        share the model.
    """
    if not norm_type > 0:
        raise ValueError(
            f"norm_type={norm_type!r}: allowed are numbers above 0 and math.inf"
        )
    # Phase 1: what is held here, by the groups over which it is sharded. Parameters
    # decide, not their gradients: all ranks have to take part in the same sums.
    held: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    parameters = list(parameters)
    # Maybe all of them are on other stages.
    device = _device_of_sums(parameters[0]) if parameters else None
    for parameter in filter(counts, parameters):
        groups = _sharded_over(parameter, masters_over)
        device = _device_of_sums(parameter) if groups else device
        gradients = held.setdefault(groups, [])
        # A gradient that the user assigned whole becomes this rank's part.
        take_part_of_gradient(parameter)
        if parameter.grad is not None:
            gradients.append(local_part(parameter.grad))
    # Phase 2: the powers, added up.
    biggest = math.isinf(norm_type)
    # In float64: powers of float32 sums would overflow or lose small gradients.
    total = torch.zeros((), dtype=torch.float64, device=device)
    for groups, gradients in held.items():
        part = _reduced(gradients, norm_type, total.device)
        # Parts are added up over one axis after another, and never over an axis on
        # which they are repeated.
        for group in groups:
            part = _over(group, part, biggest)
        total = torch.maximum(total, part) if biggest else total + part
    # Other layers of the model, whose powers are no part of any of these.
    if stages is not None:
        total = _over(stages, total, biggest)
    total = total if biggest else total ** (1.0 / norm_type)
    double = any(
        gradient.dtype in _DOUBLE
        for gradients in held.values()
        for gradient in gradients
    )
    # Gradients of other stages count, which their parameters tell of here.
    if stages is not None:
        double = double or any(
            p.dtype in _DOUBLE for p in parameters if p.requires_grad
        )
    return total if double else total.float()


def _sharded_over(
    parameter: torch.Tensor, masters_over: dist.ProcessGroup
) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups each of whose ranks holds a part of the parameter."""
    # Of a master the model's parameter tells the placements.
    own = model_parameter(parameter)
    is_master = own is not parameter
    if not isinstance(own, DTensor):
        return (masters_over,) if is_master else ()
    placements = enumerate(own.placements)
    # FSDP2's _StridedShard, of what is split over tensor ranks too, says False to
    # is_shard().
    sharded = [axis for axis, placement in placements if not placement.is_replicate()]
    if is_master:
        # The partition group is inside the masters' group, also where it is two axes,
        # because ranks divide experts.
        counted = set(dist.get_process_group_ranks(masters_over))
        others = [own.device_mesh.get_group(axis) for axis in sharded]
        return (
            masters_over,
            *(
                # Other axes, such as that of tensor ranks, are added up besides.
                each
                for each in others
                if not counted.issuperset(dist.get_process_group_ranks(each))
            ),
        )
    return tuple(own.device_mesh.get_group(axis) for axis in sharded)


def _device_of_sums(parameter: torch.Tensor) -> torch.device:
    """Return the device of the group's collectives: offloaded gradients are on the
    host, where its library may not be able to send."""
    own = model_parameter(parameter)
    return (
        torch.device(own.device_mesh.device_type)
        if isinstance(own, DTensor)
        else own.device
    )


def _over(group: dist.ProcessGroup, local: torch.Tensor, biggest: bool) -> torch.Tensor:
    if dist.get_world_size(group) > 1:
        if biggest:
            return _largest_of_all(local, group)
        with here.waiting("the gradient norm"):
            dist.all_reduce(local, group=group)
    return local


def _largest_of_all(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the maximum over ranks, nan if any is: libraries compare, and a nan loses
    or wins by its place in the comparison."""
    # A nan is sent as a flag beside a 0, which no comparison can lose.
    is_nan = local.isnan()
    both = torch.stack([local.masked_fill(is_nan, 0.0), is_nan.to(local.dtype)])
    with here.waiting("the gradient norm"):
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return both[0].masked_fill(both[1] > 0, math.nan)


def _reduced(
    gradients: list[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    """Return the sum of p-th powers (p = inf: the largest magnitude), in float64:
    powers of large gradients overflow float32."""
    # foreach kernels take no empty tensors; of complex ones the magnitude counts.
    gradients = [
        gradient.abs() if gradient.is_complex() else gradient
        for gradient in gradients
        if gradient.numel()
    ]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    dtype = (
        torch.float64
        if any(gradient.dtype == torch.float64 for gradient in gradients)
        else torch.float32
    )
    # One kernel for each list, then one copy to the device of sums.
    norms = (
        torch.stack(torch._foreach_norm(gradients, norm_type, dtype=dtype))
        .double()
        .to(device)
    )
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    *,
    masters_over: dist.ProcessGroup,
    norm_type: float = 2.0,
    on_nonfinite: OnNonfinite = "ignore",
    stages: dist.ProcessGroup | None = None,
    counts: Callable[[torch.Tensor], bool] = lambda _: True,
) -> torch.Tensor:
    """Scale gradients in place so that their norm is at most ``max_norm``, as
    ``torch.nn.utils.clip_grad_norm_`` does.

    Args:
        on_nonfinite: what to do when the norm is inf or nan: ``"ignore"`` (clip as
            torch does), ``"skip"`` (set every gradient to None, so that the optimizer
            step changes nothing) or ``"raise"``.
        stages, counts: as of :func:`grad_norm`.

    Returns:
        the norm before clipping (see :func:`grad_norm`).

    Raises:
        NonfiniteGradNormError: with ``on_nonfinite="raise"``, on all ranks.
    """
    parameters = list(parameters)
    total = grad_norm(
        parameters,
        masters_over=masters_over,
        norm_type=norm_type,
        stages=stages,
        counts=counts,
    )
    if on_nonfinite != "ignore" and settle_nonfinite(parameters, total, on_nonfinite):
        return total
    # torch's own formula, so that one process has the same numbers.
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    local = [
        local_part(parameter.grad)
        for parameter in parameters
        if parameter.grad is not None
    ]
    # One kernel takes tensors of one device and dtype.
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in local:
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), gradients in alike.items():
        torch._foreach_mul_(gradients, scale.to(device=device, dtype=dtype))
    return total


def settle_nonfinite(
    parameters: Iterable[torch.Tensor], total: torch.Tensor, on_nonfinite: OnNonfinite
) -> bool:
    """Apply ``on_nonfinite_grad_norm`` to a norm; ``True`` if the step is skipped: its
    gradients are dropped."""
    # The one place where the host waits for the device: only where the user asked for
    # it.
    if on_nonfinite == "ignore" or math.isfinite(norm := total.item()):
        return False
    if on_nonfinite == "raise":
        raise NonfiniteGradNormError(
            f"the gradient norm is {norm}; on_nonfinite_grad_norm='raise' ends the run here. Lower the "
            "learning rate, look for bad samples, or set on_nonfinite_grad_norm='skip' to skip such steps"
        )
    if is_rank_0():
        logger.warning(
            "the gradient norm is %s: the step is skipped (on_nonfinite_grad_norm='skip')",
            norm,
        )
    for parameter in parameters:
        parameter.grad = None
    return True


@torch.no_grad()
def clip_grad_value_(parameters: Iterable[torch.Tensor], clip_value: float) -> None:
    """Limit every gradient element to [-clip_value, clip_value], DTensor and plain
    alike. Local."""
    for parameter in parameters:
        take_part_of_gradient(parameter)
        if parameter.grad is not None:
            gradient = local_part(parameter.grad)
            gradient.clamp_(-clip_value, clip_value)

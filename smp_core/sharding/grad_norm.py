"""Norm and clipping of gradients over every mesh axis, DTensor and plain parameters together.

A DTensor's shards are spread over the partition group and repeated on every replica; a plain parameter is repeated on
every rank. So the p-th powers of local shards are added up over the partition group, those of plain gradients once.
Replicas hold the same gradients and find the same norm. A master's gradient (``optimizer_shard="world"``) is a part
that no other rank has: its powers are added up over the world. ``torch._foreach_norm`` and ``torch._foreach_mul_`` are
what ``torch.nn.utils.clip_grad_norm_`` uses for one kernel per list instead of one per gradient; they have no public
names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from smp_core.sharding.optimizer import model_parameter

OnNonfinite = Literal["ignore", "skip", "raise"]


class NonfiniteGradNormError(RuntimeError):
    """The gradient norm is inf or nan and ``on_nonfinite_grad_norm="raise"``."""


@torch.no_grad()
def grad_norm(
    parameters: Iterable[torch.Tensor], *, shard_group: dist.ProcessGroup, norm_type: float = 2.0
) -> torch.Tensor:
    """The norm of all gradients, as one process would find it. Collective over the partition group.

    Args:
        parameters: trainable parameters; those whose ``.grad`` is None count nothing.
        shard_group: the partition group over which DTensor gradients are sharded.
        norm_type: p of the p-norm, > 0, or ``inf``.

    Returns:
        a plain 0-d tensor, float32 (float64 if a gradient is), equal on all ranks that share the model.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type!r}: allowed are numbers above 0 and math.inf")
    sharded: list[torch.Tensor] = []
    parts: list[torch.Tensor] = []
    whole: list[torch.Tensor] = []
    over_world = False
    device = sharded_on = None
    for parameter in parameters:
        device = device or parameter.device
        over_world |= model_parameter(parameter) is not parameter
        if parameter.grad is None:
            continue
        if model_parameter(parameter) is not parameter:
            parts.append(parameter.grad)
        elif isinstance(parameter.grad, DTensor):
            sharded.append(parameter.grad.to_local())
            sharded_on = sharded_on or torch.device(parameter.grad.device_mesh.device_type)
        else:
            whole.append(parameter.grad)
    double = any(gradient.dtype == torch.float64 for gradient in [*sharded, *parts, *whole])
    device = device or torch.device("cpu")
    local, once = _reduced(sharded, norm_type, device), _reduced(whole, norm_type, device)
    # Offloaded gradients are on the host, where the group's library may not be able to send.
    mesh_device = sharded_on or device
    local, once = local.to(mesh_device), once.to(mesh_device)
    biggest = math.isinf(norm_type)
    local = _over(shard_group, local, biggest)
    if over_world:
        everyones = _over(cast(dist.ProcessGroup, dist.group.WORLD), _reduced(parts, norm_type, device), biggest)
        once = torch.maximum(once, everyones) if biggest else once + everyones
    total = torch.maximum(local, once) if biggest else (local + once) ** (1.0 / norm_type)
    return total if double else total.float()


def _over(group: dist.ProcessGroup, local: torch.Tensor, biggest: bool) -> torch.Tensor:
    if dist.get_world_size(group) > 1:
        if biggest:
            return _largest_of_all(local, group)
        dist.all_reduce(local, group=group)
    return local


def _largest_of_all(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Maximum over ranks, nan if any is: libraries compare, and a nan loses or wins by its place in the comparison."""
    is_nan = local.isnan()
    both = torch.stack([local.masked_fill(is_nan, 0.0), is_nan.to(local.dtype)])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return both[0].masked_fill(both[1] > 0, math.nan)


def _reduced(gradients: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Sum of p-th powers (p = inf: the largest magnitude), in float64: powers of large gradients overflow float32."""
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    dtype = torch.float64 if any(gradient.dtype == torch.float64 for gradient in gradients) else torch.float32
    norms = torch.stack(torch._foreach_norm(gradients, norm_type, dtype=dtype)).double()
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    *,
    shard_group: dist.ProcessGroup,
    norm_type: float = 2.0,
    on_nonfinite: OnNonfinite = "ignore",
) -> torch.Tensor:
    """Scale gradients in place so that their norm is at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does.

    Args:
        on_nonfinite: what to do when the norm is inf or nan: ``"ignore"`` (clip as torch does), ``"skip"`` (set every
            gradient to None, so that the optimizer step changes nothing) or ``"raise"``.

    Returns:
        the norm before clipping (see :func:`grad_norm`).

    Raises:
        NonfiniteGradNormError: with ``on_nonfinite="raise"``, on all ranks.
    """
    parameters = list(parameters)
    total = grad_norm(parameters, shard_group=shard_group, norm_type=norm_type)
    if on_nonfinite != "ignore" and settle_nonfinite(parameters, total, on_nonfinite):
        return total
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    local = [
        parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        for parameter in parameters
        if parameter.grad is not None
    ]
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in local:
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), gradients in alike.items():
        torch._foreach_mul_(gradients, scale.to(device=device, dtype=dtype))
    return total


def settle_nonfinite(parameters: Iterable[torch.Tensor], total: torch.Tensor, on_nonfinite: OnNonfinite) -> bool:
    """Apply ``on_nonfinite_grad_norm`` to a norm; ``True`` if the gradients were dropped ("skip")."""
    if on_nonfinite == "ignore" or bool(torch.isfinite(total)):
        return False
    if on_nonfinite == "raise":
        raise NonfiniteGradNormError(
            f"the gradient norm is {total.item()}; on_nonfinite_grad_norm='raise' ends the run here. Lower the "
            "learning rate, look for bad samples, or set on_nonfinite_grad_norm='skip' to leave such steps out"
        )
    for parameter in parameters:
        parameter.grad = None
    return True


@torch.no_grad()
def clip_grad_value_(parameters: Iterable[torch.Tensor], clip_value: float) -> None:
    """Limit every gradient element to [-clip_value, clip_value], DTensor and plain alike. Local."""
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            gradient.clamp_(-clip_value, clip_value)

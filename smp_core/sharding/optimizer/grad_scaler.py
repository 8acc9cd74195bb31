"""Dynamic loss scaling for optimizers that step sharded and plain parameters together.

torch's GradScaler unscales all gradients of one dtype in one call, which takes plain
tensors or DTensors of one mesh. ``_unscale_grads_`` is the method torch's own
ShardedGradScaler overrides for the same reason; no public one is nearer. A non-finite
gradient is seen by all: DTensor reduces the finding over the ranks that hold parts,
replicas hold equal gradients, and plain gradients are equal on every rank. Pipeline
stages tell one another.

A scaler that a loop makes itself becomes such a one when it first meets a prepared
optimizer: torch's would pass over gradients of masters, which are stepped with the
scale still in them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smp_core.sharding.operands import take_part_of_gradient
from smp_core.sharding.optimizer.prepared import Homes, stepped_by
from smp_core.sharding.optimizer.shards import mesh_of
from smp_core.torch_facts import model_parameter


class ShardedGradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, unscaling plain tensors and the DTensors of each mesh one
    kind after the other.

    Attributes:
        in_stages: ranks hold pipeline stages of the model, which skip a step together.
            One stage may have no gradient.
    """

    in_stages = False

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        # Phase 1: the tensors of each mesh, and plain ones, by themselves. What a window
        # holds would be added with the scale still in it.
        homes: Homes | None = getattr(optimizer, "_smp_homes", None)
        if homes is not None:
            homes.close_windows(optimizer)
        found: dict[torch.device, Tensor] = {}
        stepped = stepped_by(optimizer)
        for parameter in stepped:
            take_part_of_gradient(parameter)
        # Only the groups of the optimizer are read by torch, so a stand-in with these
        # is enough.
        for mesh in dict.fromkeys(map(mesh_of, stepped)):
            on_mesh = [p for p in stepped if mesh_of(p) == mesh]
            part: Any = SimpleNamespace(param_groups=[{"params": on_mesh}])
            seen = super()._unscale_grads_(
                part, inv_scale, torch.zeros_like(found_inf), allow_fp16
            )
            for device, flag in seen.items():
                found[device] = (
                    torch.maximum(found[device], flag) if device in found else flag
                )
        # Phase 2: what one rank has found alone is made known to all.
        masters = any(model_parameter(p) is not p for p in stepped)
        if masters or self.in_stages:
            # Parts that no other rank has, and on devices that not every rank has
            # gradients on: one flag for all.
            flag = found.setdefault(found_inf.device, torch.zeros_like(found_inf))
            for other in found.values():
                torch.maximum(flag, other.to(flag.device), out=flag)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            for other in found.values():
                other.copy_(flag)
        return found


def take_scaler(
    before: Callable[..., Any],
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Let a gradient scaler unscale what prepared optimizers step; in the place of its
    ``unscale_`` and ``step``."""
    # Accelerate's wrapper of an optimizer has the prepared one inside.
    own = getattr(optimizer, "optimizer", optimizer)
    homes: Homes | None = getattr(own, "_smp_homes", None)
    if homes is not None and scaler.is_enabled():
        _become_sharded(scaler, homes)
    return before(scaler, optimizer, *args, **kwargs)


def _become_sharded(scaler: Any, homes: Homes) -> None:
    """Make a scaler unscale sharded and plain gradients, and those of masters.

    Raises:
        ValueError: it unscales in a way of its own, which cannot find the gradients.
    """
    kind: Any = type(scaler)
    if not isinstance(scaler, ShardedGradScaler):
        # FSDP's own scaler, say, goes through the groups by itself.
        if kind._unscale_grads_ is not torch.amp.GradScaler._unscale_grads_:
            if homes.worlds or homes.in_stages:
                raise ValueError(
                    f"a gradient scaler of class {kind.__name__} unscales in a way of its own, which does not find all "
                    "gradients under optimizer_shard='world' and pipeline_parallel_degree; use torch.amp.GradScaler"
                )
            return
        scaler.__class__ = _sharded(kind)
    scaler.in_stages = scaler.in_stages or homes.in_stages


@functools.cache
def _sharded(kind: Any) -> Any:
    if kind is torch.amp.GradScaler:
        return ShardedGradScaler
    # What a user's class does besides stays.
    return type(
        kind.__name__, (ShardedGradScaler, kind), {"__module__": kind.__module__}
    )


def scale_in_stages(scaler: torch.amp.GradScaler | None) -> Callable[[Tensor], Tensor]:
    """Let the pipeline stages of a model skip steps together.

    Args:
        scaler: None: none.

    Returns:
        what is applied to a micro-batch's loss before backward.

    Raises:
        ValueError: a scaler of a class of the user's own.
    """
    if scaler is None:
        return lambda loss: loss
    if not isinstance(scaler, ShardedGradScaler):
        raise ValueError(
            f"pipeline_parallel_degree: a gradient scaler of class {type(scaler).__name__} does not know of stages, "
            "which have to skip a step together; use torch.amp.GradScaler"
        )
    scaler.in_stages = True
    return scaler.scale  # type: ignore[return-value]

"""A model becomes sharded: what Accelerate's settings mean for it, and the hooks it carries from then on."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from smp_core.config import SmpConfig
from smp_core.engine import parallelize
from smp_core.mesh import SmpMesh
from smp_core.parallel_model import ParallelModel
from smp_core.planning.dtype_rules import Precision
from smp_core.topology import Topology


def shard(
    model: nn.Module,
    config: SmpConfig,
    topology: Topology,
    accelerator: Accelerator,
    mesh: SmpMesh | None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> ParallelModel:
    """Shard a model that is not sharded yet; one that came sharded keeps that and gets the rest. Collective.

    Args:
        accelerator: its device, precision and gradient scaler count.
        mesh: of the models before; None: this is the first one, and ``shard_degree="auto"`` is settled by it.
        optimizers: prepared together with models; memory is planned for those that step this one.

    Raises:
        ValueError: what :func:`smp_core.engine.parallelize` refuses.
    """
    device = accelerator.device  # first: it says so when Accelerate's state was reset since
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    precision = Precision(
        mixed if accelerator.native_amp else None,
        f"mixed_precision={accelerator.mixed_precision!r}",
        cast_forward_inputs=not accelerator.native_amp,
        skips_steps=accelerator.scaler is not None,
    )
    own = [optimizer for optimizer in optimizers if steps(optimizer, model)]
    handle = parallelize(
        model, config, device=device, topology=topology, mesh=mesh, precision=precision, optimizers=own
    )
    _gather_anew_for_evaluation(model, handle)
    _count_evaluations_apart(model, handle)
    return handle


def steps(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether the optimizer has any of the model's parameters."""
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def _gather_anew_for_evaluation(model: nn.Module, handle: ParallelModel) -> None:
    """FSDP2 keeps the root gathered after a forward, for backward; without one ``model.parameters()`` would stay the
    gathered ones, and an optimizer made after an evaluation would step those. Before it, units that stay gathered in a
    window may hold other weights than somebody has put in their place to evaluate, averages for example."""

    def around(*_: Any) -> None:
        if not torch.is_grad_enabled():
            handle.reshard()

    model.register_forward_pre_hook(around, prepend=True)
    model.register_forward_hook(around)


def _count_evaluations_apart(model: nn.Module, handle: ParallelModel) -> None:
    """What a forward in evaluation mode sends belongs to no optimizer step."""
    evaluations = contextlib.ExitStack()

    def before(module: nn.Module, *_: Any) -> None:
        if not module.training and not torch.is_grad_enabled():
            evaluations.enter_context(handle.meter.outside_steps())

    # The first of all hooks and the last, after an error too: FSDP2's own gather.
    model.register_forward_pre_hook(before, prepend=True)
    model.register_forward_hook(lambda *_: evaluations.close(), always_call=True)

"""The sharding of a model by Accelerate's settings, and the hooks that the model has
from then on."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from accelerate_smp.compiled import with_dynamo_plugin
from smp_core.cluster import SmpMesh
from smp_core.config import SmpConfig
from smp_core.engine import ParallelModel
from smp_core.entry import parallelize
from smp_core.plan import Precision
from smp_core.topology import Topology
from smp_core.torch_facts import parameters_of


def shard(
    model: nn.Module,
    config: SmpConfig,
    topology: Topology,
    accelerator: Accelerator,
    mesh: SmpMesh | None,
    optimizers: Sequence[Optimizer] = (),
) -> ParallelModel:
    """Shard a model; a pre-sharded one keeps its sharding and gets the other features.
    Collective.

    Args:
        accelerator: gives device, precision and gradient scaler.
        mesh: the mesh of the models before; None: this is the first one, which resolves
            ``shard_degree="auto"``.
        optimizers: prepared together with models; memory is planned for those that step
            this one.

    Raises:
        ValueError: :func:`smp_core.entry.parallelize` refuses the model or the knobs.
    """
    device = accelerator.device  # first: it raises if Accelerate's state was reset
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
        accelerator.mixed_precision
    )
    # Under autocast parameters are gathered in its dtype, and inputs stay as they are.
    precision = Precision(
        mixed if accelerator.native_amp else None,
        f"mixed_precision={accelerator.mixed_precision!r}",
        cast_forward_inputs=not accelerator.native_amp,
        skips_steps=accelerator.scaler is not None,
    )
    own = [optimizer for optimizer in optimizers if steps(optimizer, model)]
    config = with_dynamo_plugin(config, accelerator)
    handle = parallelize(
        model,
        config,
        device=device,
        topology=topology,
        mesh=mesh,
        precision=precision,
        optimizers=own,
        accumulated=accelerator.gradient_accumulation_steps,
    )
    _gather_anew_for_evaluation(model, handle)
    _count_evaluations_apart(model, handle)
    _evaluate_with_one_set_of_buffers(model, handle)
    return handle


def steps(optimizer: Optimizer, model: nn.Module) -> bool:
    """Return whether the optimizer has any of the model's parameters."""
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for parameter in parameters_of(optimizer))


def _gather_anew_for_evaluation(model: nn.Module, handle: ParallelModel) -> None:
    """Reshard the model before and after each forward without gradients.

    After: FSDP2 keeps the root unsharded for a backward, and without one
    ``model.parameters()`` would stay the unsharded ones, which an optimizer made after
    an evaluation would step. Before: units that stay unsharded in a window may hold
    other weights than those to be evaluated, averages for example.
    """

    def around(*_: Any) -> None:
        if not torch.is_grad_enabled():
            handle.reshard()

    model.register_forward_pre_hook(around, prepend=True)
    model.register_forward_hook(around)


def _count_evaluations_apart(model: nn.Module, handle: ParallelModel) -> None:
    """Count no bytes of a forward in evaluation mode to an optimizer step."""
    evaluations = contextlib.ExitStack()

    def before(module: nn.Module, *_: Any) -> None:
        if not module.training and not torch.is_grad_enabled():
            evaluations.enter_context(handle.meter.outside_steps())

    # The first of all hooks and the last, after an error too: FSDP2's own gather.
    model.register_forward_pre_hook(before, prepend=True)
    model.register_forward_hook(lambda *_: evaluations.close(), always_call=True)


def _evaluate_with_one_set_of_buffers(model: nn.Module, handle: ParallelModel) -> None:
    """Give all ranks rank 0's buffers in the first evaluation behind a training
    forward: each has BatchNorm statistics of its own samples.

    Not where one rank can evaluate by itself, as scripts for replicas let rank 0."""
    mesh = handle.mesh
    if mesh.shard_degree == mesh.tensor_degree == mesh.pipeline_degree == 1:
        return
    has_trained = False

    def before(module: nn.Module, *_: Any) -> None:
        nonlocal has_trained
        if has_trained and not module.training:
            handle.broadcast_buffers(between_stages=False)
        has_trained = module.training

    model.register_forward_pre_hook(before)

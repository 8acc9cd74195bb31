"""The sharding of a LightningModule, once; and the settings that a later run may still
change.

Lightning calls a strategy for every ``fit``, ``validate``, ``test`` and ``predict``.
The first of them shards the module, which carries the handle from then on; the others
find it.

Private names: ``_log_graph`` is the only place of what a TensorBoardLogger was asked;
torch has no public class over BatchNorm1d/2d/3d (``_BatchNorm``) and no public access
to a module's registries as dicts (``_modules``, ``_parameters``, ``_buffers``).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import LayerSync, MixedPrecision, Precision
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_smp.precision import Fp8Precision
from smp_core.config import Fp8Recipe, SmpConfig
from smp_core.engine import ParallelModel, knobs_of_next_run
from smp_core.entry import parallelize
from smp_core.plan import Precision as CorePrecision
from smp_core.sharding import (
    CpuSyncBatchNorm,
    require_plain_batch_norms,
    sync_batch_norm_on_cpu,
)
from smp_core.topology import Topology

ATTACHED = "_smp_parallel"
"""The attribute of a LightningModule that an earlier run has sharded."""


@contextlib.contextmanager
def keeping_what_is_sharded(module: LightningModule) -> Generator[None, None, None]:
    """Keep the submodules and parameters of a sharded module through
    ``configure_model``.

    Lightning calls that hook again for every ``validate`` and ``test``; the module may
    have been trained before.
    """
    # What the hook builds again would replace shards by whole parameters.
    sharded = hasattr(module, ATTACHED)
    registries: list[dict[str, Any]] = [
        module._modules,
        module._parameters,
        module._buffers,
    ]  # type: ignore[list-item]
    before = [dict(registry) for registry in registries]
    yield
    if sharded:
        for registry, kept in zip(registries, before, strict=True):
            registry.update(kept)


def check_loggers(trainer: Trainer, module: LightningModule) -> None:
    """Refuse loggers that trace the model, which they do on rank 0 alone.

    Raises:
        ValueError: ``TensorBoardLogger(log_graph=True)`` with an example to trace, on
            several ranks.
    """
    # Without an example, or with one of another kind, Lightning says itself that there
    # is no graph.
    traces = isinstance(module.example_input_array, (torch.Tensor, tuple))
    if not traces or not trainer.enable_autolog_hparams or trainer.world_size == 1:
        return
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and logger._log_graph:
            raise ValueError(
                f"{type(logger).__name__}(log_graph=True) traces the model on rank 0 alone, and each rank has a "
                "shard of it; leave log_graph out, and draw the graph of the module before the Trainer has it: "
                "logger.experiment.add_graph(module, module.example_input_array) on rank 0"
            )


def with_recipe(
    config: SmpConfig, plugin: Fp8Precision, device: torch.device
) -> SmpConfig:
    """Read ``plugins=[Fp8Precision(recipe)]`` as the knob ``fp8``.

    Raises:
        ValueError: both were given, and they differ.
    """
    # Autocast asks for a device, which the plugin does not know when it is made.
    plugin.device_type = device.type
    if config.fp8 not in (None, plugin.recipe, Fp8Recipe()):
        raise ValueError(
            f"fp8={config.fp8} was asked of the strategy and {plugin.recipe} of Fp8Precision; write the "
            "recipe in one of the two places"
        )
    return (
        config
        if config.fp8 == plugin.recipe
        else dataclasses.replace(config, fp8=plugin.recipe)
    )


def shard(
    module: LightningModule,
    config: SmpConfig,
    topology: Topology,
    device: torch.device,
    *,
    precision: Precision,
    layer_sync: LayerSync | None,
    init_fn: Callable[[nn.Module], None] | None,
) -> ParallelModel:
    """Shard a module for the first time and attach the handle to it. Collective.

    Args:
        layer_sync: Lightning's plugin for ``sync_batchnorm=True``.
        init_fn: as in :class:`~lightning_smp.SmpShardedStrategy`.

    Raises:
        ValueError: :func:`smp_core.entry.parallelize` refuses the module or the knobs.
    """
    _leave_inference_mode(module)
    unsharded: nn.Module = module
    if layer_sync is not None:
        # Before an evaluation too: the module keeps the layers that are sharded now,
        # and a fit may follow. torch's own SyncBatchNorm refuses CPU tensors.
        require_plain_batch_norms(unsharded)
        sync = sync_batch_norm_on_cpu if device.type == "cpu" else layer_sync.apply
        unsharded = sync(unsharded)
    # Before sharding: a precision like "64-true" changes the parameters' dtype.
    unsharded = precision.convert_module(unsharded)
    parallel = parallelize(
        unsharded,
        config,
        device=device,
        topology=topology,
        entry="steps" if module.automatic_optimization else "children",
        precision=_meant_by(precision, device),
        init_fn=init_fn,
        accumulated=module.trainer.accumulate_grad_batches,
    )
    # Past nn.Module's own, which would register the model inside as a submodule.
    object.__setattr__(module, ATTACHED, (parallel, str(precision.precision)))
    return parallel


def _leave_inference_mode(module: nn.Module) -> None:
    """Replace parameters and buffers that were made in inference mode, which nothing
    can be trained with."""
    # Tied parameters stay tied: each tensor is copied once.
    made: dict[int, torch.Tensor] = {}

    def ordinary(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            copy = tensor.clone()
            made[id(tensor)] = (
                nn.Parameter(copy, tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else copy
            )
        return made[id(tensor)]

    for child in module.modules():
        for name, tensor in [
            *child.named_parameters(recurse=False),
            *child.named_buffers(recurse=False),
        ]:
            if tensor.is_inference():
                setattr(child, name, ordinary(tensor))


def _meant_by(plugin: Precision, device: torch.device) -> CorePrecision:
    """Translate a precision plugin to the core's.

    Under autocast parameters are gathered in autocast's dtype, half the bytes; not on
    CPU, whose autocast lets ``layer_norm`` meet a float32 input and a half precision
    weight, which it refuses.
    """
    # The dtype in which forward passes run under autocast; None: without it.
    gathered: torch.dtype | None = None
    if isinstance(plugin, Fp8Precision) and plugin.compute_dtype != torch.float32:
        gathered = plugin.compute_dtype
    elif isinstance(plugin, MixedPrecision):
        mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
        gathered = mixed[str(plugin.precision)]
    why = f"precision={plugin.precision!r}"
    # Without autocast inputs are cast to what parameters are gathered in.
    casts_inputs = gathered is None
    if gathered is not None and device.type == "cpu":
        gathered = None
        why = f"{why} on CPU: autocast there does not mix dtypes in norms"
    scales = isinstance(plugin, MixedPrecision) and plugin.scaler is not None
    return CorePrecision(
        gathered, why, cast_forward_inputs=casts_inputs, skips_steps=scales
    )


def reattach(
    module: LightningModule, asked: SmpConfig, precision: Precision
) -> tuple[ParallelModel, SmpConfig]:
    """Return the handle of a module that an earlier run sharded; refuse knobs that
    would have no effect.

    Returns:
        its handle, and the config in effect: the module's, and the run's where a knob
            is the run's own.

    Raises:
        ValueError: a knob or a precision asks for something else than the module has.
    """
    # Its parameters were converted for that precision.
    attached, kept_precision = getattr(module, ATTACHED)
    if kept_precision != str(precision.precision):
        raise ValueError(
            f"precision={precision.precision!r}: this LightningModule was sharded before with "
            f"precision={kept_precision!r} and keeps that; use the same, or a new module and ckpt_path=..."
        )
    return attached, knobs_of_next_run(attached.plan, asked)


def check_layer_sync(module: LightningModule, layer_sync: LayerSync | None) -> None:
    """Check ``sync_batchnorm`` before a sharded module is trained.

    Raises:
        ValueError: ``sync_batchnorm=True`` for a module that was sharded without it.
    """
    if layer_sync is None:
        return
    norms = [
        (name, child)
        for name, child in module.named_modules()
        if isinstance(child, _BatchNorm)
    ]
    plain = [
        name
        for name, norm in norms
        if not isinstance(norm, (nn.SyncBatchNorm, CpuSyncBatchNorm))
    ]
    if plain:
        raise ValueError(
            f"sync_batchnorm=True: this LightningModule was sharded before without it and {plain[0]} stays as it "
            "is; give the flag to the first Trainer too, or use a new module and trainer.fit(..., ckpt_path=...)"
        )

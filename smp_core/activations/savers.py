"""The knobs for activations, applied to a model in one call: what is recomputed, what waits on the host."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from smp_core.activations.checkpointing import apply_checkpointing, checkpoints_itself
from smp_core.activations.host_pool import GIB, HostPool, available_host_bytes
from smp_core.activations.offloading import Offloader, park_inputs
from smp_core.activations.plan import CheckpointedModule, plan_checkpointing
from smp_core.config import SmpConfig

logger = logging.getLogger("smp")


@dataclass(frozen=True)
class ActivationSavers:
    """What was done to a model: the modules that recompute, the FSDP units inside of them (which run again in
    backward), and what parks their inputs."""

    checkpointed: tuple[CheckpointedModule, ...] = ()
    recomputed_units: frozenset[str] = frozenset()
    offloader: Offloader | None = None

    def describe(self) -> list[str]:
        """Lines for people; none if nothing is saved."""
        lines = []
        if self.checkpointed:
            modes = ", ".join(f"{n} {mode}" for mode, n in Counter(each.mode for each in self.checkpointed).items())
            lines.append(f"recomputed in backward: {len(self.checkpointed)} modules ({modes})")
        if self.offloader is not None:
            lines.append(
                f"inputs of all but {self.offloader.horizon} of them wait in host memory, at most "
                f"{self.offloader.pool.limit_bytes / GIB:.3g} GiB on each rank"
            )
        return lines


NOTHING_SAVED = ActivationSavers()


def save_activations(
    model: nn.Module,
    blocks: Sequence[str],
    units: Sequence[str],
    device: torch.device,
    ranks_per_node: int,
    config: SmpConfig,
) -> tuple[SmpConfig, ActivationSavers]:
    """Apply ``activation_checkpointing`` and ``activation_offloading`` to a model, in place, before it is sharded.

    Args:
        blocks: names of the model's wrapped blocks, in its order.
        units: names of what is going to be FSDP units.
        device: where the model is going to compute.
        ranks_per_node: ranks that share a node's host memory.

    Returns:
        the configuration with what took effect, and what was done.

    Raises:
        ValueError: the model has no blocks, a pattern matches nothing, or the model checkpoints itself and its inputs
            were to be offloaded.
    """
    config, checkpointed, recomputed = _checkpointing(model, blocks, units, config)
    config, offloader = _offloading(checkpointed, device, ranks_per_node, config)
    return config, ActivationSavers(checkpointed, recomputed, offloader)


def _checkpointing(
    model: nn.Module, blocks: Sequence[str], units: Sequence[str], config: SmpConfig
) -> tuple[SmpConfig, tuple[CheckpointedModule, ...], frozenset[str]]:
    """Unless the model has its own checkpointing on: computing everything twice more saves nothing."""
    if config.activation_checkpointing != "none" and checkpoints_itself(model):
        why = "the model's own gradient checkpointing is on"
        if config.activation_offloading:
            raise ValueError(
                f"activation_offloading=true: {why}, and its inputs cannot be offloaded; switch it off "
                "(model.gradient_checkpointing_disable(), TrainingArguments(gradient_checkpointing=False)) so that "
                f"activation_checkpointing={config.activation_checkpointing!r} takes its place"
            )
        logger.warning("activation_checkpointing=%r has no effect: %s", config.activation_checkpointing, why)
        config = config.with_resolved("activation_checkpointing", "none", why)
    chosen = tuple(plan_checkpointing(model, blocks, config.activation_checkpointing))
    if config.activation_checkpointing_check and not chosen:
        why = "nothing is recomputed"
        logger.warning("activation_checkpointing_check=True has no effect: %s", why)
        config = config.with_resolved("activation_checkpointing_check", False, why)
    by_name = dict(model.named_modules())
    inside = {
        each.name: [name for name in units if name != each.name and by_name[name] in set(each.module.modules())]
        for each in chosen
    }
    for each in chosen:
        apply_checkpointing(each, check=config.activation_checkpointing_check, to_the_end=bool(inside[each.name]))
    return config, chosen, frozenset(name for names in inside.values() for name in names)


def _offloading(
    chosen: Sequence[CheckpointedModule], device: torch.device, ranks_per_node: int, config: SmpConfig
) -> tuple[SmpConfig, Offloader | None]:
    horizon = config.activation_loading_horizon
    if not config.activation_offloading:
        if horizon != 2:
            config = config.with_resolved("activation_loading_horizon", horizon, "no effect: nothing is offloaded")
        return config, None
    if horizon >= len(chosen):
        why = f"the inputs of all {len(chosen)} checkpointed modules may stay on the device"
        logger.warning("activation_offloading=True has no effect: activation_loading_horizon=%s, so %s", horizon, why)
        return config.with_resolved("activation_offloading", False, why), None
    if config.activation_offloading_host_gib is None:
        limit = int(0.8 * available_host_bytes() / ranks_per_node)
        why = "four fifths of what was available, divided by the node's ranks"
        config = config.with_resolved("activation_offloading_host_gib", round(limit / GIB, 3), why)
    else:
        limit = int(config.activation_offloading_host_gib * GIB)
    lower = (
        "lower the batch size or the sequence length, checkpoint fewer modules, or raise activation_offloading_host_gib"
    )
    pool = HostPool(limit, pinned=device.type == "cuda", lower=lower)
    offloader = Offloader(device, horizon, pool, min_bytes=config.activation_offloading_min_bytes)
    for each in chosen:
        park_inputs(each, offloader)
    return config, offloader

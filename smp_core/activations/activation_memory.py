"""The knobs for activation memory, applied to a model in one call: recomputation and
offloading."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from smp_core.activations.checkpointing import apply_checkpointing
from smp_core.activations.host_pool import HostPool
from smp_core.activations.offloading import Offloader, park_inputs
from smp_core.plan import GIB, CheckpointedModule, Plan
from smp_core.torch_facts import streams

_LOWER = "lower the batch size or the sequence length, checkpoint fewer modules, or raise activations.offload_host_gib"


@dataclass(frozen=True)
class ActivationMemory:
    """The means by which a model saves activation memory.

    Attributes:
        checkpointed: the modules that recompute.
        recomputed_units: names of the FSDP units inside of these modules, which run
            again in backward.
        offloader: keeps the inputs of these modules in host memory; None: they stay on
            the device.
    """

    checkpointed: tuple[CheckpointedModule, ...] = ()
    recomputed_units: frozenset[str] = frozenset()
    offloader: Offloader | None = None

    def describe(self) -> str:
        """Describe the savings in lines for people; empty if nothing is saved."""
        lines = []
        if self.checkpointed:
            modules_by_mode = Counter(each.mode for each in self.checkpointed)
            modes = ", ".join(f"{n} {mode}" for mode, n in modules_by_mode.items())
            lines.append(
                f"recomputed in backward: {len(self.checkpointed)} modules ({modes})"
            )
        if self.offloader is not None:
            lines.append(
                f"inputs of all but {self.offloader.horizon} of them wait in host memory, at most "
                f"{self.offloader.pool.limit_bytes / GIB:.3g} GiB on each rank"
            )
        return "\n".join(lines)


NO_ACTIVATION_MEMORY_SAVED = ActivationMemory()


def save_activations(
    model: nn.Module, plan: Plan, device: torch.device
) -> ActivationMemory:
    """Recompute and offload the activations that the plan names. In place, before the
    model is sharded.

    Args:
        device: where the model is going to compute.
    """
    asked = plan.activations
    unit_names = [unit.name for unit in plan.sharded_units]
    # Phase 1: recomputation.
    modules = dict(model.named_modules())
    recomputed: set[str] = set()
    # Units inside a checkpointed module run again in backward, and are told apart.
    for each in asked.checkpointed:
        inside = set(modules[each.name].modules())
        inner_units = [
            name for name in unit_names if name != each.name and modules[name] in inside
        ]
        recomputed.update(inner_units)
        apply_checkpointing(
            model, each, check=asked.check, to_the_end=bool(inner_units)
        )
    # Phase 2: the inputs from which they recompute may wait in host memory.
    offloader = None
    if asked.offloaded_bytes is not None:
        pool = HostPool(
            asked.offloaded_bytes, pinned=streams.pins(device), lower=_LOWER
        )
        offloader = Offloader(device, asked.horizon, pool, min_bytes=asked.min_bytes)
        for each in asked.checkpointed:
            park_inputs(model, each, offloader)
    return ActivationMemory(asked.checkpointed, frozenset(recomputed), offloader)

"""The knobs for activation memory, applied to a model in one call: recomputation and offloading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from smp_core.activations.checkpointing import apply_checkpointing
from smp_core.activations.host_pool import HostPool
from smp_core.activations.offloading import Offloader, park_inputs
from smp_core.planning.activation_rules import ActivationPlan
from smp_core.planning.checkpointed import CheckpointedModule
from smp_core.planning.cluster import GIB

_LOWER = (
    "lower the batch size or the sequence length, checkpoint fewer modules, or raise activation_offloading_host_gib"
)


@dataclass(frozen=True)
class ActivationMemory:
    """The means by which a model saves activation memory.

    Attributes:
        checkpointed: the modules that recompute.
        recomputed_units: names of the FSDP units inside of these modules, which run again in backward.
        offloader: keeps the inputs of these modules in host memory; None: they stay on the device.
    """

    checkpointed: tuple[CheckpointedModule, ...] = ()
    recomputed_units: frozenset[str] = frozenset()
    offloader: Offloader | None = None

    def describe(self) -> list[str]:
        """Describe the savings in lines for people; none if nothing is saved."""
        lines = []
        if self.checkpointed:
            modules_by_mode = Counter(each.mode for each in self.checkpointed)
            modes = ", ".join(f"{n} {mode}" for mode, n in modules_by_mode.items())
            lines.append(f"recomputed in backward: {len(self.checkpointed)} modules ({modes})")
        if self.offloader is not None:
            lines.append(
                f"inputs of all but {self.offloader.horizon} of them wait in host memory, at most "
                f"{self.offloader.pool.limit_bytes / GIB:.3g} GiB on each rank"
            )
        return lines


NO_ACTIVATION_MEMORY_SAVED = ActivationMemory()


def save_activations(
    model: nn.Module, plan: ActivationPlan, units: Sequence[str], device: torch.device
) -> ActivationMemory:
    """Recompute and offload the activations that the plan names. In place, before the model is sharded.

    Args:
        units: names of the modules that are going to be FSDP units.
        device: where the model is going to compute.
    """
    # Recomputation.
    modules = dict(model.named_modules())
    recomputed: set[str] = set()
    for each in plan.checkpointed:
        inside = set(modules[each.name].modules())
        inner_units = [name for name in units if name != each.name and modules[name] in inside]
        recomputed.update(inner_units)
        apply_checkpointing(model, each, check=plan.check, to_the_end=bool(inner_units))
    # Offloading of the inputs from which modules recompute.
    offloader = None
    if plan.offloaded_bytes is not None:
        pool = HostPool(plan.offloaded_bytes, pinned=device.type == "cuda", lower=_LOWER)
        offloader = Offloader(device, plan.horizon, pool, min_bytes=plan.min_bytes)
        for each in plan.checkpointed:
            park_inputs(model, each, offloader)
    return ActivationMemory(plan.checkpointed, frozenset(recomputed), offloader)

"""Which parameters a window's backward passes reached, on this rank and on any."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from smp_core.mesh import SmpMesh
from smp_core.sharding.fsdp import ShardedUnit
from smp_core.sharding.replicated import ReplicatedGradients
from smp_core.sharding.unit_sum import UnitSum


def reached_all(units: Sequence[ShardedUnit], sums: Sequence[UnitSum], replicated: ReplicatedGradients) -> bool:
    """Whether this rank reached every trainable parameter, and so need not read what the others tell."""
    return all(
        index in unit.reached
        for unit, unit_sum in zip(units, sums, strict=True)
        for index in (slot.index for slot in unit_sum.slots)
    ) and all(name in replicated.reached for name in replicated.taking_part())


def tell_what_was_reached(
    units: Sequence[ShardedUnit],
    sums: Sequence[UnitSum],
    replicated: ReplicatedGradients,
    mesh: SmpMesh,
    veto: Callable[[], torch.Tensor] | None,
) -> tuple[torch.Tensor, dist.Work | None]:
    """One small MAX all-reduce over all ranks.

    Returns:
        (flags int32, what to wait for before they are read): per parameter whether it was reached, units first, then
        replicated ones, and per unit whether there is a sum of it; last, whether a rank vetoes the window.
    """
    flags: list[int] = []
    for unit in units:
        flags += [int(index in unit.reached) for index in range(len(unit.parameters()))]
    flags += [int(name in replicated.reached) for name in replicated.parameters]
    flags += [int(unit_sum.flat is not None) for unit_sum in sums]
    reached = torch.tensor([*flags, 0], dtype=torch.int32, device=mesh.device)
    if veto is not None:
        reached[-1] = veto()
    if mesh.gradient_degree == 1:
        return reached, None
    return reached, dist.all_reduce(reached, op=dist.ReduceOp.MAX, group=mesh.gradient_group, async_op=True)

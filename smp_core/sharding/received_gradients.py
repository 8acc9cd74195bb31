"""Which parameters received a gradient in a window, on this rank and on any."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from smp_core import streams
from smp_core.mesh import SmpMesh
from smp_core.sharding.replicated import ReplicatedGradients
from smp_core.sharding.unit_window import UnitWindow


def received_all(units: Sequence[UnitWindow], replicated: ReplicatedGradients) -> bool:
    """Tell whether this rank has a gradient of every trainable parameter, and so need not read what the others tell."""
    of_units = all(each.received_all() for each in units)
    return of_units and all(name in replicated.reached for name in replicated.taking_part())


def tell_what_was_received(
    units: Sequence[UnitWindow],
    replicated: ReplicatedGradients,
    mesh: SmpMesh,
    veto: Callable[[], torch.Tensor] | None,
) -> tuple[torch.Tensor, dist.Work | None]:
    """Start one small MAX all-reduce over all ranks that compute the same layers, tensor ranks included: they hold
    parts of one gradient, and drop it together.

    Returns:
        (flags int32, what to wait for before they are read): per parameter whether it received a gradient, units first,
        then replicated ones, and per unit whether there is a sum of it; last, whether a rank vetoes the window.
    """
    flags: list[int] = []
    for each in units:
        flags += [int(index in each.received) for index in range(len(each.unit.parameters()))]
    flags += [int(name in replicated.reached) for name in replicated.parameters]
    flags += [int(each.flat is not None) for each in units]
    alone = mesh.model_degree == 1
    received = streams.on_device([*flags, 0], torch.int32, torch.device("cpu") if alone else mesh.device)
    if veto is not None:
        received[-1] = veto()
    if alone:  # what is known stays where it is known
        return received, None
    return received, dist.all_reduce(received, op=dist.ReduceOp.MAX, group=mesh.model_group, async_op=True)

"""The flags that ranks exchange when a window closes: which parameters received a
gradient, and whether all ranks did the same.

One small MAX all-reduce over all ranks that compute the same layers, tensor ranks
included: they hold parts of one gradient, and drop it together. Its parts, in order,
int32:

    of each parameter, units' first       whether it received a gradient on this rank
    of each unit                          whether there is a sum of it
    one                                   whether a rank vetoes the window
    of each replica, two                  what its ranks issued (smp_core/sharding/gradients/divergence.py)
    two                                   which window it is
    two                                   which parameters are trained, and have hooks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from smp_core.cluster import SmpMesh
from smp_core.comm import IssuedCollectives
from smp_core.sharding.gradients.divergence import (
    ATTACHED,
    HOOK,
    any_differs,
    difference_in_words,
    differing,
    leave_to_device,
    on_any_stage,
    stop_device_where_differing,
    told_by,
)
from smp_core.sharding.gradients.parameter_hooks import hooks_of
from smp_core.sharding.gradients.replicated import ReplicatedGradients
from smp_core.sharding.gradients.unit_window import UnitWindow
from smp_core.torch_facts import streams


def received_all(units: Sequence[UnitWindow], replicated: ReplicatedGradients) -> bool:
    """Return whether this rank has a gradient of every trainable parameter, and need
    not read what others tell."""
    of_units = all(each.received_all() for each in units)
    return of_units and all(
        name in replicated.reached for name in replicated.taking_part()
    )


class Told:
    """All ranks' flags at the end of a window; starts the all-reduce. Collective over
    the mesh's ``model_group``.

    Args:
        veto: whether this rank wants the window dropped: a 0-d bool tensor.
        issued: what this rank issued; compared with the other ranks of its replica.
        attached: names of trained parameters whose gradients nothing adds up.
    """

    def __init__(
        self,
        units: Sequence[UnitWindow],
        replicated: ReplicatedGradients,
        mesh: SmpMesh,
        veto: Callable[[], Tensor] | None,
        issued: IssuedCollectives,
        attached: Iterable[str] = (),
    ) -> None:
        self._mesh, self._issued = mesh, issued
        # Phase 1: what this rank has received, and which units it has a sum of.
        flags: list[int] = []
        for each in units:
            flags += [
                int(index in each.received)
                for index in range(len(each.unit.parameters()))
            ]
        flags += [int(name in replicated.reached) for name in replicated.parameters]
        self._n_parameters = len(flags)
        flags += [int(each.flat is not None) for each in units]
        # Phase 2: what is compared by checksum: names trained, hooked and attached.
        self._trained = [
            each.unit.names[slot.index]
            for each in units
            for slot in each.window_slots()
        ]
        self._trained += replicated.taking_part()
        named = [
            pair
            for each in units
            for pair in zip(each.unit.names, each.unit.parameters(), strict=True)
        ]
        hooked = [
            name
            for name, parameter in [*named, *replicated.parameters.items()]
            if hooks_of(parameter)
        ]
        self._trained += [name + HOOK for name in hooked]
        self._trained += [name + ATTACHED for name in attached]
        # Phase 3: one small tensor, on its way while sums are.
        alone = mesh.model_degree == 1
        device = torch.device("cpu") if alone else mesh.device
        self._told = streams.on_device(
            [*flags, 0, *told_by(issued, mesh, self._trained)], torch.int32, device
        )
        # Filled in on the device: a veto may be known there alone.
        self._veto_at = len(flags)
        if veto is not None:
            self._told[self._veto_at] = veto()
        # A view of the flags, which becomes what any rank wants once the maximum has
        # arrived.
        self._vetoed = self._told[self._veto_at]
        self._work: dist.Work | None = None
        if not alone:  # what is known stays where it is known
            group = mesh.model_group
            self._work = dist.all_reduce(
                self._told, op=dist.ReduceOp.MAX, group=group, async_op=True
            )

    def wait(self) -> None:
        """Wait until all ranks' flags have arrived."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def sums(self) -> list[int]:
        """Return for each unit whether any rank has a sum of it. Waits for the
        device."""
        return self._told[self._n_parameters : self._veto_at].tolist()

    def received(self) -> list[bool]:
        """Return for each parameter whether any rank received a gradient. Waits for the
        device."""
        return self._told[: self._n_parameters].cpu().bool().tolist()

    def vetoed(self) -> bool:
        """Return whether any rank wants the window dropped, after :meth:`divergence`.
        Waits for the device."""
        return bool(self._vetoed)

    def divergence(self) -> str | None:
        """Describe where ranks of one replica issued different collectives, or ranks
        differ otherwise; None: nowhere. Collective over pipeline stages, which end a
        window alike, and over the world where ranks differ.

        An accelerator's host does not wait for the answer: the device itself goes no
        further then, so that nothing is stepped.
        """
        told, found = self._told[self._veto_at + 1 :], None
        differs: Tensor | bool
        # A device answers without its host; elsewhere the numbers are read at once.
        differs = (
            any_differs(told)
            if streams.run_behind(told.device)
            else any(differing(told.tolist()))
        )
        # Stages stop together, as windows of all of them end together.
        if self._mesh.pipeline_degree > 1:
            self._vetoed, differs = on_any_stage([self._vetoed, differs], self._mesh)
        if isinstance(differs, Tensor) and streams.run_behind(differs.device):
            leave_to_device(self._issued, self._mesh, self._trained)
            stop_device_where_differing(differs.bool())
        elif differs:
            found = difference_in_words(self._issued, self._mesh, told, self._trained)
        # The next window begins a new list, whatever came of this one.
        self._issued.forget()
        return found

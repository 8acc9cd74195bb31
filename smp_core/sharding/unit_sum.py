"""The partial sum of a unit's gradients between the micro-batches of a window."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from smp_core.comm.background import Pending
from smp_core.sharding.fsdp import Slot


@dataclass(eq=False)
class UnitSum:
    """What a unit's micro-batches add up to inside the present window.

    Attributes:
        slots: the parameters in it, by where each begins.
        flat: this rank's part, 1-D, in the dtype of FSDP2's reduction; None before the first micro-batch that used the
            unit, and once it is in ``.grad``.
        in_flight: its way to the other replicas, once sent.
        complete: whether nothing is to be added any more.
    """

    slots: list[Slot] = field(default_factory=list)
    flat: torch.Tensor | None = None
    in_flight: Pending | None = None
    complete: bool = False

    def add(self, slots: list[Slot], flat: torch.Tensor) -> None:
        """One micro-batch's; ``flat`` is taken over."""
        if self.flat is None:
            # FSDP2 makes ``.grad`` views of this very tensor; they are dropped when the pass ends: no copy is needed.
            self.slots, self.flat = slots, flat
        elif slots == self.slots:
            self.flat += flat
        else:
            self.widen(slots)
            _add_by_slot(self.flat, self.slots, flat, slots)

    def widen(self, more: list[Slot]) -> None:
        """Make room for parameters that were frozen or unused in earlier micro-batches."""
        sizes = {slot.index: slot.padded for slot in [*self.slots, *more]}
        wide, offset = [], 0
        for index in sorted(sizes):
            wide.append(Slot(index, offset, sizes[index]))
            offset += sizes[index]
        if wide == self.slots:
            return
        assert self.flat is not None
        widened = self.flat.new_zeros(offset)
        _add_by_slot(widened, wide, self.flat, self.slots)
        self.slots, self.flat = wide, widened


def _add_by_slot(target: torch.Tensor, target_slots: list[Slot], source: torch.Tensor, slots: list[Slot]) -> None:
    where = {slot.index: slot.offset for slot in target_slots}
    for slot in slots:
        start = where[slot.index]
        target[start : start + slot.padded] += source[slot.offset : slot.offset + slot.padded]

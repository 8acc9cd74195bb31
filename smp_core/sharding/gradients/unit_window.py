"""UnitWindow: the gradients of one unit between the first micro-batch of a window and
``.grad``.

    idle          no gradient of it in this window
    collecting    micro-batches' sums, reduced inside the partition group, are added up
    complete      nothing more is added; it may be sent
    in flight     it is on its way to the other replicas
    (idle)        again, with the mean in ``.grad`` of parameters, or of their masters

A unit may go from idle to in flight at once: one that only other replicas used sends
zeros. With one replica nothing is sent, and a complete sum becomes gradients.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smp_core.cluster import SmpMesh
from smp_core.comm import Pending, Route
from smp_core.sharding.fsdp import ShardedUnit, Slot
from smp_core.sharding.gradients.parameter_hooks import ParameterHooks, hooks_of
from smp_core.sharding.operands import Placed, sharded_mean, take_part_of_gradient
from smp_core.sharding.optimizer.shards import FlatShard
from smp_core.torch_facts import streams
from smp_core.watch import here

# Other ranks of the partition group can have taken a way through the unit on which its
# parameters are used later.
TOO_LATE = (
    "unit %r: gradients came after its sum had been sent to the other replicas, because ranks of one partition group "
    "took different ways through it; let all of them use the same parameters, or run this backward pass inside "
    "window.accumulate() and call window.close() after it"
)


class Phase(enum.Enum):
    """The states of a unit's gradients."""

    IDLE = enum.auto()
    COLLECTING = enum.auto()
    COMPLETE = enum.auto()
    IN_FLIGHT = enum.auto()


class UnitWindow:
    """One unit's part of an
    :class:`smp_core.sharding.gradients.accumulation.AccumulationWindow`.

    Args:
        unit: whose gradients these are.
        route: their way from this rank's sum to ``.grad``.
        mesh: the ranks over which gradients are complete, for hooks of parameters.
        on_backward: called by each backward pass that leaves gradients of shards
            themselves.

    Attributes:
        received: the parameters that received a gradient in this window, on this rank,
            by index.
        slots: the parameters in the sum, by where each begins.
        uses_left: forwards that no backward pass has come through yet, recomputed ones
            not counted.
        flat: this rank's sum, 1-D, in the dtype of FSDP2's reduction; None while idle.
        masters: of this rank's part, where optimizer states are sharded over the world.
    """

    def __init__(
        self,
        unit: ShardedUnit,
        route: Route,
        mesh: SmpMesh,
        on_backward: Callable[[], None],
    ) -> None:
        self.unit, self.route = unit, route
        # Where the unit is (see the top of the file).
        self.phase = Phase.IDLE
        self.slots: list[Slot] = []
        self.flat: Tensor | None = None
        self.masters: FlatShard | None = None
        self.received: set[int] = set()
        # Of the pass that runs: what it has brought, and what it could bring.
        self._received_in_pass: set[int] = set()
        self._trainable_in_pass: set[int] = set()
        # Trainable in an earlier pass of the window: room for these stays in the sum.
        self._was_trainable: set[int] = set()
        # The parameters in what FSDP2 reduces at the moment.
        self._reduced: set[int] = set()
        self.uses_left = 0
        # What each pass that leaves unsharded gradients calls; None: they are reduced.
        self._on_hold: Callable[[], None] | None = None
        # Sums are scattered over replicas, into gradients of masters.
        self._over_world = False
        self._pending: Pending | None = None
        # Gradients of terms of the loss that are made of shards.
        self._own: dict[int, Tensor] = {}
        # .grad of before the pass that leaves such gradients there.
        self._before: dict[int, Tensor | None] = {}
        self._on_backward = on_backward
        unit.listener = self
        # Autograd calls this where a term of the loss is made of the shard itself.
        owner = weakref.ref(self)  # as autograd holds it
        for index, parameter in enumerate(unit.parameters()):
            before = functools.partial(_set_aside, owner, index)
            ParameterHooks(parameter, mesh, before=before)

    def held(self) -> list[Tensor]:
        """List the sum, the gradients of terms that are made of shards, and the
        unsharded gradients that wait for their reduction."""
        return [
            *([] if self.flat is None else [self.flat]),
            *self._own.values(),
            *self.unit.held(),
        ]

    @property
    def is_complete(self) -> bool:
        """Return whether nothing is added to the sum any more."""
        return self.phase in (Phase.COMPLETE, Phase.IN_FLIGHT)

    @property
    def is_in_flight(self) -> bool:
        return self.phase is Phase.IN_FLIGHT

    # Calls and backward passes

    def used(self) -> None:
        # The time of a window counts from its first forward.
        if here.window_began is None:
            here.in_window()
        self.uses_left += 1

    def came_through(self, received: set[int], trainable: set[int]) -> set[int]:
        # A graph may go through backward twice, and was used once.
        self.uses_left = max(self.uses_left - 1, 0)
        self.received |= received
        self._received_in_pass |= received
        self._trainable_in_pass = trainable
        if self.unit.holds_gradients:  # not while what is held is reduced by hand
            assert self._on_hold is not None
            self._was_trainable |= trainable
            self._on_hold()
        # What is held may have gradients of parameters that were frozen since.
        self._reduced = (
            trainable | self._was_trainable if self.unit.awaits_reduction else trainable
        )
        return self._reduced

    def hold(self, on_hold: Callable[[], None] | None) -> None:
        """Set whether backward passes from here on leave unsharded gradients instead of
        having them reduced; ``on_hold`` is then called by each that comes through the
        unit. None: they are reduced, together with what is held."""
        self._on_hold = on_hold
        self.unit.hold_gradients(on_hold is not None)

    def pass_is_over(self) -> bool:
        """Return whether the present pass has nothing more for this unit, when FSDP2
        has just reduced it: no use is left that FSDP2 will reduce it for (on all ranks
        of the partition group), and every trainable parameter has its gradient, which
        autograd hands over once in a pass, when it has added up all uses. (Uses may be
        left over of a graph that goes through backward twice.)"""
        return self.uses_left == 0 and self._trainable_in_pass <= self._received_in_pass

    def end_of_pass(self) -> None:
        parameters = self.unit.parameters()
        # Autograd has added to .grad: that is this pass's own part, and the earlier one
        # goes back.
        for index in list(self._before):
            parameter = parameters[index]
            own, parameter.grad = parameter.grad, self._before.pop(index)
            if isinstance(own, DTensor) and isinstance(parameter, DTensor):
                # Torch may leave it replicated.
                own = own.redistribute(placements=parameter.placements)
            if own is not None:
                self._own[index] = self._own[index] + own if index in self._own else own
        self._received_in_pass.clear()
        # Taken down here, so that a parameter that is frozen later keeps its room.
        self._was_trainable |= self.unit.trainable()

    def window_slots(self) -> list[Slot]:
        """Return the layout of what all ranks reduce: every parameter that is
        trainable, or was in an earlier pass, also if this rank did not use the unit at
        all."""
        return self.unit.layout(self.unit.trainable() | self._was_trainable)

    # Collecting

    def add(self, reduced: Tensor) -> None:
        """Add one micro-batch's flat sum over the partition group, which is taken over.

        Raises:
            RuntimeError: the unit's sum is in flight already.
        """
        # FSDP2 took its memory on another stream, and the last reference to it may go
        # while this stream has not read it yet: FSDP2's when it is added to the sum,
        # ours when a wider sum takes its place.
        streams.used_here(reduced)
        slots = self.unit.layout(self._reduced)
        # The hook gets a tensor without a layout, which follows from what was reduced.
        if not slots or slots[-1].offset + slots[-1].padded != reduced.numel():
            raise AssertionError(
                f"unit {self.unit.name!r}: a gradient of {reduced.numel()} elements fits no layout"
            )
        if self.phase is Phase.IN_FLIGHT:
            # FSDP2 reduces once more when an output gets its gradient after that of the
            # unit's inputs is complete.
            if reduced.any():
                raise RuntimeError(TOO_LATE % self.unit.name)
        elif self.flat is None:
            # FSDP2 makes ``.grad`` views of this very tensor; they are dropped when the
            # pass ends: no copy is needed.
            self.slots, self.flat, self.phase = slots, reduced, Phase.COLLECTING
        elif slots == self.slots:
            self.flat += reduced
        else:
            # Parameters became trainable, or were frozen, since the micro-batch before.
            self._widen(slots)
            _add_by_slot(self.flat, self.slots, reduced, slots)

    def complete(self) -> None:
        """Let nothing be added to the sum any more, if anything was."""
        if self.phase is Phase.COLLECTING:
            self.phase = Phase.COMPLETE

    def drop(self, indices: set[int], set_to_none: bool) -> None:
        """Drop what is held of these parameters, and forget that they received
        gradients; or (``set_to_none=False``) leave it at zero."""
        self.unit.drop_held(indices, set_to_none)
        # What is made of shards is no part of the sum.
        for index in indices:
            self._own.pop(index, None)
        if set_to_none:
            self.received -= indices
        # The layout of the sum stays: its elements become zeros.
        for slot in self.slots:
            if slot.index in indices:
                assert self.flat is not None
                self.flat[slot.offset : slot.offset + slot.padded] = 0

    def received_all(self) -> bool:
        """Return whether this rank has a gradient of every parameter in the sum, if
        there is one."""
        return all(slot.index in self.received for slot in self.slots)

    # In flight

    def send(self) -> None:
        """Start adding up over replicas; zeros, where this rank did not use the
        unit."""
        # Over one replica the sum is complete as it is.
        if not self.route.adds_up:
            return
        slots = self.window_slots()
        # Other replicas have used the unit: this one adds nothing.
        if self.flat is None:
            self.slots, self.flat = (
                slots,
                self.unit.zeros(slots, slots[-1].offset + slots[-1].padded),
            )
        # All replicas send the same layout, that of all parameters trained in the
        # window.
        self._widen(slots)
        # And masters have had their place since they were made, also for what is frozen
        # now.
        if self._over_world:
            self._widen(self._slots_of_masters())
        self._start(self.flat)

    def send_zeros(self, n_elements: int) -> None:
        """Send as many elements as another replica did, which are added up and
        dropped."""
        if self.phase is not Phase.IN_FLIGHT:
            self.flat = self.unit.zeros(self.window_slots(), n_elements)
            self._start(self.flat)

    def wait(self) -> None:
        """Wait until what is in flight has arrived."""
        if self._pending is not None:
            self._pending.wait()

    def _start(self, flat: Tensor) -> None:
        self.phase = Phase.IN_FLIGHT
        if self.masters is None:
            self._pending = self.route.hop(flat, self.unit.name)
        else:
            self.masters.send(flat, self.unit.name)
            self._pending = self.masters

    # Gradients

    def divide(self, seen: Sequence[bool] | None) -> Tensor | None:
        """Divide the sum, and give it to the masters, where there are any.

        Args:
            seen: for each parameter of the unit whether any rank has a gradient of it;
                None: all of them.

        Returns:
            the mean, on the device of the parameters' shards (a copy to the host may
            still be on its way); None where masters have it, or there is no sum.
        """
        if self.flat is None:
            return None
        # Masters get their part of the mean, with what hooks make of it. Parameters that
        # received nothing but a term made of shards come in finish_own_gradients.
        if self.masters is not None:
            flags = None if seen is None else [seen[slot.index] for slot in self.slots]
            own = {
                i: self._own.pop(slot.index)
                for i, slot in enumerate(self.slots)
                if slot.index in self._own and (flags is None or flags[i])
            }
            self.masters.set_gradients(self.route.divisor, flags, own)
            return None
        # In place: the mean takes no memory of its own.
        self.flat /= self.route.divisor
        flat, self.flat = self.flat, None
        return self.unit.beside_parameters(flat)

    def set_gradients(self, mean: Tensor, seen: Sequence[bool] | None) -> None:
        """Put a mean of :meth:`divide` into ``.grad``, added to the gradients of an
        earlier closed pass of the step."""
        parameters = self.unit.parameters()
        # A parameter that no rank has a gradient of keeps its .grad.
        slots = [slot for slot in self.slots if seen is None or seen[slot.index]]
        for index, gradient in self.unit.local_gradients(slots, mean):
            self._add_gradient(parameters[index], index, gradient)

    def _add_gradient(self, parameter: nn.Parameter, index: int, gradient: Any) -> None:
        # Hooks see one gradient: the sum's and that of terms made of shards.
        if index in self._own:
            gradient = gradient + self._own.pop(index)
        hooks = hooks_of(parameter)
        changed: Any = hooks.change(gradient) if hooks else gradient
        _accumulate(parameter, changed)

    def take_own_gradients(self) -> None:
        """Let gradients of terms of the loss that are made of shards be those of their
        parameters, or of their masters; of parameters with hooks, together with the
        others."""
        parameters = self.unit.parameters()
        # A hook is called once for a gradient, so those with hooks wait for the sum.
        for index in [index for index in self._own if not hooks_of(parameters[index])]:
            self._add_gradient(parameters[index], index, self._own.pop(index))
        if self.masters is not None:
            self.masters.take_gradients()

    def finish_own_gradients(self) -> None:
        """Let hooks see gradients of terms that are made of shards, of parameters that
        received no other."""
        parameters = self.unit.parameters()
        for index in list(self._own):
            self._add_gradient(parameters[index], index, self._own.pop(index))
        if self.masters is not None:
            self.masters.take_gradients()

    def forget(self) -> None:
        """Become idle: nothing of this window is left."""
        self._before.clear()
        self._own.clear()
        self.slots, self.flat, self._pending, self.phase = [], None, None, Phase.IDLE
        for noted in (self.received, self._received_in_pass, self._was_trainable):
            noted.clear()
        self.uses_left = 0
        self.unit.forget_held()

    # Layout of the sum

    def make_masters(self, on_host: bool, stored_as_gathered: bool) -> FlatShard | None:
        """Scatter the sum over replicas from now on, into gradients of masters.

        Args:
            on_host: masters live in host memory.
            stored_as_gathered: float32 parameters are stored in what they are computed
                with from now on.

        Returns:
            the masters; None: nothing of the unit is trainable.
        """
        self._over_world = True
        slots, parameters = self.window_slots(), self.unit.parameters()
        # What is frozen when the optimizer is made has no master.
        if not slots:
            return None
        members = [slot.index for slot in slots]
        names = [self.unit.names[index] for index in members]
        trainable = [parameters[index] for index in members]
        sizes = [slot.padded for slot in slots]
        self.masters = FlatShard(names, trainable, sizes, self.route.hop, on_host)
        computes_in = self.unit.computes_in
        # FSDP2 gathers in this dtype anyway; masters keep the float32 values.
        if (
            stored_as_gathered
            and computes_in is not None
            and parameters[members[0]].dtype == torch.float32
        ):
            self.unit.store_in(computes_in, members)
            self.masters.holds_weights = True
        return self.masters

    def _slots_of_masters(self) -> list[Slot]:
        held = () if self.masters is None else self.masters.names
        names = self.unit.names
        # Its place in the sum has no part in any master.
        for slot in self.slots:
            if names[slot.index] not in held:
                raise ValueError(
                    f"optimizer_shard='world': {names[slot.index]} was frozen when the optimizer was made and has no "
                    "master to step; make it trainable before, or write optimizer_shard='shard'"
                )
        index = {name: i for i, name in enumerate(names)}
        return self.unit.layout({index[name] for name in held})

    def _widen(self, more: list[Slot]) -> None:
        """Make room for parameters that were frozen or unused in earlier
        micro-batches."""
        # In the order of indices, whichever micro-batch brought which parameter.
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


def _set_aside(
    owner: weakref.ref[UnitWindow], index: int, gradient: Tensor
) -> Tensor | None:
    """Set ``.grad`` aside, when a term of the loss that is made of shards has a gradient
    of the parameter: autograd would add one that is replicated to one that is not,
    which torch refuses."""
    window = owner()
    # The window is gone, and nothing will ask for the gradient.
    if window is None:
        return None
    parameter = window.unit.parameters()[index]
    if index not in window._before:
        # The first such gradient of the pass, which may be all that the window hears
        # of it.
        window._on_backward()
        window._before[index], parameter.grad = parameter.grad, None
    # Each rank has a gradient of the same term: their mean is one process's.
    return (
        sharded_mean(gradient, Placed.of(parameter))
        if isinstance(parameter, DTensor)
        else None
    )


def _add_by_slot(
    target: Tensor, target_slots: list[Slot], source: Tensor, slots: list[Slot]
) -> None:
    where = {slot.index: slot.offset for slot in target_slots}
    for slot in slots:
        start = where[slot.index]
        target[start : start + slot.padded] += source[
            slot.offset : slot.offset + slot.padded
        ]


def _accumulate(parameter: nn.Parameter, gradient: DTensor) -> None:
    take_part_of_gradient(parameter)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        # In place: an optimizer, or a user, may hold the gradient.
        assert isinstance(parameter.grad, DTensor)
        parameter.grad.to_local().add_(gradient.to_local())

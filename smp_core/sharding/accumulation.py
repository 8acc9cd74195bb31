"""Two-hop gradient synchronisation and its window (MiCS, arXiv 2205.00119, section 3.4).

A window is the micro-batches of one optimizer step. Hop one: FSDP2 reduce-scatters every micro-batch's gradients inside
the partition group and hands the unit's flat sum to our hook, which adds it to the unit's partial sum. Hop two: in the
window's last backward pass each unit's partial sum is added up across replicas as soon as it is complete, behind the
rest of the pass; when the pass ends the sums are divided by the number of ranks and become ``.grad``. (Context ranks
included: each has its tokens' part of the loss, and the loss is the mean over ranks of these parts.)

Sums are sent in one order on all ranks, last unit of the model first, whatever order backward finishes them in:
replicas may take different ways through the model, and messages are matched by order alone. So a unit waits for those
before it; it is sent once, when backward has come through its last use and every one of its trainable parameters has
its gradient, otherwise at the end of the pass; and one that only other replicas used sends zeros. (Inside a partition
group all ranks have to use the same units: FSDP2 gathers when a unit runs.)

Between micro-batches ``.grad`` is what it was before the window: nothing half-summed can be clipped, logged or saved.

Where parameters stay gathered between micro-batches (``keep_gathered``) they are freed in the window's last backward
pass, unit by unit, and whenever a window ends in another way: what the optimizer steps is sharded, and nothing may
compute with weights from before a step.

Where units hold whole gradients (``hold_gradients``) hop one, too, is taken once, in the window's last backward pass,
or when the window is closed by hand.

A parameter that no rank reached keeps its ``.grad`` (None, as in one process, so that weight decay leaves it alone);
one that only other ranks reached gets their gradient. Ranks tell each other which they reached once per window.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.comm.traffic import Traffic
from smp_core.planning.decide import Plan
from smp_core.sharding.fsdp import (
    FAILED_PASS,
    Calls,
    ShardedUnit,
    Slot,
    at_end_of_backward,
    backward_pass,
    forget_passes,
    reshard,
)
from smp_core.sharding.optimizer import FlatShard, WorldSharding, model_parameter
from smp_core.sharding.reached import reached_all, tell_what_was_reached
from smp_core.sharding.replicated import ReplicatedGradients
from smp_core.sharding.unit_sum import UnitSum

logger = logging.getLogger("smp")

# Other ranks of the partition group can have taken a way through the unit on which its parameters are used later.
TOO_LATE = (
    "unit %r: gradients came after its sum had been sent to the other replicas, because ranks of one partition group "
    "took different ways through it; let all of them use the same parameters, or run this backward pass inside "
    "window.accumulate() and call window.close() after it"
)


class AccumulationWindow:
    """Owns the gradients between the first micro-batch of an optimizer step and the step.

    Every backward pass is the window's last unless it runs inside :meth:`accumulate`. ``close`` is called by the last
    pass itself; call it by hand only to end a window whose micro-batches all ran inside ``accumulate``.

    Args:
        model: that the gradients are of.
        units: its sharded units.
        traffic: what adds up over the replication group, and over all ranks whose gradients are added up.
        plan: its knobs and dtypes.
        calls: told about passes that leave units gathered for the window's next one.
        veto: asked when the window closes: a 0-d bool tensor, whether this rank wants the window's gradients dropped.
            If any rank does, ``.grad`` is None everywhere after it, so that the optimizer step changes nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ShardedUnit],
        traffic: Traffic,
        plan: Plan,
        calls: Calls,
        veto: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        mesh, knobs = traffic.mesh, plan.knobs
        by_name = dict(model.named_parameters())
        replicated = [{name: by_name[name] for name in names} for names in plan.replicated_parameters]
        self._on_close = traffic.step_done
        self._on_kept = functools.partial(calls.show_shards, kept=True)
        self._keep_gathered = not knobs.reshard_after_backward
        self._hold_gradients = not knobs.reduce_every_micro_batch
        self._first_window = True
        self._stored_in = plan.dtypes.stored
        self._over_world = knobs.optimizer_shard == "world"
        self._units = list(units)
        self._veto = veto
        self._mesh = mesh
        self._hop = traffic.hop
        self._sums = [UnitSum() for _ in self._units]
        self._next = 0  # the unit whose sum is sent next
        self._replicated = ReplicatedGradients(
            replicated, mesh, traffic.world_hop, plan.dtypes.reduced, self._queue_end
        )
        self._last = True
        self._running_pass: int | None = None
        self._reducing_held = False
        self._dropped: set[int] = set()  # ids of parameters, since the last backward pass
        self.world: WorldSharding | None = None
        """Masters of this rank's part, where optimizer states are sharded over the world."""
        self.micro_batches = 0
        """Backward passes whose gradients are held and not closed yet."""
        for number, unit in enumerate(self._units):
            unit.module.set_all_reduce_hook(self._hook(number))  # type: ignore[operator]

    def shard_over_world(self, on_host: bool = False) -> WorldSharding:
        """From now on sums are scattered over replicas, and gradients are those of masters
        (:mod:`smp_core.sharding.optimizer`; ``on_host``: see there). What is trainable now can be trained."""
        if self.world is None:
            units = {}
            for number, unit in enumerate(self._units):
                slots, parameters = unit.window_slots(), unit.parameters()
                if slots:
                    units[number] = FlatShard(
                        [unit.names[slot.index] for slot in slots],
                        [parameters[slot.index] for slot in slots],
                        [slot.padded for slot in slots],
                        self._hop,
                        on_host,
                    )
                    if self._stored_in is not None and parameters[slots[0].index].dtype == torch.float32:
                        unit.store_in(self._stored_in, [slot.index for slot in slots])
                        units[number].holds_weights = True
            plain = self._replicated.shard_over_world(on_host) if self._mesh.shard_degree == 1 else {}
            self.world = WorldSharding(units, plain)
        return self.world

    @property
    def is_open(self) -> bool:
        """Whether gradients are held that no ``.grad`` shows yet."""
        return self.micro_batches > 0

    def held_bytes(self) -> int:
        """Bytes of partial sums, of whole gradients and of masters' gradients: what no parameter's ``.grad`` shows."""
        sums = sum(each.flat.numel() * each.flat.element_size() for each in self._sums if each.flat is not None)
        parts = [] if self.world is None else self.world.shards
        return sums + sum(unit.held_bytes() for unit in self._units) + sum(shard.gradient_bytes for shard in parts)

    @contextlib.contextmanager
    def accumulate(self, enabled: bool = True) -> Iterator[None]:
        """Backward passes inside are not the window's last: no replica hop, no ``.grad``."""
        before = self._last
        self._announce(before and not enabled)
        try:
            yield
        finally:
            self._announce(before)

    def _announce(self, last: bool) -> None:
        """Whether the backward passes from here on are their window's last."""
        self._last = last
        for unit in self._units:
            if self._keep_gathered:
                unit.module.set_reshard_after_backward(last, recurse=False)  # type: ignore[operator]
            if self._hold_gradients:
                unit.hold_gradients(None if last else self._queue_end)

    @torch.no_grad()
    def close(self) -> None:
        """Reduce across replicas, divide, and set ``.grad``; a closed window is left as it is. Collective."""
        if not self.is_open:
            return
        self._say_what_had_no_effect()
        if self._over_world and self.world is None:
            raise ValueError(
                "optimizer_shard='world': there is no optimizer yet whose states could be sharded; call "
                "parallel.prepare_optimizer(optimizer) before the first backward pass"
            )
        self._reduce_held()
        for unit_sum in self._sums:
            unit_sum.complete = unit_sum.flat is not None
        self._send_complete()
        reached, telling = tell_what_was_reached(self._units, self._sums, self._replicated, self._mesh, self._veto)
        if self._next < len(self._units):
            if telling is not None:
                telling.wait()
            self._send_the_rest(reached.tolist()[-len(self._units) - 1 : -1])
        # Behind all units on every rank: stages of this hop may share groups with theirs.
        self._replicated.send()
        for unit_sum in self._sums:
            if unit_sum.in_flight is not None:
                unit_sum.in_flight.wait()
        if telling is not None:
            telling.wait()
        if self._veto is not None and bool(reached[-1]):
            self._replicated.finish(None)  # what is in flight arrives first
            self._drop_gradients()
            return
        seen = None if reached_all(self._units, self._sums, self._replicated) else reached.cpu()
        position = 0
        flats: list[tuple[int, ShardedUnit, list[Slot], torch.Tensor]] = []
        for number, (unit, unit_sum) in enumerate(zip(self._units, self._sums, strict=True)):
            count = len(unit.parameters())
            if self.world is not None and unit_sum.flat is not None:
                indices = [slot.index for slot in unit_sum.slots]
                flags = None if seen is None else [bool(seen[position + index]) for index in indices]
                self.world.units[number].set_gradients(self._mesh.gradient_degree, flags)
            elif unit_sum.flat is not None:
                unit_sum.flat /= self._mesh.gradient_degree
                flats.append((position, unit, unit_sum.slots, unit.beside_parameters(unit_sum.flat)))
                unit_sum.flat = None
            position += count
        self._settle_own_gradients()
        if any(flat.device.type != self._mesh.device.type for _, _, _, flat in flats):
            torch.accelerator.synchronize()  # offloaded gradients are on their way to the host
        for first, unit, slots, flat in flats:
            parameters = unit.parameters()
            for slot in slots:
                if seen is None or seen[first + slot.index]:
                    _accumulate(parameters[slot.index], unit.local_gradient(slot, flat))
        plain = self._replicated.parameters
        self._replicated.finish(None if seen is None else dict(zip(plain, seen[position:].tolist(), strict=False)))
        self._forget()
        self._on_close()

    def _settle_own_gradients(self) -> None:
        """Gradients that autograd left in ``.grad`` itself, of terms of the loss that are made of shards: sharded like
        their parameters (torch may leave them replicated), and those of masters are the masters'."""
        for unit in self._units:
            for parameter in unit.parameters():
                gradient = parameter.grad
                if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
                    if gradient.placements != parameter.placements:
                        parameter.grad = gradient.redistribute(placements=parameter.placements)
        for shard in [] if self.world is None else self.world.units.values():
            shard.take_gradients()

    @torch.no_grad()
    def abandon(self) -> None:
        """Drop the window's gradients, held and closed: nothing of it reaches the next step, also when a forward or
        backward pass failed in the middle (on all ranks). What was gathered is sharded again. Collective."""
        self._await_sums()
        forget_passes(self._units)
        self._drop_gradients()

    @torch.no_grad()
    def drop(self, parameters: Iterable[torch.Tensor], set_to_none: bool = True) -> None:
        """Drop what the window holds of these parameters: what ``zero_grad`` of an optimizer or a module
        means in its middle. When all that it can hold has been dropped it is closed: on all ranks, whatever each of
        them reached.

        Args:
            set_to_none: as ``zero_grad`` has it; False: parameters that were reached have a gradient all the same.
        """
        if not self.is_open:
            return
        dropped = {id(model_parameter(parameter)) for parameter in parameters}
        held = {id(self._replicated.parameters[name]) for name in self._replicated.taking_part()}
        for unit, unit_sum in zip(self._units, self._sums, strict=True):
            gone = unit.indices(dropped)
            members = unit.parameters()
            dropped |= {id(members[index]) for index in gone}
            held |= {id(members[slot.index]) for slot in unit.window_slots()}
            for slot in unit_sum.slots:
                if slot.index in gone:
                    assert unit_sum.flat is not None
                    unit_sum.flat[slot.offset : slot.offset + slot.padded] = 0
            unit.drop_gradients(gone, set_to_none)
        self._replicated.drop(dropped, set_to_none)
        if set_to_none:
            self._dropped |= dropped
            if held <= self._dropped:
                self._forget()

    def zero_grad(self, parameters: Iterable[torch.Tensor], set_to_none: bool = True) -> None:
        """What ``zero_grad`` of a module means beside what it does to ``.grad`` of its parameters: drop what the open
        window holds of them, and gradients of their masters."""
        parameters = list(parameters)
        self.drop(parameters, set_to_none)
        for stepped in [] if self.world is None else self.world.stepped(parameters):
            if set_to_none or stepped.grad is None:
                stepped.grad = None
            else:
                stepped.grad.zero_()

    def _drop_gradients(self) -> None:
        for parameter in [p for unit in self._units for p in unit.parameters()]:
            parameter.grad = None
        for parameter in self._replicated.parameters.values():
            parameter.grad = None
        for shard in [] if self.world is None else self.world.shards:
            shard.forget()
        self._forget()

    def _say_what_had_no_effect(self) -> None:
        """Once: how many micro-batches there are shows only when a window has come to its end."""
        asked = [
            (self._keep_gathered, "reshard_after_backward=false", "gathers"),
            (self._hold_gradients, "reduce_every_micro_batch=false", "reductions"),
        ]
        for is_asked, knob, saved in asked:
            if is_asked and self._first_window and self.micro_batches == 1 and self._mesh.rank == 0:
                logger.warning(
                    "%s had no effect on the first optimizer step, which had one micro-batch; it saves %s with "
                    "accumulate_grad_batches (Lightning), gradient_accumulation_steps (Accelerate) or "
                    "window.accumulate()",
                    *(knob, saved),
                )
        self._first_window = False

    def _forget(self) -> None:
        if self._keep_gathered:
            reshard(unit.module for unit in self._units)
        self._sums = [UnitSum() for _ in self._units]
        self._next = 0
        self._replicated.forget()
        for unit in self._units:
            unit.end_of_window()
        self._running_pass = None
        self._dropped.clear()
        self.micro_batches = 0

    def _hook(self, number: int):  # type: ignore[no-untyped-def]
        unit = self._units[number]

        @torch.no_grad()
        def hook(reduced: torch.Tensor) -> None:
            if not self._reducing_held:
                self._queue_end()
            unit_sum = self._sums[number]
            slots = unit.slots(reduced.numel())
            if unit_sum.in_flight is not None:
                # FSDP2 reduces once more when an output gets its gradient after that of the unit's inputs is complete.
                if reduced.any():
                    raise RuntimeError(TOO_LATE % unit.name)
                return
            unit_sum.add(slots, reduced)
            if self._last and unit.is_complete():
                unit_sum.complete = True
                self._send_complete()

        return hook

    def _queue_end(self) -> None:
        this_pass = backward_pass()
        if self._running_pass == this_pass:
            return
        if self._running_pass is not None:
            raise RuntimeError(FAILED_PASS)
        self._running_pass = this_pass
        at_end_of_backward(self._end_of_backward)

    @torch.no_grad()
    def _end_of_backward(self) -> None:
        self._running_pass = None
        self._dropped.clear()
        self.micro_batches += 1
        for unit in self._units:
            unit.end_of_pass()
        self._replicated.end_of_pass()
        if self._last:
            self.close()
        elif self._keep_gathered:
            self._on_kept()

    def _reduce_held(self) -> None:
        """What the last backward pass did not come through, or all of it if there was none."""
        self._reducing_held = True
        try:
            for unit in self._units:
                if unit.awaits_reduction:
                    unit.reduce_held()
        finally:
            self._reducing_held = False

    def _await_sums(self) -> None:
        """What any replica has sent arrives: the others send as much, or it would meet sums of the next window."""
        if self._mesh.replicate_degree == 1 or not self._units:
            return
        in_flight = [None if each.in_flight is None else each.flat for each in self._sums]
        sent = torch.tensor([0 if flat is None else flat.numel() for flat in in_flight], device=self._mesh.device)
        dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=self._mesh.gradient_group)
        for number, size in enumerate(sent.tolist()):
            unit_sum = self._sums[number]
            if size and unit_sum.in_flight is None:
                unit_sum.flat = self._units[number].zeros(size)
                self._start(number, unit_sum)
        for unit_sum in self._sums:
            if unit_sum.in_flight is not None:
                unit_sum.in_flight.wait()

    def _send_complete(self) -> None:
        while self._next < len(self._units):
            if self._sums[self._next].complete:
                self._send(self._next)
            elif self._units[self._next].window_slots():
                return
            self._next += 1

    def _send_the_rest(self, held_somewhere: Sequence[int]) -> None:
        """From the first unit on that this rank has no sum of."""
        for number in range(self._next, len(self._units)):
            if held_somewhere[number]:
                self._send(number)
        self._next = len(self._units)

    def _send(self, number: int) -> None:
        if self._mesh.replicate_degree == 1:
            return
        unit_sum, slots = self._sums[number], self._units[number].window_slots()
        if unit_sum.flat is None:
            unit_sum.slots = slots
            unit_sum.flat = self._units[number].zeros(slots[-1].offset + slots[-1].padded)
        unit_sum.widen(slots)
        if self.world is not None:
            self._widen_to_masters(number, unit_sum)
        self._start(number, unit_sum)

    def _start(self, number: int, unit_sum: UnitSum) -> None:
        assert unit_sum.flat is not None
        name = self._units[number].name
        if self.world is None:
            unit_sum.in_flight = self._hop(unit_sum.flat, name)
        else:
            unit_sum.in_flight = self.world.units[number]
            self.world.units[number].send(unit_sum.flat, name)

    def _widen_to_masters(self, number: int, unit_sum: UnitSum) -> None:
        assert self.world is not None
        unit = self._units[number]
        shard = self.world.units.get(number)
        held = set() if shard is None else set(shard.names)
        new = [unit.names[slot.index] for slot in unit_sum.slots if unit.names[slot.index] not in held]
        if new or shard is None:
            raise ValueError(
                f"optimizer_shard='world': {new[0]} was frozen when the optimizer was made and has no master to step; "
                "make it trainable before, or write optimizer_shard='shard'"
            )
        index = {name: i for i, name in enumerate(unit.names)}
        unit_sum.widen(unit.layout(index[name] for name in shard.names))


def _accumulate(parameter: nn.Parameter, gradient: DTensor) -> None:
    """Add to ``.grad``, which holds the gradients of an earlier closed pass of the same step, if any."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        assert isinstance(parameter.grad, DTensor)
        parameter.grad.to_local().add_(gradient.to_local())

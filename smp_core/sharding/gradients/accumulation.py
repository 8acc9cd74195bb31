"""Two-hop gradient synchronisation and its window (MiCS, arXiv 2205.00119, section
3.4).

A window is the micro-batches of one optimizer step. Hop one: FSDP2 reduce-scatters
every micro-batch's gradients inside the partition group and hands the unit's flat sum
to our hook, which adds it to the unit's partial sum. Hop two: in the window's last
backward pass each unit's partial sum is added up across replicas as soon as it is
complete, behind the rest of the pass; when the pass ends the sums are divided by the
number of ranks and become ``.grad``. (Context ranks included: each has its tokens' part
of the loss, and the loss is the mean over ranks of these parts.)

Sums are sent in one order on all ranks, last unit of the model first, whatever order
backward finishes them in: replicas may take different ways through the model, and
messages are matched by order alone. So a unit waits for those before it; it is sent
once, when backward has come through its last use and every one of its trainable
parameters has its gradient, otherwise at the end of the pass; and one that only other
replicas used sends zeros. (Inside a partition group all ranks have to use the same
units: FSDP2 gathers when a unit runs.)

Between micro-batches ``.grad`` is what it was before the window: nothing half-summed
can be clipped, logged or saved.

Where parameters stay gathered between micro-batches (``keep_gathered``) they are freed
in the window's last backward pass, unit by unit, and whenever a window ends in another
way: what the optimizer steps is sharded, and nothing may compute with weights from
before a step.

Where units hold whole gradients (``hold_gradients``) hop one, too, is taken once, in
the window's last backward pass, or when the window is closed by hand.

Where parameters have hooks (:mod:`smp_core.sharding.gradients.parameter_hooks`) every
backward pass closes the window, which is open all the same until its last one: each
micro-batch's gradients are complete, and are added up in ``.grad``.

A parameter that no rank reached keeps its ``.grad`` (None, as in one process, so that
weight decay leaves it alone); one that only other ranks reached gets their gradient.
Ranks tell each other which they reached once per window.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.comm import Traffic
from smp_core.outside import changed
from smp_core.plan import Plan, keeps_parameters
from smp_core.sharding.fsdp import (
    FAILED_PASS,
    Calls,
    ShardedUnit,
    at_end_of_backward,
    backward_pass,
    forget_passes,
    outermost_pass,
    reshard,
)
from smp_core.sharding.gradients.divergence import RanksDiverged
from smp_core.sharding.gradients.parameter_hooks import ParameterHooks, hooks_of
from smp_core.sharding.gradients.received_gradients import Told, received_all
from smp_core.sharding.gradients.replicated import ReplicatedGradients
from smp_core.sharding.gradients.unit_window import UnitWindow
from smp_core.sharding.optimizer.shards import WorldSharding
from smp_core.torch_facts import clean_name, model_parameter
from smp_core.watch import here, meet

logger = logging.getLogger("smp")

_ATTACHED = (
    "{} was attached to the model after it was sharded, and is trained before an optimizer was prepared for it: ranks "
    "may have begun with other values, and nothing adds its gradients up. Gradients of the window are dropped. "
    "Before its first forward pass prepare, on all ranks, the optimizer that steps it (accelerator.prepare(optimizer), "
    "parallel.prepare_optimizer(optimizer), optimizer.add_param_group), or freeze it (parameter.requires_grad_(False))"
)

_windows: weakref.WeakKeyDictionary[AccumulationWindow, None] = (
    weakref.WeakKeyDictionary()
)
"""In the order in which they were made, which is the same on all ranks."""

_UNHEARD = (
    "a backward pass has left gradients in {unit} and did not come through it: its output is a view that was written "
    "into behind it, of which FSDP2 loses sight. Write x = x + y for x += y, or return x.clone() from it."
)


class AccumulationWindow:
    """Owns the gradients between the first micro-batch of an optimizer step and the
    step.

    Every backward pass is the window's last unless it runs inside :meth:`accumulate`.
    ``close`` is called by the last pass itself; call it by hand only to end a window
    whose micro-batches all ran inside ``accumulate``.

    Args:
        model: that the gradients are of.
        units: its sharded units.
        traffic: what adds up over the replication group, and over all ranks whose
            gradients are added up.
        plan: its knobs and dtypes.
        calls: shows shards after passes that leave units gathered for the next one.
        veto: called when the window closes; returns whether this rank wants the
            window's gradients dropped, as a 0-d bool tensor. If any rank does,
            ``.grad`` is None everywhere after it, so that the optimizer step changes
            nothing.
        finishing: entered around setting ``.grad``; adds what other stages have of tied
            parameters.
        has_hooks: False: no parameter had hooks when it was prepared, of any pipeline
            stage.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ShardedUnit],
        traffic: Traffic,
        plan: Plan,
        calls: Calls,
        veto: Callable[[], torch.Tensor] | None = None,
        finishing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        has_hooks: bool = True,
    ) -> None:
        # What is reduced together, by group: the same order on all ranks.
        mesh, knobs = traffic.mesh, plan.knobs
        by_name = dict(model.named_parameters())
        # With pipeline stages all parameters count: stages end a window together.
        self._of_all_stages = list(by_name.values()) if mesh.pipeline_degree > 1 else []
        self._model = model
        self._on_close = traffic.step_done
        self._calls = calls
        self._kept = knobs.keep_between_micro_batches
        self._keep_gathered = keeps_parameters(knobs)
        self._hold_gradients = self._kept == "gradients"
        self._first_window = True
        self._stored_as_gathered = plan.dtypes.stored_as_gathered
        self._over_world = knobs.optimizer_shard == "world"
        self._veto = veto
        self._finishing = finishing
        self._hooks_on_any_stage = has_hooks and mesh.pipeline_degree > 1
        self._mesh = mesh
        # It tells collectives of a forward from those of a backward pass.
        self._issued = traffic.issued
        self._issued.backward_pass = backward_pass
        # Units and plain parameters report each pass that reaches them.
        self._units = [
            UnitWindow(unit, traffic.route_of(unit), mesh, self._queue_end)
            for unit in units
        ]
        self._next = 0  # the unit whose sum is sent next
        self._replicated = ReplicatedGradients(
            traffic.of_replicated, plan.dtypes.reduced, self._queue_end, mesh
        )
        for names in filter(None, plan.replicated_parameters):
            self._replicated.add({name: by_name[name] for name in names})
        self._last = True
        # The outermost pass that comes through the model; None between passes.
        self._running_pass: int | None = None
        # A reentrant checkpoint runs passes of its own within it.
        self._is_nested = False
        self._is_first = True  # of the models that the pass comes through
        # FSDP2 calls the hook of a unit for held gradients too, outside of any pass.
        self._reducing_held = False
        # Ids of parameters, since the last backward pass.
        self._dropped: set[int] = set()
        self.world: WorldSharding | None = None
        """Masters of this rank's part, where optimizer states are sharded over the
        world."""
        # Whether the window is open though no pass of it has left gradients here.
        self._took_part = False
        # Whether a veto has dropped a micro-batch: the window's other ones go with it.
        self._gave_up = False
        # Inside batch_in_stages, which closes a micro-batch for all stages together.
        self._in_stages = False
        self.micro_batches = 0
        """Backward passes whose gradients are held and not closed yet."""
        # Whether micro-batches are closed for hooks of parameters, as all ranks knew
        # when they last compared.
        self._closes_each = has_hooks and bool(self._hooked())
        for each in self._units:
            hook = functools.partial(self._take_sum, each)
            each.unit.module.set_all_reduce_hook(hook)  # type: ignore[operator]
        _windows[self] = None

    def shard_over_world(self, on_host: bool = False) -> WorldSharding:
        """Scatter sums over replicas from now on, into gradients of masters
        (:mod:`smp_core.sharding.optimizer.shards`; ``on_host``: see there). What is
        trainable now can be trained."""
        if self.world is None:
            self._refuse_hooks_that_follow(self._hooked())
            made = [
                each.make_masters(on_host, self._stored_as_gathered)
                for each in self._units
            ]
            # Without a partition group it is replicated parameters that are scattered.
            plain = (
                self._replicated.shard_over_world(on_host)
                if self._mesh.shard_degree == 1
                else []
            )
            self.world = WorldSharding(
                [*(shard for shard in made if shard is not None), *plain]
            )
        return self.world

    def attached(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name, in the order of names, that the model got
        since it was sharded, and whose gradients nothing adds up yet."""
        # Copies count too: inside a call modules show them in the place of shards.
        known = {id(parameter) for parameter in self._replicated.parameters.values()}
        for each in self._units:
            known.update(map(id, each.unit.copies()))  # which modules may show
        named = sorted(self._model.named_parameters(), key=lambda pair: pair[0])
        return {
            clean_name(name): parameter
            for name, parameter in named
            if not isinstance(parameter, DTensor) and id(parameter) not in known
        }

    def add_replicated(self, attached: Mapping[str, nn.Parameter]) -> None:
        """Add gradients of these parameters up over all ranks, too, from the next
        backward pass on."""
        self._replicated.add(attached)

    @property
    def is_open(self) -> bool:
        """Return whether gradients are held that no ``.grad`` shows yet."""
        return self.micro_batches > 0 or self._took_part

    def held(self) -> list[torch.Tensor]:
        """List the partial sums, unsharded gradients and masters' gradients: what no
        parameter's ``.grad`` shows."""
        found = [tensor for each in self._units for tensor in each.held()]
        for shard in [] if self.world is None else self.world.shards:
            found += shard.gradients()
        return found

    def held_bytes(self) -> int:
        """Return the bytes of :meth:`held`."""
        return sum(tensor.nbytes for tensor in self.held())

    @contextlib.contextmanager
    def accumulate(self, enabled: bool = True) -> Iterator[None]:
        """Treat backward passes inside as not the window's last: no replica all-reduce,
        no ``.grad``."""
        # Put back rather than set to True: these contexts nest.
        before = self._last
        self._announce(before and not enabled)
        try:
            yield
        finally:
            self._announce(before)

    @contextlib.contextmanager
    def batch_in_stages(self) -> Iterator[None]:
        """Take part in a batch of all pipeline stages, as in :meth:`accumulate`; what a
        forward gathers is kept for the next. The window is open afterwards, for all
        stages to close, also where one has nothing to train."""
        with changed(self, _in_stages=True), self.accumulate(), self._calls.ahead():
            yield
        if not self._keep_gathered:
            # Nothing is left for an optimizer step to make stale.
            reshard(each.unit.module for each in self._units)
        self._took_part = True
        # A stage with nothing to train has no backward pass whose end would do it.
        self._dropped.clear()
        if self._hooks_on_any_stage:
            self._close_micro_batch()

    def _announce(self, last: bool) -> None:
        """Set for all units whether backward passes from here on are their window's
        last."""
        self._last = last
        for each in self._units:
            # FSDP2 is to free a unit behind the window's last backward pass only.
            if self._keep_gathered:
                each.unit.module.set_reshard_after_backward(last, recurse=False)  # type: ignore[operator]
            # Held gradients are reduced together with those of the last pass.
            if self._hold_gradients:
                each.hold(None if last else self._queue_end)

    @torch.no_grad()
    def close(self) -> None:
        """Reduce across replicas, divide, and set ``.grad``; a closed window is left as
        it is. Collective.

        Raises:
            RanksDiverged: ranks of one partition group issued different collectives, or
                ranks train different parameters; on all ranks, and ``.grad`` is None
                everywhere.
            ValueError: a backward pass came through no unit, and left gradients in one.
        """
        if self.is_open:
            self._close()
            self._gave_up = False
            return
        # No hook has heard of that pass: in silence its gradients would miss the step.
        for each in self._units:
            if each.unit.unsharded_gradients() and not each.unit.is_passed_by:
                raise ValueError(_UNHEARD.format(unit=each.unit.name or "the model"))

    @torch.no_grad()
    def refuse_attached(self) -> None:
        """Close the window, open or not, where this rank's optimizer steps what was
        attached and never taken in: if nothing else was trained, the window has not
        noticed the backward pass. Collective.

        Raises:
            RanksDiverged, ValueError: on all ranks; gradients are dropped.
        """
        if any(parameter.grad is not None for parameter in self.attached().values()):
            self._close()

    def _close_micro_batch(self) -> None:
        """Complete the gradients of a micro-batch for hooks of parameters; the window
        goes on.

        A rank that has hooks since the last close finds out whether the others have,
        which otherwise are in their next forward and wait for its part of the
        parameters. Where a rank has none any more, ranks compare that as they close.
        """
        # Hooks may have been registered since the last micro-batch, on this rank first.
        hooked = list(self._hooked())
        if hooked and not self._closes_each:
            meet(f"{hooked[0]}.register_hook(...)", self._mesh.shard_ranks)
        if self._first_window and self._mesh.rank == 0:
            logger.info(
                "parameters have hooks (%s), which see complete gradients: those of each micro-batch are summed over "
                "all ranks",
                ", ".join(hooked[:3]),
            )
        self._close()
        self._took_part = True

    def _hooked(self) -> dict[str, tuple[nn.Parameter, ParameterHooks]]:
        """Return the parameters that have hooks now."""
        named = [
            pair
            for each in self._units
            for pair in zip(each.unit.names, each.unit.parameters(), strict=True)
        ]
        named += self._replicated.parameters.items()
        return {
            name: (parameter, hooks)
            for name, parameter in named
            if (hooks := hooks_of(parameter))
        }

    def _refuse_hooks_that_follow(
        self, hooked: Mapping[str, tuple[nn.Parameter, ParameterHooks]]
    ) -> None:
        """Refuse hooks that want a parameter's ``.grad``, where there is none."""
        followed = [
            name for name, (_, hooks) in hooked.items() if hooks.follow_accumulation
        ]
        if followed:
            raise ValueError(
                "optimizer_shard='world': gradients belong to masters, and a hook of "
                f"register_post_accumulate_grad_hook ({', '.join(followed[:3])}) would find no .grad; write "
                "optimizer_shard='shard'"
            )

    def _close(self) -> None:
        hooked = self._hooked()
        if self.world is not None:
            self._refuse_hooks_that_follow(hooked)
        self._say_what_had_no_effect()
        # Without masters there is nothing that the scattered sums could go to.
        if self._over_world and self.world is None:
            raise ValueError(
                "optimizer_shard='world': there is no optimizer yet whose states could be sharded; call "
                "parallel.prepare_optimizer(optimizer) before the first backward pass"
            )
        here.windows += 1
        # Phase 1: what is held is reduced and sent, in the order of units on all ranks.
        self._reduce_held()
        for each in self._units:
            each.complete()
        self._send_complete()
        # Phase 2: ranks compare what they have, and whether they mean the same by it.
        attached = [
            name
            for name, parameter in self.attached().items()
            if parameter.requires_grad
        ]
        told = Told(
            self._units,
            self._replicated,
            self._mesh,
            None if self._gave_up else self._veto,
            self._issued,
            attached,
        )
        with here.waiting("the window's end"):
            told.wait()
            diverged = told.divergence()
        # What replicas have sent arrives first: the next window's sums would meet it.
        if diverged is not None:
            self._await_sums()
            self._drop_gradients()
            raise RanksDiverged(diverged)
        if attached:  # the same on all ranks
            self._await_sums()
            self._drop_gradients()
            raise ValueError(_ATTACHED.format(attached[0]))
        self._closes_each = bool(hooked)
        # Phase 3: what only others have is sent as zeros. Then plain parameters, behind
        # all units on every rank: stages of their route may share groups with those of
        # units.
        if self._next < len(self._units):
            self._send_the_rest(told.sums())
        self._replicated.send()
        with here.waiting("sums of gradients over replicas, at the window's end"):
            for each in self._units:
                each.wait()
        # Phase 4: gradients, unless a rank wants none.
        self._gave_up |= self._veto is not None and told.vetoed()
        if self._gave_up:
            self._replicated.wait()
            self._drop_gradients()
            return
        # Only a rank that lacks some gradient reads the flags: that waits for the device.
        seen = None if received_all(self._units, self._replicated) else told.received()
        if hooked:
            # Hooks issue collectives of their own, in one order on all ranks.
            self._replicated.wait()
        with self._finishing():
            self._set_gradients(seen)
        # The first window takes longer than those after it, and sets no measure.
        here.end_window(measured=not self._first_window)
        self._first_window = False
        self._forget()
        self._on_close()
        # Last of all, because these hooks read and edit a complete .grad.
        for parameter, hooks in hooked.values():
            hooks.follow(parameter)

    def _set_gradients(self, seen: Sequence[bool] | None) -> None:
        """Set ``.grad`` from the sums. ``seen``: for every parameter, units' first,
        whether any rank has a gradient of it; None: any rank has one of each."""
        means: list[tuple[UnitWindow, torch.Tensor, Sequence[bool] | None]] = []
        position = 0
        # Gradients of terms that are made of shards are means already.
        for each in self._units:
            each.take_own_gradients()
        # All means are begun before one is used: copies to the host run meanwhile.
        for each in self._units:
            count = len(each.unit.parameters())
            of_unit = None if seen is None else seen[position : position + count]
            mean = each.divide(of_unit)
            if mean is not None:
                means.append((each, mean, of_unit))
            position += count
        if any(mean.device.type != self._mesh.device.type for _, mean, _ in means):
            # Offloaded gradients are on their way to the host.
            torch.accelerator.synchronize()
        for each, mean, of_unit in means:
            each.set_gradients(mean, of_unit)
        # Flags of plain parameters lie behind those of all units.
        plain = self._replicated.parameters
        self._replicated.finish(
            None if seen is None else dict(zip(plain, seen[position:], strict=False))
        )
        for each in self._units:
            each.finish_own_gradients()

    @torch.no_grad()
    def abandon(self) -> None:
        """Drop the window's gradients, held and closed: nothing of it reaches the next
        step, also when a forward or backward pass failed in the middle (on all ranks).
        Unsharded parameters are resharded. Collective."""
        # Messages in flight are matched on every rank before their sums are dropped.
        self._await_sums()
        here.end_window(measured=False)
        self._calls.forget()
        forget_passes(each.unit.module for each in self._units)
        self._drop_gradients()
        self._gave_up = False
        self._issued.forget()

    @torch.no_grad()
    def drop(
        self, parameters: Iterable[torch.Tensor], set_to_none: bool = True
    ) -> None:
        """Drop what the window holds of these parameters: what ``zero_grad`` of an
        optimizer or a module means in its middle. If everything was dropped the window
        ends, on all ranks alike.

        Args:
            set_to_none: as ``zero_grad`` has it; False: parameters that received a
                gradient have one all the same.
        """
        if not self.is_open:
            return
        # A master is dropped as the parameter that it stands for.
        dropped = {id(model_parameter(parameter)) for parameter in parameters}
        held = {
            id(self._replicated.parameters[name])
            for name in self._replicated.taking_part()
        }
        # Parameters of other stages count, so that all stages end the window together.
        held |= {
            id(parameter)
            for parameter in self._of_all_stages
            if parameter.requires_grad
        }
        for each in self._units:
            # An unsharded copy that was named stands for its shard.
            gone, members = each.unit.indices(dropped), each.unit.parameters()
            dropped |= {id(members[index]) for index in gone}
            held |= {id(members[slot.index]) for slot in each.window_slots()}
            each.drop(gone, set_to_none)
        self._replicated.drop(dropped, set_to_none)
        # Zeros are gradients, too: only dropped ones can end the window.
        if set_to_none:
            self._dropped |= dropped
            if held <= self._dropped:
                self._forget()
                self._gave_up = False

    def zero_grad(
        self, parameters: Iterable[torch.Tensor], set_to_none: bool = True
    ) -> None:
        """Drop what the open window holds of the parameters, and gradients of their
        masters, where a module's ``zero_grad`` sees only ``.grad`` of its
        parameters."""
        parameters = list(parameters)
        self.drop(parameters, set_to_none)
        # A closed window's gradients are the masters', which no module knows.
        for stepped in [] if self.world is None else self.world.stepped(parameters):
            if set_to_none or stepped.grad is None:
                stepped.grad = None
            else:
                stepped.grad.zero_()

    def _drop_gradients(self) -> None:
        for parameter in [p for each in self._units for p in each.unit.parameters()]:
            parameter.grad = None
        for parameter in [
            *self._replicated.parameters.values(),
            *self.attached().values(),
        ]:
            parameter.grad = None
        for shard in [] if self.world is None else self.world.shards:
            shard.forget()
        self._forget()

    def _say_what_had_no_effect(self) -> None:
        """Warn once, at the end of the first window: only then it is known how many
        micro-batches there are."""
        saved = ["gathers"] * self._keep_gathered + [
            "reductions"
        ] * self._hold_gradients
        if (
            saved
            and self._first_window
            and self.micro_batches == 1
            and self._mesh.rank == 0
        ):
            logger.warning(
                "keep_between_micro_batches=%r had no effect on the first optimizer step, which had one micro-batch; "
                "it saves %s with accumulate_grad_batches (Lightning), gradient_accumulation_steps (Accelerate) or "
                "window.accumulate()",
                *(self._kept, " and ".join(saved)),
            )

    def _forget(self) -> None:
        # Gathered weights would be those of before the optimizer step.
        if self._keep_gathered:
            reshard(each.unit.module for each in self._units)
        for each in self._units:
            each.forget()
        self._next = 0
        self._replicated.forget()
        self._running_pass, self._is_nested = None, False
        self._dropped.clear()
        self._took_part = False
        self.micro_batches = 0

    @torch.no_grad()
    def _take_sum(self, each: UnitWindow, reduced: torch.Tensor) -> None:
        """Take a unit's flat sum over the partition group, by FSDP2's hook."""
        # A reduction by hand belongs to no pass.
        if not self._reducing_held:
            self._queue_end()
        each.add(reduced)
        # A pass within this one may have more for the unit: its recomputed forwards are
        # not counted.
        if self._last and not self._is_nested and each.pass_is_over():
            each.complete()
            # Sums of a model that was made earlier go first, if the pass has one.
            if self._is_first:
                self._send_complete()

    def _comes_after_another(self) -> bool:
        """Return whether the backward pass that runs comes through a model of this mesh
        that was made earlier."""
        earlier = itertools.takewhile(lambda window: window is not self, _windows)
        return any(
            window._takes_part() for window in earlier if window._mesh is self._mesh
        )

    # It is in the pass already, or its forward waits for one.
    def _takes_part(self) -> bool:
        if self._running_pass is not None:
            return True
        return any(each.uses_left and each.unit.trainable() for each in self._units)

    def _queue_end(self) -> None:
        this_pass = outermost_pass()
        self._is_nested = self._is_nested or this_pass != backward_pass()
        if self._running_pass == this_pass:
            return
        here.in_window()
        # A pass that raised has no end: its gradients would be taken for this one's.
        if self._running_pass is not None:
            raise RuntimeError(FAILED_PASS)
        self._running_pass, self._is_first = this_pass, not self._comes_after_another()
        # Behind the ends of all models' passes.
        at_end_of_backward(lambda: at_end_of_backward(self._end_of_backward))

    def _end_of_backward(self) -> None:
        """End the pass for every model that it came through. Ranks may have come
        through them in another order."""
        this_pass = self._running_pass
        for window in list(_windows) if this_pass is not None else []:
            if window._running_pass == this_pass:
                window._end_pass()

    @torch.no_grad()
    def _end_pass(self) -> None:
        # FSDP2 leaves some units unreduced; they count for this micro-batch.
        for each in self._units:
            each.unit.reduce_rest()
        self._running_pass, self._is_nested = None, False
        self._dropped.clear()
        self.micro_batches += 1
        self._issued.end_micro_batch()
        for each in self._units:
            each.end_of_pass()
        self._replicated.end_of_pass()
        # The window ends; or only the micro-batch, for hooks; or both go on.
        if self._last:
            self.close()
        elif not self._in_stages and (self._closes_each or self._hooked()):
            self._close_micro_batch()
        elif self._keep_gathered:
            self._calls.show_shards(kept=True)

    def _reduce_held(self) -> None:
        """Reduce held gradients of units that the last backward pass did not come
        through, or of all if there was none."""
        with changed(self, _reducing_held=True):
            for each in self._units:
                if each.unit.awaits_reduction:
                    each.unit.reduce_held()

    def _await_sums(self) -> None:
        """Wait for every sum that any replica has sent, with zeros from this rank where
        it sent none: they would meet sums of the next window."""
        if self._mesh.replicate_degree == 1 or not self._units:
            return
        # The maximum of sizes tells which sums any replica has sent.
        flying = [each.flat if each.is_in_flight else None for each in self._units]
        sizes = [0 if flat is None else flat.numel() for flat in flying]
        sent = torch.tensor(sizes, device=self._mesh.device)
        dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=self._mesh.gradient_group)
        # A message is matched by one of the same size, of zeros.
        for each, size in zip(self._units, sent.tolist(), strict=True):
            if size:
                each.send_zeros(size)
        for each in self._units:
            each.wait()

    def _send_complete(self) -> None:
        """Send sums that nothing is added to any more, in the order of units, up to the
        first that may still grow."""
        while self._next < len(self._units):
            each = self._units[self._next]
            if each.is_complete:
                each.send()
            elif each.window_slots():
                # It may still grow, and those behind it wait: one order on all replicas.
                return
            self._next += 1

    def _send_the_rest(self, held_somewhere: Sequence[int]) -> None:
        """Send the remaining units that any rank has a sum of; zeros where this rank
        has none."""
        for each, held in zip(
            self._units[self._next :], held_somewhere[self._next :], strict=True
        ):
            if held:
                each.send()
        self._next = len(self._units)

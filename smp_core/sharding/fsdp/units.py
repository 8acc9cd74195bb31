"""ShardedUnit: one module that FSDP2 gathers, frees and reduces as a whole; and errors
where one is not called.

A unit's parameters are gathered when its module is called. Code that reads
``self.projection.weight`` and computes with it instead, or that calls another method
than forward, has shards, and torch raises an error about mixed tensors. That error is
recognised by its text, and by the modules whose methods were running: torch has no
exception class of its own for it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import ParametrizationList

from smp_core.codecs import RowCodec
from smp_core.plan import Plan
from smp_core.sharding.fsdp.internals import group_of
from smp_core.sharding.fsdp.passes import (
    FAILED_PASS,
    Passes,
    backward_pass,
)
from smp_core.sharding.fsdp.travelling import store_as_codes


@dataclass(frozen=True)
class Slot:
    """The place of one parameter's local gradient in its unit's flat reduced gradient.

    ``offset`` and ``padded`` count elements; ``padded`` is ceil(rows / shard degree) x
    row size.
    """

    index: int
    offset: int
    padded: int


class Listener(Protocol):
    """The interface that a unit notifies of calls and backward passes through it.

    Attributes:
        uses_left: forwards that no backward pass has come through yet, recomputed ones
            not counted.
    """

    uses_left: int

    def used(self) -> None:
        """Count a forward that a backward pass is to come through; not called for
        recomputed ones."""

    def came_through(self, received: set[int], trainable: set[int]) -> set[int]:
        """Take note of a backward pass.

        Args:
            received: the parameters that have a gradient, by index.
            trainable: those that want one, on all ranks.

        Returns:
            the parameters whose gradients all ranks reduce now, unless they are held.
        """


class ShardedUnit:
    """One wrapped module with its parameters in FSDP2's order.

    FSDP2 is told to add up and never to divide (``set_force_sum_reduction_for_comms``
    with a divide factor of 1), so that every gradient is divided exactly once, by us,
    whatever the dtype.

    Args:
        in_order: whether ``parameter_names`` are in that order, perhaps some of other
            modules sharded with this one.
        passes: shared by all units of a model.

    Attributes:
        listener: what keeps its gradients.
        was_called: whether a forward ever came through.
        holds_gradients: whether backward passes leave unsharded gradients at the
            moment.
        awaits_reduction: whether backward passes came through whose gradients are held
            unsharded; the same on all ranks of the partition group, also on one that
            has none.
        is_passed_by: whether backward passes do not come through it at the moment, on
            any rank.
        is_recomputed: whether it lies inside a checkpointed module.
        runs_ahead: whether several forwards come, with the same weights, before the
            backward pass of the first.
        leaves_parts, reads_parts: what the gather that begins means for parts of a
            secondary shard.
        settle: carries ``requires_grad`` over between shards and unsharded copies,
            whichever was changed.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parameter_names: Sequence[str],
        is_root: bool,
        passes: Passes,
        in_order: bool = False,
    ) -> None:
        assert isinstance(module, FSDPModule)
        # FSDP2 only adds up: sums are divided once, when they are complete.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        self.passes = passes
        self.name = name
        self.module = module
        self.is_root = is_root
        self.parameter_names = tuple(parameter_names)
        self.listener: Listener | None = None
        self.settle: Callable[[], None] = lambda: None
        self.was_called = False
        self.awaits_reduction = False
        self.holds_gradients = False
        self.is_passed_by = False
        self.is_recomputed = False
        self.runs_ahead = False
        self.leaves_parts = self.reads_parts = self._left_parts = False
        # None for a module all of whose parameters are in other units.
        self.group = group_of(module)
        self._held: dict[int, torch.Tensor] = {}
        self._has_seen_dtypes = False
        # Full names, in FSDP2's order of parameters.
        if in_order:
            self.names = list(parameter_names)
        else:
            named = module.named_parameters(prefix=name)
            names = {id(parameter): full for full, parameter in named}
            self.names = [names[id(parameter)] for parameter in self.parameters()]
        # Each reduction is preceded by our account of which gradients there are.
        if self.group is not None:
            self._reduce = self.group.replace_reduction(self._note_reduction)
        # Inner units run within a root's forward, which is asked first.
        if is_root:
            module.register_forward_pre_hook(self.refuse_after_failure, prepend=True)

    def leave_undivided(self) -> None:
        """Let FSDP2 divide nothing, by default, where the unit is of one rank: by a
        factor of 1 it would divide into one more copy of the gradients."""
        self.module.set_gradient_divide_factor(None)  # type: ignore[arg-type]

    def parameters(self) -> list[nn.Parameter]:
        """Return the sharded parameters (DTensors), trainable or not, in FSDP2's
        order."""
        return [] if self.group is None else self.group.parameters()

    def shard_layout(self) -> list[tuple[str, int]]:
        """Return full name and elements, padding included, of each parameter in the
        shard that a gather sends, in order."""
        sizes = [] if self.group is None else self.group.shard_sizes()
        return list(zip(self.names, sizes, strict=True))

    def local_shards(self) -> list[torch.Tensor]:
        """Return this rank's part of each parameter, trainable or not."""
        return [parameter.to_local().detach() for parameter in self.parameters()]  # type: ignore[attr-defined]

    def trainable(self) -> set[int]:
        """Return the parameters that want gradients, by index: as the model shows them
        now, which is the same on all ranks. (Copies of an earlier gather know what was
        wanted then, and not all ranks have gathered the same.)"""
        # Inside a call modules show copies, on which the user may have set flags.
        if self.group is not None and not self.group.is_sharded:
            self.settle()
        return {
            index
            for index, parameter in enumerate(self.parameters())
            if parameter.requires_grad
        }

    def layout(self, indices: Container[int]) -> list[Slot]:
        """Return the layout of a flat reduced gradient of these parameters."""
        if self.group is None:
            return []
        slots = []
        offset = 0
        # Padded shards lie side by side, and of reduced parameters only.
        sizes = self.group.shard_sizes()
        for index in self.group.reduction_order():
            if index in indices:
                slots.append(Slot(index, offset, sizes[index]))
                offset += sizes[index]
        return slots

    def zeros(self, slots: Sequence[Slot], n_elements: int) -> torch.Tensor:
        """Return a flat reduced gradient of nothing, as if of the parameters of
        ``slots``."""
        assert self.group is not None
        # A flat sum has one dtype, that of any of its parameters.
        index = slots[0].index if slots else 0
        parameter = self.parameters()[index]
        assert isinstance(parameter, DTensor)
        return torch.zeros(
            n_elements,
            dtype=self.group.sum_dtype(index),
            device=parameter.device_mesh.device_type,
        )

    def hold_gradients(self, enabled: bool) -> None:
        """Set whether backward passes from here on leave unsharded gradients, which add
        up to those of earlier passes, instead of having them reduced; once they are, it
        is together with what is held."""
        self.holds_gradients = enabled
        cast(Any, self.module).set_requires_gradient_sync(not enabled, recurse=False)

    def reduce_held(self) -> None:
        """Reduce what is held now, outside of a backward pass. Collective over the
        partition group."""
        assert self.group is not None
        before = self.holds_gradients
        # FSDP2 reduces only while synchronisation is on. It expects a pass, whose end
        # would clear what the reduction leaves.
        self.hold_gradients(False)
        self.group.reduce()
        self.group.end_of_reduction()
        self.hold_gradients(before)

    def reduce_rest(self) -> None:
        """Reduce, at the end of a backward pass, gradients that FSDP2 leaves on the
        unit. Collective over the partition group.

        Those of a use that a reentrant checkpoint recomputed in the pass when it had
        come through another use; and those of a unit whose output is a view that was
        written into behind it, of which FSDP2 loses sight.
        """
        if self.group is not None and self.unsharded_gradients():
            self.group.reduce()
            self.group.end_of_reduction()

    def indices(self, ids: Container[int]) -> set[int]:
        """Return the parameters with these ids; those of unsharded copies, which are
        shown inside a call, count too."""
        pairs = zip(self.parameters(), self.copies(), strict=True)
        return {
            index
            for index, (shard, copy) in enumerate(pairs)
            if id(shard) in ids or id(copy) in ids
        }

    def drop_held(self, indices: Container[int], set_to_none: bool = True) -> None:
        """Drop unsharded gradients of these parameters that are held, or
        (``set_to_none=False``) leave them at zero."""
        for index in [index for index in self._held if index in indices]:
            if set_to_none:
                del self._held[index]
            else:
                self._held[index].zero_()

    def held(self) -> list[torch.Tensor]:
        """List the unsharded gradients that wait for their reduction."""
        return list(self._held.values())

    def copies(self) -> list[nn.Parameter | None]:
        """Return the unsharded parameters as modules show them; None: never
        gathered."""
        return [] if self.group is None else self.group.copies()

    def unsharded(self) -> list[torch.Tensor]:
        """List the unsharded parameters, also those that are freed at the moment: their
        storages have no bytes."""
        return [
            _wrapped(each) if isinstance(each, DTensor) else each
            for each in self.copies()
            if each is not None
        ]

    def unsharded_gradients(self) -> list[torch.Tensor]:
        """List the gradients of the unsharded parameters that have one."""
        return [
            each.grad
            for each in self.copies()
            if each is not None and each.grad is not None
        ]

    def forget_held(self) -> None:
        """Drop all that is held: nothing awaits its reduction."""
        self._held.clear()
        self.awaits_reduction = False

    def store_masters(self) -> None:
        """Store trainable half precision parameters in float32 from now on."""
        half = [
            # In the order of parameters, which is the same on all ranks.
            i
            for i in sorted(self.trainable())
            if self.parameters()[i].dtype in (torch.float16, torch.bfloat16)
        ]
        if half:
            self.store_in(torch.float32, half)

    def store_coded(self, plan: Plan) -> None:
        """Store the parameters as codes (``frozen_storage``) from now on that the plan
        says so of."""
        code = plan.knobs.frozen_storage
        assert code is not None
        if self.group is None:
            return
        coded = [
            i
            for i, name in enumerate(self.names)
            if plan.is_coded(plan.shapes.of_name(name))
        ]
        store_as_codes(self.group, coded, RowCodec(code))

    @torch.no_grad()
    def store_in(self, dtype: torch.dtype, indices: Iterable[int]) -> None:
        """Store these parameters' shards in ``dtype`` from now on; they stay the same
        objects.

        Raises:
            ValueError: there is a weak reference to one of them, which torch then
                cannot exchange.
        """
        # A gathered copy would still be of the old shard.
        cast(Any, self.module).reshard()
        assert self.group is not None
        indices = list(indices)
        for index in indices:
            kept = self.parameters()[index]
            # Taken off meanwhile: torch wants a gradient in its parameter's dtype.
            gradient, kept.grad = kept.grad, None
            stored = nn.Parameter(
                kept.detach().to(dtype), requires_grad=kept.requires_grad
            )
            stored.__dict__.update(kept.__dict__)  # what others have noted on it
            try:
                torch.utils.swap_tensors(kept, stored)
            except RuntimeError as error:
                raise ValueError(
                    f"{self.names[index]} cannot be stored in {dtype} any more ({error}): something refers to it, for "
                    "example code that was compiled by a forward before; make the optimizer, and trainable what it is "
                    "to train, before the first forward, or write optimizer_shard='shard' and master_dtype=None"
                ) from error
            kept.grad = None if gradient is None else gradient.to(dtype)
        # FSDP2 has noted storage and dtypes of the shards that were there before.
        self.group.shards_changed(indices)

    @property
    def computes_in(self) -> torch.dtype | None:
        """The dtype that its parameters are cast to when they are gathered; None: each
        stays in its own dtype."""
        return None if self.group is None else self.group.policy().param_dtype

    def local_gradients(
        self, slots: Iterable[Slot], flat: torch.Tensor
    ) -> Iterator[tuple[int, DTensor]]:
        """Yield the index of each parameter of ``slots``, and its gradient as a DTensor
        like the parameter, viewed from ``flat`` (cast if dtypes differ)."""
        assert self.group is not None
        parameters = self.parameters()
        for slot in slots:
            parameter = cast(DTensor, parameters[slot.index])
            shard = parameter.to_local()
            # What the parameter wants, else the wider dtype of shard and sum.
            dtype = parameter.grad_dtype or torch.promote_types(shard.dtype, flat.dtype)
            # Without the padding, which lies behind the elements of the shard.
            own = flat[slot.offset : slot.offset + shard.numel()].to(dtype)
            yield (
                slot.index,
                self.group.sharded_gradient(slot.index, own.view(shard.shape)),
            )

    def is_gathered(self) -> bool:
        """Return whether the unit's parameters are unsharded at the moment, or it has
        none."""
        return self.group is None or self.group.is_unsharded

    def gathered_bytes(self) -> int:
        """Return the bytes of the unit's unsharded parameters that are there now."""
        return sum(storage.nbytes() for storage in self._gathered_storages())

    # FSDP2 offloads all parameters of a unit, or none.
    def gathered_addresses(self) -> set[int]:
        """Return where the unsharded parameters are in memory."""
        return {storage.data_ptr() for storage in self._gathered_storages()}

    def _gathered_storages(self) -> list[torch.UntypedStorage]:
        return [
            storage
            for each in self.unsharded()
            if (storage := each.untyped_storage()).nbytes()
        ]

    def beside_parameters(self, flat: torch.Tensor) -> torch.Tensor:
        """Bring ``flat`` to the device of the sharded parameters: another one where
        they are offloaded, and then possibly still on its way."""
        parameters = self.parameters()
        return flat.to(parameters[0].device, non_blocking=True) if parameters else flat

    def note_use(self, inputs: Any) -> None:
        """Take note of a forward, recomputed ones included.

        Args:
            inputs: its arguments.
        """
        self.was_called = True
        # A unit inside a checkpointed module is used again in backward.
        if torch.is_grad_enabled() and backward_pass() == -1:
            assert self.group is not None
            # Its reduction at the end of the pass follows the order of forwards.
            self.passes.used(self, inputs, self.group.reduce)
            if self.listener is not None:
                self.listener.used()

    def run_ahead(self, enabled: bool) -> None:
        """Set whether several forwards come before the backward pass of the first. The
        first of them reads nothing that earlier ones left: weights may be others
        since."""
        self.runs_ahead, self._left_parts = enabled, False

    def begin_gather(self, in_backward: bool, in_forward: bool = False) -> None:
        """Take note of a gather, of a forward or a backward pass, or of both where it
        is recomputed, that begins."""
        # A forward that will be differentiated leaves parts of its gather. Its backward
        # pass reads them, or the next of several forwards ahead.
        self.leaves_parts = torch.is_grad_enabled() and not in_backward
        self.reads_parts = in_backward or (self.runs_ahead and self._left_parts)
        self._left_parts = self.leaves_parts
        if in_backward:
            self.passes.comes_through(recomputes=in_forward)
            # Otherwise FSDP2 would add up uses in the dtype of reductions.
            if self.holds_gradients and self.group is not None:
                self.group.take_gradients_as_they_come()

    def _note_reduction(self, *args: Any) -> None:
        """Stand in for FSDP2's hook after backward: tell which gradients there are, and
        put zeros where there are none, so that ranks that took another branch still
        send tensors of one size and layout. Or hold them, if a later pass reduces
        them."""
        if self.is_passed_by:
            # FSDP2 asks all units at the end of a pass; what is gathered stays for the
            # unit's own.
            return
        if self.passes.is_differentiated:
            self._refuse_gradients()
            return
        if self.passes.reduce_left(self):
            return
        # All of them, or none.
        copies = [copy for copy in self.copies() if copy is not None]
        if not copies:
            return  # it never ran, and has nothing to reduce
        # All ranks have come through the unit, also one without a gradient in it.
        self.awaits_reduction |= self.holds_gradients
        received = {index for index, copy in enumerate(copies) if copy.grad is not None}
        reduced = self.trainable()
        # The window knows parameters that were trainable in earlier micro-batches, on
        # any rank.
        if self.listener is not None:
            reduced = self.listener.came_through(received, reduced)
        if self.holds_gradients:
            self._set_gradients_aside(copies)
            self._reduce(*args)
        else:
            # Every rank reduces the same parameters, and FSDP2 adds nothing to .grad.
            self._show_dtypes(reduced)
            self._complete_gradients(copies, reduced)
            with self._without_visible_gradients():
                self._reduce(*args)
            assert self.group is not None
            self.group.let_go_of_sum()

    def _refuse_gradients(self) -> None:
        if self.unsharded_gradients():
            raise ValueError(
                "backward(create_graph=True) leaves gradients of parameters that are differentiated again, which "
                "parameters in shards cannot have; write torch.autograd.grad(output.sum(), inputs, create_graph=True) "
                "for gradients of inputs"
            )

    @contextlib.contextmanager
    def _without_visible_gradients(self) -> Iterator[None]:
        """Hide ``.grad`` while FSDP2 reduces, which adds the sum to it: it is what it
        was before the window, and what autograd adds to it when a term of the loss is
        made of shards (a penalty on weights)."""
        # Shards have gradients of their own, which are no part of this sum.
        shards = self.parameters()
        before = [shard.grad for shard in shards]
        for shard in shards:
            shard.grad = None
        try:
            yield
        finally:
            for shard, gradient in zip(shards, before, strict=True):
                shard.grad = gradient

    def _show_dtypes(self, reduced: set[int]) -> None:
        """Let FSDP2 see the dtypes of what it reduces, before the first time: it looked
        once, at what was trainable then."""
        if reduced and not self._has_seen_dtypes:
            assert self.group is not None
            self.group.see_dtypes(reduced)
            self._has_seen_dtypes = True

    def _complete_gradients(
        self, copies: Sequence[nn.Parameter], reduced: Iterable[int]
    ) -> None:
        """Give every parameter that all ranks reduce now a gradient, in one dtype."""
        # This rank's branch of the model left it out.
        if not self.awaits_reduction:
            for copy in (copies[index] for index in reduced):
                if copy.grad is None:
                    copy.grad = torch.zeros_like(copy, dtype=copy.grad_dtype)
            return
        assert self.group is not None
        # Gradients of this pass join those held; all are reduced together.
        self._set_gradients_aside(copies)
        for index in reduced:
            gradient = self._held.pop(index, None)
            if gradient is None:
                gradient = torch.zeros_like(
                    copies[index], dtype=self.group.sum_dtype(index)
                )
            self.group.hand_over(index, gradient)
        self.awaits_reduction = False

    def _set_gradients_aside(self, copies: Sequence[nn.Parameter]) -> None:
        """Move the unsharded gradients to, or add them to, what is held: parameters
        show what the next pass leaves."""
        assert self.group is not None
        for index, copy in enumerate(copies):
            if copy.grad is None:
                continue
            if index in self._held:
                # Adds to what an earlier pass of the window left.
                self._held[index] += copy.grad
            else:
                self._held[index] = copy.grad.to(self.group.sum_dtype(index))
            copy.grad = None

    @torch.compiler.disable
    def refuse_after_failure(self, *_: Any) -> None:
        """Refuse a forward after a failed pass: FSDP2 itself would go on from the
        middle of that and return wrong gradients."""
        if self.passes.is_open and backward_pass() == -1:
            raise RuntimeError(FAILED_PASS)


def reshard(modules: Iterable[nn.Module]) -> None:
    """Free what units among ``modules`` keep unsharded, after a forward without
    backward or inside a window, so that their parameters are shards again and nothing
    reads weights from before a step or before a checkpoint was loaded."""
    for module in modules:
        # Its messages have to be received before the unit is freed.
        if isinstance(module, FSDPModule):
            group = group_of(module)
            if group is not None:
                group.drop_gather()
            module.reshard()


@contextlib.contextmanager
def passing_by(
    units: Iterable[ShardedUnit], parameters: Container[str]
) -> Iterator[None]:
    """Mark the units all of whose parameters are named: backward passes inside the
    block do not come through them, on any rank."""
    passed = []
    for unit in units:
        # A unit with a single other parameter is come through all the same.
        if all(name in parameters for name in unit.parameter_names):
            passed.append(unit)
    for unit in passed:
        unit.is_passed_by = True
    try:
        yield
    finally:
        for unit in passed:
            unit.is_passed_by = False


def _wrapped(tensor: DTensor) -> torch.Tensor:
    """Return the local tensor itself. ``to_local`` makes a view, which gives a freed
    storage without values its bytes again."""
    names, _ = tensor.__tensor_flatten__()
    parts = [getattr(tensor, name) for name in names]
    return next(part for part in parts if isinstance(part, torch.Tensor))


_MIXED = "mixed torch.Tensor and DTensor"
# torch hangs a node of this name between a unit and its inputs.
_WRITES_INPUT = "RegisterPostBackwardFunction is a view and is being modified inplace"


def explain_uncalled(units: Sequence[ShardedUnit]) -> None:
    """Let errors of the roots' forwards say which unit was computed with and not
    called."""

    @torch.compiler.disable
    def look(*_: Any) -> None:
        # Hooks get no exception as an argument; it is the one on its way.
        error = sys.exc_info()[1]
        if isinstance(error, RuntimeError):
            name_uncalled(error, units)

    for unit in units:
        if unit.is_root:
            # Torch calls these while the error is on its way, and takes no other in its
            # place: so it gets our words.
            unit.module.register_forward_hook(look, always_call=True)


def name_uncalled(error: RuntimeError, units: Sequence[ShardedUnit]) -> None:
    """Put words into torch's error, if it came from the parameters of a unit that was
    not called, or from a unit that wrote into its input."""
    writes_input = _WRITES_INPUT in str(error)
    is_mixed = _MIXED in str(error) and str(error).startswith("aten.")
    if not (writes_input or is_mixed):
        return
    # A parametrized module, a method that does not gather, or a module that computes
    # with the weights of another one.
    frames = [
        frame
        for frame in _frames(error.__traceback__)
        if isinstance(frame.f_locals.get("self"), nn.Module)
    ]
    if writes_input:
        _name_writer(error, frames, units)
        return
    # Phase 1: a parametrization that computes with a shard.
    if any(isinstance(frame.f_locals["self"], ParametrizationList) for frame in frames):
        error.args = (
            "a parameter was parametrized before its unit was called, as PEFT's target_parameters do in each forward; "
            "make the unit a module around both, such as the decoder layer (the default): units=[...] without the "
            f"parametrized module. Torch said: {error}",
        )
        return
    # Phase 2: a method of a unit other than forward, the innermost call first.
    for frame in reversed(frames):
        module = frame.f_locals["self"]
        own = next(
            (
                unit
                for unit in units
                if unit.module is module and not unit.is_gathered()
            ),
            None,
        )
        method = frame.f_code.co_name
        if own is not None and method != "forward":
            error.args = (
                f"{type(module).__name__}.{method} was called, and the unit {own.name!r} is gathered for its "
                f"forward only; write forward_methods=({_dotted(own.name, method)!r},). Torch said: {error}",
            )
            return
    # Phase 3: a module that computed with parameters of a unit inside of it.
    if not frames:
        return
    caller = frames[-1].f_locals["self"]
    inside = set(caller.modules()) - {caller}
    uncalled = [
        unit
        for unit in units
        if unit.module in inside and not unit.was_called and not unit.is_gathered()
    ]
    if uncalled:
        names = ", ".join(repr(unit.name) for unit in uncalled)
        # With a threshold above the largest of them none would be a unit.
        n = 0
        for unit in uncalled:
            n = max(n, sum(p.numel() for p in unit.module.parameters()))
        error.args = (
            f"{type(caller).__name__}.{frames[-1].f_code.co_name} computed with parameters of a unit that it had not "
            f"called ({names}), and a unit's parameters are gathered when it is called; call the module, or leave it "
            f"out of the units: units=[...] without it, units.min_parameters above {n}. Torch said: {error}",
        )


def _name_writer(
    error: RuntimeError, frames: Sequence[FrameType], units: Sequence[ShardedUnit]
) -> None:
    """Say which unit wrote into its input, through which FSDP2 learns that the unit's
    backward is over."""
    names = {id(unit.module): unit.name for unit in units}
    called = [frame.f_locals["self"] for frame in frames]
    unit = next((each for each in reversed(called) if id(each) in names), None)
    if unit is None or str(error).startswith("the unit "):
        return
    error.args = (
        f"the unit {names[id(unit)]!r} changes its input in place, in {type(called[-1]).__name__}; write inplace=False "
        f"there, or leave it out of the units: units=[...] without it. Torch said: {error}",
    )


def _dotted(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next

"""Calls into a model: inside one, modules show the parameters that FSDP2 gathered;
between calls they show shards.

After a forward FSDP2 leaves roots, and with ``reshard_after_forward=False`` all units,
unsharded for the backward pass that may follow, and shows these copies as the module's
parameters. Code that lists, freezes, edits or clips parameters then would get tensors
that are thrown away. So when the outermost call has ended, modules show their shards,
whatever is still there for backward; and the next call gathers again what an earlier
one left, because weights may have been edited in between in ways that nothing records
(``p.data.mul_()``, foreach and fused kernels).

Four hooks of each unit do this, two on each side of FSDP2's own: before and behind its
gather, before it frees what was gathered, and behind that. What begins a gather is
replaced too, since backward passes begin some as well.

FSDP2 takes what is called first for a root, with all units inside of it. So before the
first call of a unit by itself the root around it makes an empty one.

Between a Trainer's runs the outermost call begins with a meeting of the ranks that hold
the parts of the model: one that only some of them make (`if rank == 0: model(batch)`)
would wait for the others forever.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import _disable_current_modes

from smp_core.checkpoint import iterate_tensors, map_tensors
from smp_core.sharding.fsdp.data_attribute import (
    carry_notes,
    is_noted,
    note_copy,
    require_unchanged,
)
from smp_core.sharding.fsdp.internals import group_of
from smp_core.sharding.fsdp.param_group import ParamGroup
from smp_core.sharding.fsdp.passes import CLOSED, backward_pass, leaves_of
from smp_core.sharding.fsdp.units import ShardedUnit, reshard
from smp_core.sharding.gradients.parameter_hooks import hooks_of, shows_hooks
from smp_core.torch_facts import clean_name
from smp_core.watch import (
    count_call,
    expect_calls,
    meet_after_failure,
    meet_between_runs,
)

logger = logging.getLogger("smp")

_POST_ACCUMULATE = (
    "%s has a hook of register_post_accumulate_grad_hook, which would see this rank's part of a gradient: sums over "
    "ranks are complete when the accumulation window closes; do its work after backward, or in on_before_optimizer_step"
)


_all: weakref.WeakSet[Calls] = weakref.WeakSet()


def in_a_call() -> bool:
    """Return whether this process is in a call into any sharded model."""
    return any(calls._outermost is not None for calls in _all)


def in_graphs(parameter: torch.Tensor) -> torch.Tensor:
    """Return what stands for a parameter in graphs: of one in shards the copy that
    forwards gather into, if it ever was gathered; of any other it itself."""
    for calls in _all:
        for shown in calls._shown.values():
            for _, shard, copy in shown._all():
                if shard is parameter and copy is not None:
                    return copy
    return parameter


def name_of_shard(parameter: torch.Tensor, memory: object = None) -> str | None:
    """Return the name that a parameter in shards has in its model; None: it is none of
    a model's.

    Args:
        memory: a storage; a parameter whose local part is in it is meant, too.
    """
    for calls in _all:
        for shown in calls._shown.values():
            for noted, shard, _ in shown._all():
                held: Any = shard
                if shard is parameter or (
                    memory is not None
                    and held._local_tensor.untyped_storage() is memory
                ):
                    return noted.name
    return None


class Calls:
    """The calls into one model.

    Args:
        model: with all its units sharded by ``fully_shard``.
        ranks: the partition group, which makes calls together.
        units: those that are notified of their uses.
        shown: makes the context of a method's call in which modules show what is not
            gathered as it computes.

    Attributes:
        unsharded: the model is a plain one for a while
            (:mod:`smp_core.sharding.weights.unsharded`).
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: Sequence[int],
        units: Iterable[ShardedUnit] = (),
        shown: Callable[[object], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._shown_in_call = shown
        # For messages: the user's class, without the prefix that fully_shard gives it.
        self._name = type(model).__name__.removeprefix("FSDP")
        self._names = {
            id(module): clean_name(name) for name, module in model.named_modules()
        }
        self._ranks = ranks
        # The module, or the call of a method, that was called from outside.
        self._outermost: object = None
        # The error of the last call, if it failed; and what a script was handling as
        # the present one began, by id: a call inside of `except:` is none that failed.
        self._failed: str | None = None
        self._handled = 0
        self._units = tuple(units)
        # The outermost unit around each; emptied as roots are called for the first
        # time.
        self._roots: dict[nn.Module, nn.Module] = {}
        for module in model.modules():
            # Outer modules come first.
            if isinstance(module, FSDPModule) and module not in self._roots:
                inside = [
                    each for each in module.modules() if isinstance(each, FSDPModule)
                ]
                self._roots |= dict.fromkeys(inside, module)
        self.unsharded = False
        # The registration is one of the whole process: it goes with this object.
        weakref.finalize(
            self,
            register_module_parameter_registration_hook(_note_parametrization).remove,
        )
        # After a pass whose gradients are differentiated again forwards leave units
        # gathered.
        self._keeps_behind_forward = False
        # Units by what hides tensors of their outputs.
        self._hiding: dict[int, str] = {}
        _all.add(self)
        expect_calls(ranks)
        self._shown: dict[int, _ShownUnit] = {}
        self._of_module: dict[int, _ShownUnit] = {}
        for unit in self._units[:1]:  # they share one
            unit.passes.keep_unsharded, unit.passes.show_shards = (
                self._keep_unsharded,
                self._show_behind_pass,
            )
        # Modules that were sharded together share a group, and one account of it.
        hearing = {
            unit.group.key: unit for unit in self._units if unit.group is not None
        }
        parameter_names = {
            id(parameter): clean_name(name)
            for name, parameter in model.named_parameters()
        }
        for module in model.modules():
            if not isinstance(module, FSDPModule):
                continue
            group = group_of(module)
            if group is not None:
                if group.key not in self._shown:
                    self._shown[group.key] = _ShownUnit(
                        group, parameter_names, hearing.get(group.key)
                    )
                self._of_module[id(module)] = self._shown[group.key]
            # FSDP2 has registered its own pair already: these go before and behind
            # both.
            module.register_forward_pre_hook(
                self._before_gather, prepend=True, with_kwargs=True
            )
            module.register_forward_pre_hook(self._behind_gather)
            module.register_forward_hook(self._before_reshard, prepend=True)
            module.register_forward_hook(self._behind_reshard, always_call=True)

    def run_as_forward(
        self, unit: ShardedUnit, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a method with the unit's parameters unsharded: one call, whatever
        forwards there are in it."""
        if self.unsharded:
            return method(*args, **kwargs)
        module, shown = unit.module, self._of_module.get(id(unit.module))

        # The method runs between FSDP2's hooks, with our own looks at the copies.
        def gathered(*args: Any, **kwargs: Any) -> Any:
            if shown is None:
                return method(*args, **kwargs)
            shown.gathered()
            result = method(*args, **kwargs)
            shown.check_copies()
            return result

        # The outermost call of all meets the other ranks first, and cleans up behind
        # itself.
        this_call = object()
        is_outermost = self._begins(
            this_call, module, getattr(method, "__name__", None)
        )
        try:
            unit.refuse_after_failure()
            self._begin_with_root(module)
            if shown is not None:
                shown.begin((args, kwargs))
            with self._shown_in_call(this_call):
                return _as_forward(module, gathered)(*args, **kwargs)
        finally:
            if is_outermost:
                self._end()

    def forget(self) -> None:
        """Forget a call that was interrupted, and a backward pass that failed."""
        self._outermost = self._failed = None
        for unit in self._units:
            unit.passes.forget()

    def show_shards(self, kept: bool = False) -> None:
        """Let every module show its shards, whatever is unsharded.

        Args:
            kept: what is unsharded stays for the window's next micro-batch
                (``keep_between_micro_batches``, pipeline stages), and is gathered again
                only after edits that a tensor's version shows.
        """
        for shown in self._shown.values():
            shown.show_shards(kept)

    def _show_behind_pass(self) -> None:
        """Show shards at the end of a backward pass, unless it ran within a call, which
        goes on (forces, penalties)."""
        if self._outermost is None:
            self.show_shards()

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Let calls inside, several before the backward pass of the first, find what
        the one before left."""
        for unit in self._units:
            unit.run_ahead(True)
        try:
            yield
        finally:
            for unit in self._units:
                unit.run_ahead(False)

    def _keep_unsharded(self, kept: bool) -> None:
        """Let units stay unsharded behind each backward, and from the first time on
        behind each forward: a pass whose gradients are differentiated again may be
        followed by other forwards before that is done."""
        # The first such pass; from now on backward cannot tell when a forward's
        # parameters are free.
        if not self._keeps_behind_forward:
            self._keeps_behind_forward = True
            logger.info(
                "%s: gradients are differentiated again (create_graph=True): parameters stay gathered from forward to "
                "backward from here on, as with reshard_after_forward=False",
                self._name,
            )
            for unit in self._units:
                unit.module.set_reshard_after_forward(False, recurse=False)  # type: ignore[operator]
        for unit in self._units:
            unit.module.set_reshard_after_backward(not kept, recurse=False)  # type: ignore[operator]
        # Nothing refers to the parameters any more.
        if not kept:
            reshard(unit.module for unit in self._units)

    def _begins(
        self, call: object, module: nn.Module, method: str | None = None
    ) -> bool:
        """Return whether a call that begins is within no other (one of the same module
        was aborted), nor within a backward pass, whose recomputed forwards find what is
        unsharded; if so it meets the other ranks."""
        if self._outermost not in (None, call) or backward_pass() != -1:
            return False
        self._outermost = call
        parts = (self._name, self._names[id(module)], method)
        place = ".".join(filter(None, parts)) + "(...)"
        self._handled = id(sys.exc_info()[1])
        if self._failed is not None:
            self._meet_after_failure(place)
        meet_between_runs(place, self._ranks)
        count_call()
        return True

    @torch.compiler.disable
    def _before_gather(self, module: nn.Module, *inputs: Any) -> None:
        self._begins(module, module)
        # The outermost call of all, unless recomputed within a backward pass.
        self._begin_with_root(module)
        shown = self._of_module.get(id(module))
        if shown is not None:
            shown.begin(inputs)

    @torch.compiler.disable
    def _behind_gather(self, module: nn.Module, *_: Any) -> None:
        shown = self._of_module.get(id(module))
        if shown is not None:
            shown.show_to_modes()
            shown.gathered()

    @torch.compiler.disable
    def _before_reshard(self, module: nn.Module, _: Any, output: Any) -> Any:
        shown = self._of_module.get(id(module))
        if shown is None:
            return None
        # Edits of copies are found while the copies are there.
        shown.check_copies()
        unit = shown.unit
        # Roots are kept anyway.
        if torch.is_grad_enabled() and unit is not None and not unit.is_root:
            self._keep_for_hidden(module, unit, output)
        # The output may show gathered memory, which is freed next.
        return shown.outlasting(output)

    def _keep_for_hidden(
        self, module: nn.Module, unit: ShardedUnit, output: Any
    ) -> None:
        """Let a unit stay unsharded from forward to backward from here on, if its
        output hides tensors from FSDP2, which gathers for the backward pass when a
        tensor of the output gets its gradient.

        Raises:
            RuntimeError: the unit has another use that backward comes to first, and
                frees the parameters behind.
        """
        kind = self._hiding.get(id(module)) or hides_gradient(output)
        if kind is None:
            return
        # Kept parameters are freed behind the first backward through the unit, in the
        # middle of another use.
        if unit.listener is not None and unit.listener.uses_left > 1:
            raise RuntimeError(
                f"{unit.name!r} is called more than once before the backward pass, and gives tensors inside of a "
                f"{kind}, where FSDP2 does not look for them; return them in a tuple, list, dict or dataclass, or "
                "leave it out of the units: units=[...] without it"
            )
        # No gradient of the output tells FSDP2 to gather again: what forward gathered
        # stays.
        if id(module) not in self._hiding:
            self._hiding[id(module)] = kind
            module.set_reshard_after_forward(False, recurse=False)  # type: ignore[operator]
            logger.info(
                "%s: forward gives tensors inside of a %s, where FSDP2 does not look: its parameters stay gathered "
                "from forward to backward, as with reshard_after_forward=False",
                unit.name,
                kind,
            )

    @torch.compiler.disable
    def _behind_reshard(self, module: nn.Module, *_: Any) -> None:
        shown = self._of_module.get(id(module))
        if shown is not None:
            shown.resharded()
        if self._outermost is module:
            self._end()

    def _meet_after_failure(self, place: str) -> None:
        """Go on after a call that failed, if it failed on all ranks.

        Raises:
            RuntimeError: others wait for this rank's part in that call; what this one
                would send next is of another.
        """
        try:
            meet_after_failure(f"{place} after a call that failed", self._ranks)
        except RuntimeError as error:
            raise RuntimeError(
                f"an earlier call of {self._name} failed on this rank with {self._failed}, which was caught here, and "
                "other ranks are still in it, or went on from it: let such an error end the run, or leave the batch "
                f"out on all ranks before the model is called ({error})"
            ) from None
        self._failed = None

    def _end(self) -> None:
        error = sys.exc_info()[1]
        is_failure = error is not None and id(error) != self._handled
        # Without a backward pass, what comes next may be the same on all ranks.
        if is_failure and torch.is_grad_enabled():
            self._failed = f"{type(error).__name__}: {error}"
        self._outermost = None
        # Of several forwards ahead the next reads what this one gathered.
        self.show_shards(any(unit.runs_ahead for unit in self._units))

    def _begin_with_root(self, module: nn.Module) -> None:
        """Let the module's root be the first of its units to be called."""
        root = self._roots.get(module)
        if root is None:
            return
        # FSDP2 takes what modules show in its first call for its shards.
        for shown in self._shown.values():
            for parameter, shard, copy in shown._all():
                parameter.check_place(shard, copy)
        # FSDP2 has chosen the root, and its units need no more care.
        self._roots = {
            inner: outer for inner, outer in self._roots.items() if outer is not root
        }
        if root is not module:
            # An empty call of the root, so that FSDP2 does not take the unit for one.
            with torch.inference_mode(False), torch.no_grad():
                _as_forward(root, lambda: None)()


def _as_forward(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` between FSDP2's hooks before and after a forward of
    ``module``.

    ``register_fsdp_forward_method`` puts what it makes on the module, where Lightning
    would misread its signature.
    """
    name = "smp_as_forward"
    # register_fsdp_forward_method wraps what it finds under a name on the module.
    vars(module)[name] = function
    try:
        register_fsdp_forward_method(module, name)
    finally:
        made: Callable[..., Any] = vars(module).pop(name)
    return made


def hides_gradient(output: Any) -> str | None:
    """Return the class of what hides a tensor that wants a gradient from FSDP2, or may;
    None: nothing does."""
    for leaf, inside in leaves_of(output):
        kind: str = type(leaf).__name__
        if isinstance(leaf, CLOSED):
            return kind
        if inside is not None and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            return inside
    return None


class _ShownUnit:
    """Parameters that are gathered together, and whether their modules show them
    unsharded.

    ``requires_grad`` and hooks belong to the parameter, whichever tensor shows it or
    was given them; what else is done to a gathered copy, or put in its place, is
    refused.
    """

    def __init__(
        self, group: ParamGroup, names: Mapping[int, str], unit: ShardedUnit | None
    ) -> None:
        self._group, self.unit = group, unit
        self._left_by_a_call = self._begins_forward = False
        self._kept_versions: list[int] | None = None
        self._hidden = contextlib.ExitStack()
        self._parameters = []
        # One parameter may be shown by several modules of the unit (ties).
        for shard, places in zip(group.parameters(), group.places(), strict=True):
            local = places[0][1] if places else "a parameter"
            self._parameters.append(
                _ShownParameter(
                    names.get(id(shard), local), places, shard.requires_grad
                )
            )
        self._gather = group.replace_gather(self._begin_gather)
        if unit is not None:
            unit.settle = self.settle

    # A call

    def begin(self, inputs: Any) -> None:
        """Take note of a forward with these arguments, before FSDP2 gathers for it."""
        self._begins_forward = True
        # As FSDP2 sees them: the user's hooks, which come behind its own, may change
        # whether they want gradients, also in place.
        if self.unit is not None:
            self.unit.note_use(inputs)
        # An earlier call left the unit gathered. Only within a window, and with no
        # shard written into since, may this one use it.
        if self._left_by_a_call and backward_pass() == -1:
            self._left_by_a_call = False
            if self._kept_versions != self._shard_versions():
                self._group.drop_gather()
                self._group.reshard()
            elif self._group.is_unsharded:
                self._show(self._group.copies())
        if torch.is_inference_mode_enabled() and None in self._group.copies():
            # The first gather makes the tensors that all later ones fill: made inside,
            # they could not be trained with.
            with torch.inference_mode(False), torch.no_grad():
                self._group.module.unshard()
        # Selective checkpointing: a mode that records operations would take FSDP2's
        # gather for one of the model.
        if self.unit is not None and self.unit.is_recomputed:
            self._hidden.enter_context(_disable_current_modes())

    def gathered(self) -> None:
        """Take note that FSDP2 has gathered, and shows copies."""
        self._begins_forward = False
        # Edits of the copy are found by a later version than this.
        for _, shard, copy in self._all():
            if copy is not None:
                carry_notes(shard, copy)
                note_copy(copy)
        self.settle()

    def check_copies(self) -> None:
        """Refuse what a forward did to copies and would be lost with them."""
        for parameter, shard, copy in self._all():
            parameter.check_place(shard, copy)
            if copy is not None:
                require_unchanged(copy, parameter.name)
        self.settle()

    def outlasting(self, output: Any) -> Any:
        """Return what a forward gave, with tensors of their own for views of gathered
        parameters, whose memory is freed behind it; None where it holds no such
        view."""
        # Objects are compared, and kept meanwhile: fake tensors have no address.
        storages = [
            copy.untyped_storage() for copy in self._group.copies() if copy is not None
        ]

        def is_view(tensor: torch.Tensor) -> bool:
            if type(tensor) not in (torch.Tensor, nn.Parameter, DTensor):
                # Other kinds of tensors are left as they are.
                return False  # split tokens would be gathered for the question
            try:
                own = tensor.untyped_storage()
            except NotImplementedError:
                # Inside torch.func's vmap, grad and jacrev: around the tensor itself.
                return True
            return any(own is storage for storage in storages)

        # Almost no output does, and a copy of its nest is spared then. What torch.func
        # has wrapped cannot be asked, and is copied.
        if not any(is_view(tensor) for _, tensor in iterate_tensors(output)):
            return None
        return map_tensors(
            output, lambda tensor: tensor.clone() if is_view(tensor) else tensor
        )

    def settle(self) -> None:
        """Carry ``requires_grad`` and hooks over between shards and copies."""
        for parameter, shard, copy in self._all():
            if copy is not None:
                parameter.settle(shard, copy)

    def resharded(self) -> None:
        """Take note of the end of a forward, also of one that failed."""
        self._begins_forward = False
        self.show_to_modes()
        # FSDP2 shows parts of its own between forward and backward, in some pre-sharded
        # models.
        if not self._group.is_sharded and not self._group.is_unsharded:
            for parameter in self._parameters:
                parameter.note_part()

    def show_shards(self, kept: bool) -> None:
        """Let modules show shards at the end of a call."""
        if self._group.is_sharded and not self._group.has_gather_in_flight:
            return
        # Copies of an earlier call were checked at its end.
        if not self._left_by_a_call:
            self.check_copies()
        self._left_by_a_call = True
        self._show(self._group.parameters())
        self._kept_versions = self._shard_versions() if kept else None

    def show_to_modes(self) -> None:
        self._hidden.close()

    # Gathers

    def _begin_gather(self, async_op: bool = False) -> None:
        """Begin a gather, in forward, in backward, or ahead of them.

        Raises:
            ValueError: a parameter was replaced, or has hooks that want a complete
                gradient, which there is only when a window closes.
        """
        in_backward = backward_pass() != -1
        if in_backward and self.unit is not None and self.unit.is_passed_by:
            # FSDP2 gathers ahead what came before in forward, and roots always.
            return
        # Backward goes on with what a call left gathered, under its own copies.
        if in_backward and self._left_by_a_call:
            self._left_by_a_call = False
            if self._group.is_unsharded:
                self._show(self._group.copies())
        # What was kept is gone, and so are its versions.
        if self._group.is_sharded:
            self._kept_versions = None
        # The last moment at which an edit that the gather would lose can be refused.
        for parameter, shard, copy in self._all():
            parameter.check_place(shard, copy)
            if in_backward and copy is not None:
                parameter.settle(shard, copy)
            late: Any = None if in_backward else shard._post_accumulate_grad_hooks
            if late and hooks_of(shard) is None:
                raise ValueError(_POST_ACCUMULATE % parameter.name)
        if self.unit is not None:
            self.unit.begin_gather(in_backward, self._begins_forward)
        # Tensors made in inference mode could not be trained with later.
        if not torch.is_inference_mode_enabled():
            self._gather(async_op)
            return
        with torch.inference_mode(False):
            self._gather(async_op)

    def _all(
        self,
    ) -> Iterator[tuple[_ShownParameter, nn.Parameter, nn.Parameter | None]]:
        return zip(
            self._parameters,
            self._group.parameters(),
            self._group.copies(),
            strict=True,
        )

    def _show(self, tensors: Sequence[nn.Parameter | None]) -> None:
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            for module, name in parameter.places:
                setattr(module, name, tensor)

    def _shard_versions(self) -> list[int]:
        return [
            shard._version + shard._local_tensor._version  # type: ignore[attr-defined]
            for shard in self._group.parameters()
        ]  # type: ignore


@dataclass(eq=False)
class _ShownParameter:
    """A parameter.

    Attributes:
        places: modules, each with the name by which it shows the shard or its unsharded
            copy.
        required_grad: as of the last look.
        part: of a secondary shard of FSDP2's own making, where a pre-sharded model has
            them.
    """

    name: str
    places: Sequence[tuple[nn.Module, str]]
    required_grad: bool
    part: object = None

    def check_place(self, shard: nn.Parameter, copy: nn.Parameter | None) -> None:
        """Refuse a parameter that was replaced."""
        for module, name in self.places:
            # Read where Module.__getattr__ finds it, whose own call takes longer than
            # all of this.
            there = module._parameters.get(name)
            if there is not None and (
                there is shard or there is copy or there is self.part
            ):
                continue
            raise ValueError(
                f"{self.name} was replaced after the model was sharded, and what is there now would be neither "
                "gathered nor reduced; write into the parameter (with torch.no_grad(): parameter.copy_(value)), "
                "or replace it before the model is prepared; for torch.func.functional_call choose a unit around it"
            )

    def note_part(self) -> None:
        """Take note that FSDP2 shows a part that it keeps between forward and
        backward."""
        self.part = getattr(*self.places[0]) if self.places else None

    def settle(self, shard: nn.Parameter, copy: nn.Parameter) -> None:
        """Carry ``requires_grad`` and hooks over between the shard and the copy that is
        shown in its place."""
        # Whichever of the two was changed since the last look decides for both.
        if copy.requires_grad != self.required_grad:
            shard.requires_grad_(copy.requires_grad)
        elif shard.requires_grad != copy.requires_grad:
            copy.requires_grad_(shard.requires_grad)
        self.required_grad = shard.requires_grad
        # A copy is gathered many times and keeps the hooks that it once got.
        if shows_hooks(copy):
            return
        hooks = hooks_of(shard)
        if hooks is not None:
            hooks.show_on(copy)
        elif shard._backward_hooks is not None:
            copy._backward_hooks = shard._backward_hooks


def _note_parametrization(
    module: nn.Module, name: str, parameter: nn.Parameter
) -> None:
    """Note where PEFT's adapters of fused experts (``target_parameters``) parametrize a
    copy in each forward."""
    # The value that it is registered with is the copy itself, which counts as a change.
    if (
        isinstance(module, ParametrizationList)
        and name not in module._parameters
        and is_noted(parameter)
    ):
        note_copy(parameter)

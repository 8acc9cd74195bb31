"""Calls into a model: inside one, modules show the parameters that FSDP2 gathered; between calls they show shards.

After a forward FSDP2 leaves roots, and with ``reshard_after_forward=False`` all units, unsharded for the backward pass
that may follow, and shows these copies as the module's parameters. Whoever lists, freezes, edits or clips parameters
then would have tensors that are thrown away. So when the outermost call has ended, modules show their shards, whatever
is still there for backward; and the next call gathers again what an earlier one left, because weights may have been
edited in between in ways that nothing records (``p.data.mul_()``, foreach and fused kernels).

Between a Trainer's runs the outermost call begins with a meeting of the ranks that hold the parts of the model: one
that only some of them make (`if rank == 0: model(batch)`) would wait for the others forever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from smp_core.module_names import clean_name
from smp_core.rank_watch import meet_between_runs
from smp_core.sharding.fsdp.internals import group_of, state_of
from smp_core.sharding.fsdp.passes import backward_pass, drop_gather
from smp_core.sharding.fsdp.units import ShardedUnit

POST_ACCUMULATE = (
    "%s has a hook of register_post_accumulate_grad_hook, which would see this rank's part of a gradient: sums over "
    "ranks are complete when the accumulation window closes; do its work after backward, or in on_before_optimizer_step"
)


class Calls:
    """The calls into one model.

    Args:
        model: with all its units sharded by ``fully_shard``.
        ranks: the partition group, which makes calls together.
        units: those that hear of their uses.
    """

    def __init__(self, model: nn.Module, ranks: Sequence[int], units: Iterable[ShardedUnit] = ()) -> None:
        self._name = type(model).__name__.removeprefix("FSDP")
        self._names = {id(module): clean_name(name) for name, module in model.named_modules()}
        self._ranks = ranks
        self._depth = 0
        self._are_ahead = False
        self._units: dict[int, _Unit] = {}
        hearing = {id(group_of(unit.module)): unit for unit in units}
        parameter_names = {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}
        for module in model.modules():
            if isinstance(module, FSDPModule):
                group = group_of(module)
                if group is not None and id(group) not in self._units:
                    self._units[id(group)] = _Unit(group, parameter_names, hearing.get(id(group)))
                module.register_forward_pre_hook(self._before_forward, prepend=True)
                module.register_forward_hook(self._after_forward, always_call=True)

    def run_as_forward(self, unit: ShardedUnit, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method with the unit's parameters unsharded: one call, whatever forwards there are in it."""
        self._meet(unit.module, getattr(method, "__name__", None))
        self._depth += 1
        try:
            unit.refuse_after_failure()
            state = state_of(unit.module)
            args, kwargs = state._pre_forward(unit.module, args, kwargs)
            return state._post_forward(unit.module, args, method(*args, **kwargs))
        finally:
            self._depth -= 1
            self._after_forward(unit.module)

    def show_shards(self, kept: bool = False) -> None:
        """Let every module show its shards, whatever is unsharded.

        Args:
            kept: what is unsharded stays for the window's next micro-batch (``keep_between_micro_batches``, pipeline
                stages), and is gathered again only after edits that a tensor's version shows.
        """
        for unit in self._units.values():
            unit.show_shards(kept)

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Let calls inside, several before the backward pass of the first, find what the one before left."""
        self._are_ahead = True
        try:
            yield
        finally:
            self._are_ahead = False

    @torch.compiler.disable
    def _before_forward(self, module: nn.Module, *_: Any) -> None:
        self._meet(module)

    @torch.compiler.disable
    def _after_forward(self, module: nn.Module, *_: Any) -> None:
        # FSDP2 has forgotten the outermost forward by now; one that raised is still there.
        if self._is_outermost(module):
            self.show_shards(self._are_ahead)

    def _meet(self, module: nn.Module, method: str | None = None) -> None:
        if self._is_outermost(module):
            parts = (self._name, self._names[id(module)], method)
            meet_between_runs(".".join(filter(None, parts)) + "(...)", self._ranks)

    def _is_outermost(self, module: nn.Module) -> bool:
        """Tell whether no other call goes on, nor a backward pass, whose recomputed forwards find what is unsharded."""
        state = state_of(module)
        within = self._depth > 0 or state._state_ctx.iter_forward_root not in (None, state)
        return not within and backward_pass() == -1


class _Unit:
    """Parameters that are gathered together, and whether their modules show them unsharded."""

    def __init__(self, group: Any, names: Mapping[int, str], unit: ShardedUnit | None) -> None:
        self._group, self._unit = group, unit
        self._left_by_a_call = False
        self._kept_versions: list[int] | None = None
        self._parameters = [_ShownParameter(each, names) for each in group.fsdp_params]
        if unit is not None:
            self._begin_forward, group.pre_forward = group.pre_forward, self._forward
        self._unshard = _outside_inference_mode(group.unshard)
        group.unshard = self._gather
        group.wait_for_unshard = _outside_inference_mode(group.wait_for_unshard)
        group.reshard = _outside_inference_mode(group.reshard)

    def show_shards(self, kept: bool) -> None:
        group = self._group
        if group.is_sharded and group._all_gather_result is None:
            return
        self._left_by_a_call = True
        for parameter in group.fsdp_params:
            parameter._setattr_on_modules(parameter.sharded_param)
        if kept:
            self._kept_versions = self._shard_versions()

    def _forward(self, module: nn.Module, *inputs: Any) -> Any:
        """Call FSDP2's ``pre_forward``, which gathers."""
        assert self._unit is not None
        self._unit.note_use(inputs)
        inputs = self._begin_forward(module, *inputs)
        self._unit.find_dtypes()
        return inputs

    def _gather(self, async_op: bool = False) -> None:
        """Call FSDP2's ``unshard``. Parameters that an earlier call left unsharded are used again in its own backward
        pass and window only."""
        group = self._group
        in_backward = backward_pass() != -1
        if in_backward and self._unit is not None and self._unit.is_passed_by:
            return  # FSDP2 gathers ahead what came before in forward, and roots always
        if not in_backward:
            for parameter in self._parameters:
                parameter.check()
        if self._left_by_a_call:
            self._left_by_a_call = False
            if in_backward or self._kept_versions == self._shard_versions():
                if group.is_unsharded:
                    for parameter in group.fsdp_params:
                        parameter.to_unsharded()
            else:
                drop_gather(group)
                group._to_sharded()
        if group.is_sharded:
            self._kept_versions = None
        for parameter in self._parameters:
            parameter.settle()
        self._unshard(async_op)

    def _shard_versions(self) -> list[int]:
        shards = [parameter.sharded_param for parameter in self._group.fsdp_params]
        return [shard._version + shard._local_tensor._version for shard in shards]


class _ShownParameter:
    """A parameter, and the tensor that modules show for it. ``requires_grad`` and hooks belong to the parameter,
    whichever tensor shows it or was given them; what else is done to a gathered copy, or put in its place, is
    refused."""

    _shown: nn.Parameter
    _version: int
    _required_grad: bool

    def __init__(self, parameter: Any, names: Mapping[int, str]) -> None:
        self._parameter = parameter
        self._name = names.get(id(parameter.sharded_param), parameter._module_info.param_name)
        self._put_on_modules = parameter._setattr_on_modules
        parameter._setattr_on_modules = self._show
        self._note(parameter.sharded_param)
        self._data = self._address_of_data()

    def check(self) -> None:
        """Refuse what would have no effect: ``parameter.data = tensor`` (DTensor keeps the shard that it had), and
        hooks that want a complete gradient, which there is only when a window closes."""
        data = self._address_of_data()
        if data[0] == self._data[0] and data[1] != self._data[1]:
            raise ValueError(
                f"{self._name}.data was assigned to, which has no effect on a sharded parameter (a torch DTensor); "
                "write into it instead: with torch.no_grad(): parameter.copy_(value)"
            )
        self._data = data
        if self._parameter.sharded_param._post_accumulate_grad_hooks:
            raise ValueError(POST_ACCUMULATE % self._name)

    def settle(self) -> None:
        """Carry ``requires_grad`` and hooks over between the shard and the unsharded copy that is shown in its
        place."""
        shard, shown = self._parameter.sharded_param, self._shown
        if shown is shard:
            return
        if shown.requires_grad != self._required_grad:
            shard.requires_grad_(shown.requires_grad)
        else:
            shown.requires_grad_(shard.requires_grad)
        self._required_grad = shard.requires_grad
        if shard._backward_hooks is not None:
            shown._backward_hooks = shard._backward_hooks

    def _show(self, tensor: nn.Parameter) -> None:
        """Show ``tensor`` on the modules, in the place of FSDP2's ``_setattr_on_modules``; refuse what was replaced or
        changed since."""
        parameter, shown = self._parameter, self._shown
        info = parameter._module_info
        for module, name in [
            (info.module, info.param_name),
            *zip(info.shared_modules, info.shared_param_names, strict=True),
        ]:
            there = getattr(module, name, None)
            if there is not shown and there is not parameter.sharded_param:
                raise ValueError(
                    f"{self._name} was replaced after the model was sharded, and what is there now would be neither "
                    "gathered nor reduced; write into the parameter (with torch.no_grad(): parameter.copy_(value)), "
                    "or replace it before the model is prepared"
                )
        self.settle()
        if _version(shown) != self._version and shown is not parameter.sharded_param:
            raise ValueError(
                f"{self._name} was changed in place inside a forward or training_step, where it is a gathered copy "
                "that is thrown away (an embedding with max_norm does that too); change it between calls, for example "
                "in on_train_batch_end, where the module shows its shards"
            )
        self._put_on_modules(tensor)
        self._note(tensor)
        self.settle()

    def _note(self, tensor: nn.Parameter) -> None:
        self._shown = tensor
        self._version = _version(tensor)
        self._required_grad = tensor.requires_grad

    def _address_of_data(self) -> tuple[int, int]:
        shard = self._parameter.sharded_param
        return id(shard._local_tensor), shard.untyped_storage()._cdata


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _outside_inference_mode(gather: Callable[..., None]) -> Callable[..., None]:
    """Run a gather outside ``torch.inference_mode``. The first gather makes the tensors that all later ones fill, and a
    secondary shard is shown until the next: made inside, they could not be trained with."""

    def gathered(*args: Any, **kwargs: Any) -> None:
        if not torch.is_inference_mode_enabled():
            gather(*args, **kwargs)
            return
        with torch.inference_mode(False):
            gather(*args, **kwargs)

    return gathered

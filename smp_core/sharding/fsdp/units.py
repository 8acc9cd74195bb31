"""ShardedUnit: one module that FSDP2 gathers, frees and reduces as a whole.

What is read here beyond the public API, and why no public one will do:

- ``module._get_fsdp_state()._fsdp_param_group.fsdp_params``: which parameters, in which order and padding, make up the
  flat tensor that ``set_all_reduce_hook`` hands out, and ``group._reduce_dtype``, its dtype;
- ``pre_forward`` and ``post_backward`` of that group, which every way into a unit goes through (forward, and
  :meth:`ShardedUnit.run_as_forward`, which methods of ``forward_methods`` go through): how often a unit is used, and
  which of its parameters a backward pass reached, by ``_unsharded_param.grad``;
- ``state._pre_forward`` / ``_post_forward``: ``register_fsdp_forward_method`` replaces the method on the module by one
  whose signature Lightning misreads;
- ``state._state_ctx``: whether an earlier backward pass failed;
- ``unshard``, ``wait_for_unshard`` and ``reshard`` of the group: every gather and what is kept of it, in whatever mode
  forward runs;
- ``unsharded_accumulated_grad`` of parameters, and ``finalize_backward``, ``_training_state`` (``TrainingState`` of
  ``_fully_shard._fsdp_common``) and ``comm_ctx`` of the group: whole gradients that wait for the window's last backward
  pass, and their reduction where no pass does it;
- ``reset_sharded_param`` of parameters and ``_init_mp_dtypes`` of the group: shards that are stored in another dtype
  from the first optimizer on; with ``_orig_dtype``: units that were frozen as a whole when FSDP2 looked for the dtypes
  of their gradients, and are trained later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from smp_core.sharding.fsdp.passes import FAILED_PASS, backward_pass, forget_reductions


@dataclass(frozen=True)
class Slot:
    """Where one parameter's local gradient lies in its unit's flat reduced gradient.

    ``offset`` and ``padded`` count elements; ``padded`` is ceil(rows / shard degree) x row size.
    """

    index: int
    offset: int
    padded: int


class ShardedUnit:
    """One wrapped module: its trainable parameters in FSDP2's order, and which of them autograd reached.

    Args:
        in_order: whether ``parameter_names`` are in that order, perhaps some of other modules sharded with this one.
    """

    def __init__(
        self, name: str, module: nn.Module, parameter_names: Sequence[str], is_root: bool, in_order: bool = False
    ) -> None:
        assert isinstance(module, FSDPModule)
        self.name = name
        self.module = module
        self.is_root = is_root
        self.was_called = False
        self.parameter_names = tuple(parameter_names)
        self.reached: set[int] = set()
        self._reached_in_pass: set[int] = set()
        self._uses_left = 0  # forwards that no backward pass has come through yet, recomputed ones not counted
        self.was_trainable: set[int] = set()
        self._reducing: set[int] = set()  # the parameters in what FSDP2 reduces at the moment
        self._on_hold: Callable[[], None] | None = None
        self.awaits_reduction = False
        """Whether backward passes came through the unit whose gradients are whole and not reduced yet; the same on all
        ranks of the partition group, also on one that has none."""
        group: Any = module._get_fsdp_state()._fsdp_param_group
        if in_order:
            self.names = list(parameter_names)
        else:
            names = {id(p): f"{name}.{local}" if name else local for local, p in module.named_parameters()}
            self.names = [names[id(parameter)] for parameter in self.parameters()]
        if group is not None:
            group.pre_forward = self._using(group.pre_forward)
            group.post_backward = self._noting(group.post_backward)
            group.unshard = outside_inference_mode(group.unshard)
            group.wait_for_unshard = outside_inference_mode(group.wait_for_unshard)
            group.reshard = outside_inference_mode(group.reshard)
        if is_root:
            module.register_forward_pre_hook(self._refuse_after_failure, prepend=True)

    @property
    def fsdp_parameters(self) -> list[Any]:
        """FSDP2's own objects; for the files of this room."""
        group = self.module._get_fsdp_state()._fsdp_param_group
        return [] if group is None else group.fsdp_params

    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters (DTensors), trainable or not, in FSDP2's order."""
        return [fsdp_parameter.sharded_param for fsdp_parameter in self.fsdp_parameters]

    def shard_layout(self) -> list[tuple[str, int]]:
        """Full name and elements, padding included, of each parameter in the shard that a gather sends, in order."""
        sizes = (parameter.padded_sharded_param_size.numel() for parameter in self.fsdp_parameters)
        return list(zip(self.names, sizes, strict=True))

    def local_shards(self) -> list[torch.Tensor]:
        """This rank's part of each parameter, trainable or not."""
        return [parameter.to_local().detach() for parameter in self.parameters()]  # type: ignore[attr-defined]

    def slots(self, n_elements: int) -> list[Slot]:
        """The layout of the flat reduced gradient of ``n_elements`` that FSDP2 hands out now: every trainable
        parameter, reached or not, and frozen ones of which whole gradients are held."""
        slots = self._layout(self._reducing)
        if not slots or slots[-1].offset + slots[-1].padded != n_elements:
            raise AssertionError(f"unit {self.name!r}: a reduced gradient of {n_elements} elements fits no layout")
        return slots

    def window_slots(self) -> list[Slot]:
        """The layout of what all ranks reduce: every parameter that is trainable, or was in an earlier pass,
        also if this rank did not use the unit at all."""
        trainable = {index for index, parameter in enumerate(self.parameters()) if parameter.requires_grad}
        return self._layout(trainable | self.was_trainable)

    def zeros(self, n_elements: int) -> torch.Tensor:
        """A flat reduced gradient of nothing."""
        group: Any = self.module._get_fsdp_state()._fsdp_param_group
        slots = self.window_slots()
        dtype = self._sum_dtype(self.fsdp_parameters[slots[0].index if slots else 0])
        return torch.zeros(n_elements, dtype=dtype, device=group.device)

    @staticmethod
    def _sum_dtype(parameter: Any) -> torch.dtype:
        """What FSDP2 reduces the parameter's gradient in."""
        return parameter.reduce_dtype or parameter.param_dtype or parameter.orig_dtype

    def pass_is_over(self) -> bool:
        """Whether the present pass has nothing more for this unit, when FSDP2 has just reduced it: no use is left that
        FSDP2 will reduce it for (on all ranks of the partition group), and every trainable parameter has its gradient,
        which autograd hands over once in a pass, when it has added up all uses. (Uses may be left over of a graph that
        goes through backward twice.)"""
        whole = (parameter._unsharded_param for parameter in self.fsdp_parameters)
        trainable = {index for index, parameter in enumerate(whole) if parameter.requires_grad}
        return self._uses_left == 0 and trainable <= self._reached_in_pass

    def end_of_pass(self) -> None:
        self._reached_in_pass.clear()
        self.was_trainable |= {index for index, parameter in enumerate(self.parameters()) if parameter.requires_grad}

    def hold_gradients(self, on_hold: Callable[[], None] | None) -> None:
        """Whether backward passes from here on leave whole gradients, which add up to those of earlier passes, instead
        of having them reduced; ``on_hold`` is then called by each that comes through the unit. None: they are reduced,
        together with what is held."""
        self._on_hold = on_hold
        cast(Any, self.module).set_requires_gradient_sync(on_hold is None, recurse=False)

    def reduce_held(self) -> None:
        """Reduce what is held now, outside of a backward pass. Collective over the partition group."""
        group: Any = self.module._get_fsdp_state()._fsdp_param_group
        before = self._on_hold
        self.hold_gradients(None)
        group.post_backward()
        group.finalize_backward()
        group._training_state = TrainingState.IDLE
        forget_reductions(group.comm_ctx)
        self.hold_gradients(before)

    def indices(self, ids: Container[int]) -> set[int]:
        """The parameters with these ids; those of gathered copies, which are shown inside a call, count too."""
        return {
            index
            for index, parameter in enumerate(self.fsdp_parameters)
            if id(parameter.sharded_param) in ids or id(getattr(parameter, "_unsharded_param", None)) in ids
        }

    def drop_gradients(self, indices: Container[int], set_to_none: bool = True) -> None:
        """Drop whole gradients of these parameters that are held, and forget that they were reached; or
        (``set_to_none=False``) leave them at zero."""
        for index, parameter in enumerate(self.fsdp_parameters):
            if index not in indices:
                continue
            if set_to_none:
                self.reached.discard(index)
                parameter.unsharded_accumulated_grad = None
            elif parameter.unsharded_accumulated_grad is not None:
                parameter.unsharded_accumulated_grad.zero_()

    def held_bytes(self) -> int:
        """Bytes of whole gradients that wait for their reduction."""
        held = (parameter.unsharded_accumulated_grad for parameter in self.fsdp_parameters)
        return sum(gradient.numel() * gradient.element_size() for gradient in held if gradient is not None)

    def end_of_window(self) -> None:
        self.drop_gradients(range(len(self.fsdp_parameters)))
        self.awaits_reduction = False
        self._uses_left = 0
        self._reached_in_pass.clear()
        self.was_trainable.clear()

    def layout(self, indices: Iterable[int]) -> list[Slot]:
        """The layout of a flat reduced gradient of these parameters."""
        return self._layout(set(indices))

    @torch.no_grad()
    def store_in(self, dtype: torch.dtype, indices: Iterable[int]) -> None:
        """From now on these parameters' shards are stored in ``dtype``; they stay the same objects.

        Raises:
            ValueError: somebody refers weakly to one of them, which torch then cannot exchange.
        """
        cast(Any, self.module).reshard()
        for index in indices:
            parameter = self.fsdp_parameters[index]
            kept = parameter.sharded_param
            stored = nn.Parameter(kept.detach().to(dtype), requires_grad=kept.requires_grad)
            stored.__dict__.update(kept.__dict__)  # what others have noted on it
            try:
                torch.utils.swap_tensors(kept, stored)
            except RuntimeError as error:
                raise ValueError(
                    f"{self.names[index]} cannot be stored in {dtype} any more ({error}): something refers to it, for "
                    "example code that was compiled by a forward before the optimizer was made; make the optimizer "
                    "first, or write optimizer_shard='shard'"
                ) from error
            parameter.reset_sharded_param()
        cast(Any, self.module)._get_fsdp_state()._fsdp_param_group._init_mp_dtypes()

    def _layout(self, indices: Container[int]) -> list[Slot]:
        slots, offset = [], 0
        for index, parameter in enumerate(self.fsdp_parameters):
            if index in indices:
                padded = parameter.padded_sharded_param_size.numel()
                slots.append(Slot(index, offset, padded))
                offset += padded
        return slots

    def local_gradient(self, slot: Slot, flat: torch.Tensor) -> DTensor:
        """The parameter's gradient as a DTensor like the parameter, viewed from ``flat`` (cast if dtypes differ)."""
        parameter = self.fsdp_parameters[slot.index]
        flat = flat.to(parameter.orig_dtype)
        local = flat.as_strided(parameter.sharded_size, parameter.contiguous_sharded_stride, slot.offset)
        return parameter.to_sharded_dtensor(local)

    def is_gathered(self) -> bool:
        """Whether the unit's parameters are whole at the moment, or it has none."""
        group: Any = self.module._get_fsdp_state()._fsdp_param_group
        return group is None or group.is_unsharded

    def gathered_bytes(self) -> int:
        """Bytes of the unit's whole parameters that are there now."""
        return sum(storage.nbytes() for storage in self._gathered_storages())

    def gathered_addresses(self) -> set[int]:
        """Where they are."""
        return {storage.data_ptr() for storage in self._gathered_storages()}

    def _gathered_storages(self) -> list[torch.UntypedStorage]:
        whole = (getattr(parameter, "_unsharded_param", None) for parameter in self.fsdp_parameters)
        found = [each.to_local() if isinstance(each, DTensor) else each for each in whole if each is not None]
        return [storage for each in found if (storage := each.untyped_storage()).nbytes()]

    def beside_parameters(self, flat: torch.Tensor) -> torch.Tensor:
        """``flat`` on the device of the sharded parameters: another one where they are offloaded, and then possibly
        still on its way."""
        parameters = self.parameters()
        return flat.to(parameters[0].device, non_blocking=True) if parameters else flat

    def run_as_forward(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``method`` of the module with the unit's parameters gathered, as if it were the module's forward."""
        self._refuse_after_failure()
        state = self.module._get_fsdp_state()
        args, kwargs = state._pre_forward(self.module, args, kwargs)
        return state._post_forward(self.module, args, method(*args, **kwargs))

    def _using(self, pre_forward: Callable[..., Any]) -> Callable[..., Any]:
        """Count uses."""

        def used(*args: Any, **kwargs: Any) -> Any:
            self.was_called = True
            # A unit inside a checkpointed module is used again in backward.
            self._uses_left += torch.is_grad_enabled() and backward_pass() == -1
            inputs = pre_forward(*args, **kwargs)
            group: Any = self.module._get_fsdp_state()._fsdp_param_group
            if group._orig_dtype is None:
                group._init_mp_dtypes()
            return inputs

        return used

    def _noting(self, post_backward: Callable[..., None]) -> Callable[..., None]:
        """Before gradients are reduced: note which there are, and put zeros where there are none, so that ranks that
        took another branch still send tensors of one size and layout. Or hold them, if a later pass reduces them."""

        def noted(*args: Any) -> None:
            self._uses_left = max(self._uses_left - 1, 0)
            used = [parameter for parameter in self.fsdp_parameters if hasattr(parameter, "_unsharded_param")]
            for index, parameter in enumerate(used):
                if parameter._unsharded_param.grad is not None:
                    self.reached.add(index)
                    self._reached_in_pass.add(index)
            if self._on_hold is None:
                self._complete_gradients(used)
                with self._without_visible_gradients():
                    post_backward(*args)
            elif used:  # FSDP2 would look for the whole parameters of one that never ran
                self.awaits_reduction = True
                self.was_trainable |= {i for i, each in enumerate(used) if each._unsharded_param.requires_grad}
                self._on_hold()
                self._set_gradients_aside(used)
                post_backward(*args)

        return noted

    @contextlib.contextmanager
    def _without_visible_gradients(self) -> Iterator[None]:
        """Around what FSDP2 reduces: it adds the sum to ``.grad``, which is what it was before the window, and what
        autograd adds to it when a term of the loss is made of shards (a penalty on weights)."""
        shards = self.parameters()
        before = [shard.grad for shard in shards]
        for shard in shards:
            shard.grad = None
        try:
            yield
        finally:
            for shard, gradient in zip(shards, before, strict=True):
                shard.grad = gradient

    def _complete_gradients(self, used: Sequence[Any]) -> None:
        """A gradient for every parameter that all ranks reduce now, in one dtype."""
        self._reducing = {i for i, parameter in enumerate(used) if parameter._unsharded_param.requires_grad}
        if self.awaits_reduction:
            self._reducing |= self.was_trainable
            self._set_gradients_aside(used)
        for index in self._reducing:
            parameter = used[index]
            whole = parameter._unsharded_param
            if self.awaits_reduction and parameter.unsharded_accumulated_grad is None:
                parameter.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=self._sum_dtype(parameter))
            elif not self.awaits_reduction and whole.grad is None:
                whole.grad = torch.zeros_like(whole)
        self.awaits_reduction = False

    def _set_gradients_aside(self, used: Sequence[Any]) -> None:
        """Whole gradients become, or are added to, what FSDP2 reduces with the next that it reduces; parameters have
        none then, and show what the next pass reaches."""
        for parameter in used:
            parameter.accumulate_unsharded_grad_if_needed()
            gradient = parameter._unsharded_param.grad
            if gradient is not None:
                parameter.unsharded_accumulated_grad = gradient.to(self._sum_dtype(parameter))
                parameter._unsharded_param.grad = None

    @torch.compiler.disable
    def _refuse_after_failure(self, *_: Any) -> None:
        """FSDP2 itself would go on from the middle of the failed pass and return wrong gradients."""
        state = self.module._get_fsdp_state()
        # Queued inside a pass is normal: forwards run there for activation checkpointing.
        if state._state_ctx.post_backward_final_callback_queued and backward_pass() == -1:
            raise RuntimeError(FAILED_PASS)


def outside_inference_mode(gather: Callable[..., None]) -> Callable[..., None]:
    """What FSDP2 gathers into is made by the first gather and used by all that follow, and a secondary shard is shown
    until the next: made inside ``torch.inference_mode`` they could not be trained with."""

    def gathered(*args: Any, **kwargs: Any) -> None:
        if not torch.is_inference_mode_enabled():
            gather(*args, **kwargs)
            return
        with torch.inference_mode(False):
            gather(*args, **kwargs)

    return gathered

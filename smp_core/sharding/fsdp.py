"""FSDP2 units on the 1-D shard mesh: the only file that touches FSDP2's internals.

FSDP2 shards, gathers and reduces inside the partition group; the hop across replicas is ours
(:mod:`smp_core.sharding.accumulation`). What is read here beyond the public API, and why no public one will do:

- ``module._get_fsdp_state()._fsdp_param_group.fsdp_params``: which parameters, in which order and padding, make up the
  flat tensor that ``set_all_reduce_hook`` hands out;
- ``pre_forward`` and ``post_backward`` of that group, which every way into a unit goes through (forward, methods
  registered with ``register_fsdp_forward_method``, :meth:`ShardedUnit.run_as_forward`): how often a unit is used, and
  which of its parameters a backward pass reached, by ``_unsharded_param.grad``; that one's ``requires_grad`` goes stale
  when the sharded parameter's is changed while it is kept gathered;
- ``state._pre_forward_hook_handle``, ``state._post_forward_hook_handle``, and ``_disable_current_modes``: inside a
  selectively checkpointed module what a unit's hooks do must not be taken for operations of the model;
- ``state._state_ctx``, ``_comm_ctx`` and training states: what a failed backward pass leaves behind, which torch < 2.13
  has no ``reset_iter_state`` for, and whether it left something;
- ``post_forward_mesh_info`` of groups and parameters, with ``HSDPMeshInfo``: ``reshard_after_forward=<int>`` would make
  two process groups for every unit; here all units share two;
- ``group._all_gather_result``: gathers in flight, prefetched for a forward that never came;
- ``group.mp_policy``, ``offload_policy``, ``reset_sharded_param`` and ``_sharded_param_data`` of a model that somebody
  else sharded: what it computes in, and parameters that were exchanged since (FSDP2 takes note at the first forward);
  with ``_init_mp_dtypes`` also where shards are stored in another dtype from the first optimizer on;
- ``group._partial_reduce_output``: what torch's own two-hop holds between micro-batches;
- ``state._pre_forward`` / ``_post_forward``: ``register_fsdp_forward_method`` replaces the method on the module by one
  whose signature Lightning misreads;
- ``FSDPParam._sharded_local_tensor``: where FSDP2 looks for ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``. Its
  documented place for them is a tensor subclass as the parameter, which state dicts would then show; and
  ``_init_extensions``, ``_sharded_param_data``, ``_orig_size``: what belongs to it;
- ``torch.autograd.Variable._execution_engine.queue_callback`` and ``torch._C._current_graph_task_id``: the end of a
  backward pass, as FSDP2 itself finds it, and which pass it is.

FSDP2 is told to add up and never to divide (``set_force_sum_reduction_for_comms`` with a divide factor of 1), so that
every gradient is divided exactly once, by us, whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from smp_core.comm.flat import CommObject
from smp_core.fp8.gathered import WeightGather
from smp_core.sharding.wrap import WrapPlan

FAILED_PASS = (
    "an earlier backward pass failed and left part of its gradients behind; call window.abandon() before the next "
    "forward (in Lightning: trainer.strategy.window.abandon())"
)


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
        self.parameter_names = tuple(parameter_names)
        self.reached: set[int] = set()
        self._reached_in_pass: set[int] = set()
        self._uses_left = 0  # forwards that no backward pass has come through yet, recomputed ones not counted
        self.was_trainable: set[int] = set()
        group: Any = module._get_fsdp_state()._fsdp_param_group
        if in_order:
            self.names = list(parameter_names)
        else:
            names = {id(p): f"{name}.{local}" if name else local for local, p in module.named_parameters()}
            self.names = [names[id(parameter)] for parameter in self.parameters()]
        if group is not None:
            group.pre_forward = self._using(group.pre_forward)
            group.post_backward = self._noting(group.post_backward)
        if is_root:
            module.register_forward_pre_hook(self._refuse_after_failure, prepend=True)

    @property
    def _fsdp_parameters(self) -> list[Any]:
        group = self.module._get_fsdp_state()._fsdp_param_group
        return [] if group is None else group.fsdp_params

    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters (DTensors), trainable or not, in FSDP2's order."""
        return [fsdp_parameter.sharded_param for fsdp_parameter in self._fsdp_parameters]

    def shard_layout(self) -> list[tuple[str, int]]:
        """Full name and elements, padding included, of each parameter in the shard that a gather sends, in order."""
        sizes = (parameter.padded_sharded_param_size.numel() for parameter in self._fsdp_parameters)
        return list(zip(self.names, sizes, strict=True))

    def local_shards(self) -> list[torch.Tensor]:
        """This rank's part of each parameter, trainable or not."""
        return [parameter.to_local().detach() for parameter in self.parameters()]  # type: ignore[attr-defined]

    def slots(self, n_elements: int) -> list[Slot]:
        """The layout of a flat reduced gradient of ``n_elements``: every trainable parameter, reached or not."""
        whole = [parameter._unsharded_param for parameter in self._fsdp_parameters]
        slots = self._layout({index for index, parameter in enumerate(whole) if parameter.requires_grad})
        if not slots or slots[-1].offset + slots[-1].padded != n_elements:
            raise AssertionError(f"unit {self.name!r}: a reduced gradient of {n_elements} elements fits no layout")
        return slots

    def window_slots(self) -> list[Slot]:
        """The layout of what all ranks reduce: every parameter that is trainable, or was in an earlier pass,
        also if this rank did not use the unit at all."""
        trainable = {index for index, parameter in enumerate(self.parameters()) if parameter.requires_grad}
        return self._layout(trainable | self.was_trainable)

    def zeros(self, slots: Sequence[Slot]) -> torch.Tensor:
        """A flat reduced gradient of nothing."""
        group: Any = self.module._get_fsdp_state()._fsdp_param_group
        first = self._fsdp_parameters[slots[0].index]
        dtype = group._reduce_dtype or first.param_dtype or first.orig_dtype
        return torch.zeros(slots[-1].offset + slots[-1].padded, dtype=dtype, device=group.device)

    def is_complete(self) -> bool:
        """Whether the present pass has nothing more for this unit, when FSDP2 has just reduced it: no use is left that
        FSDP2 will reduce it for (on all ranks of the partition group), and every trainable parameter has its gradient,
        which autograd hands over once in a pass, when it has added up all uses. (Uses may be left over of a graph that
        goes through backward twice.)"""
        whole = (parameter._unsharded_param for parameter in self._fsdp_parameters)
        trainable = {index for index, parameter in enumerate(whole) if parameter.requires_grad}
        return self._uses_left == 0 and trainable <= self._reached_in_pass

    def end_of_pass(self) -> None:
        self._reached_in_pass.clear()
        self.was_trainable |= {index for index, parameter in enumerate(self.parameters()) if parameter.requires_grad}

    def end_of_window(self) -> None:
        self._uses_left = 0
        self.reached.clear()
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
            parameter = self._fsdp_parameters[index]
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
        for index, parameter in enumerate(self._fsdp_parameters):
            if index in indices:
                padded = parameter.padded_sharded_param_size.numel()
                slots.append(Slot(index, offset, padded))
                offset += padded
        return slots

    def local_gradient(self, slot: Slot, flat: torch.Tensor) -> DTensor:
        """The parameter's gradient as a DTensor like the parameter, viewed from ``flat`` (cast if dtypes differ)."""
        parameter = self._fsdp_parameters[slot.index]
        flat = flat.to(parameter.orig_dtype)
        local = flat.as_strided(parameter.sharded_size, parameter.contiguous_sharded_stride, slot.offset)
        return parameter.to_sharded_dtensor(local)

    def gathered_bytes(self) -> int:
        """Bytes of the unit's whole parameters that are there now."""
        return sum(storage.nbytes() for storage in self._gathered_storages())

    def gathered_addresses(self) -> set[int]:
        """Where they are."""
        return {storage.data_ptr() for storage in self._gathered_storages()}

    def _gathered_storages(self) -> list[torch.UntypedStorage]:
        whole = (getattr(parameter, "_unsharded_param", None) for parameter in self._fsdp_parameters)
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
        """Count uses; and what was gathered by an earlier forward and kept learns now that its parameters were frozen
        or are trained again (``toggle_optimizer``): FSDP2 tells it only when it gathers."""

        def used(*args: Any, **kwargs: Any) -> Any:
            # A unit inside a checkpointed module is used again in backward.
            self._uses_left += torch.is_grad_enabled() and backward_pass() == -1
            inputs = pre_forward(*args, **kwargs)
            for parameter in self._fsdp_parameters:
                wanted = parameter.sharded_param.requires_grad
                if parameter._unsharded_param.requires_grad != wanted:
                    parameter._unsharded_param.requires_grad_(wanted)
            return inputs

        return used

    def _noting(self, post_backward: Callable[..., None]) -> Callable[..., None]:
        """Before gradients are reduced: note which there are, and put zeros where there are none, so that ranks that
        took another branch still send tensors of one size and layout."""

        def noted(*args: Any) -> None:
            self._uses_left = max(self._uses_left - 1, 0)
            for index, parameter in enumerate(self._fsdp_parameters):
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is None:
                    continue
                if whole.grad is not None:
                    self.reached.add(index)
                    self._reached_in_pass.add(index)
                elif whole.requires_grad:
                    whole.grad = torch.zeros_like(whole)
            post_backward(*args)

        return noted

    @torch.compiler.disable
    def _refuse_after_failure(self, *_: Any) -> None:
        """FSDP2 itself would go on from the middle of the failed pass and return wrong gradients."""
        state = self.module._get_fsdp_state()
        # Queued inside a pass is normal: forwards run there for activation checkpointing.
        if state._state_ctx.post_backward_final_callback_queued and backward_pass() == -1:
            raise RuntimeError(FAILED_PASS)


def _hide_hooks_from_modes(module: nn.Module) -> None:
    state: Any = module._get_fsdp_state()  # type: ignore[operator]

    def hidden(hook: Callable[..., Any]) -> Callable[..., Any]:
        @torch.compiler.disable
        def outside_of_modes(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return hook(*args, **kwargs)

        return outside_of_modes

    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._pre_forward_hook_handle = module.register_forward_pre_hook(
        hidden(state._pre_forward), prepend=True, with_kwargs=True
    )
    state._post_forward_hook_handle = module.register_forward_hook(hidden(state._post_forward))


def shard_units(
    model: nn.Module,
    plan: WrapPlan,
    mesh: DeviceMesh,
    *,
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool,
    secondary_mesh: DeviceMesh | None = None,
    all_gather: Callable[[ShardedUnit], CommObject],
    reduce_scatter: Callable[[ShardedUnit], CommObject],
    before_shard: Callable[[nn.Module, Iterable[nn.Parameter]], None] | None = None,
    recomputed: Container[str] = (),
    offload: bool = False,
    gather_of: Callable[[nn.Module, str], WeightGather | None] | None = None,
    symmetric_memory: bool = False,
) -> list[ShardedUnit]:
    """``fully_shard`` every planned unit, innermost first, with our communication objects.

    Args:
        mesh: the 1-D mesh over the partition group.
        secondary_mesh: (across, secondary), the ranks that keep a copy, sharded among them, after forward.
        all_gather, reduce_scatter: make a unit's communication objects.
        before_shard: called with each unit's module and its parameters just before they are sharded, while they are
            whole (equal initial weights are made there, one unit at a time).
        recomputed: names of units that lie inside checkpointed modules.
        offload: shards of parameters, gradients and so optimizer states live in host memory.
        gather_of: (module, parameter's name in it) -> how the parameter travels, if not as it is.
        symmetric_memory: torch's own communication objects on symmetric memory instead of ours.

    Returns:
        the units in the plan's order; roots keep their parameters gathered after forward, as FSDP2 does.
    """
    by_name = dict(model.named_parameters())
    replicated = {by_name[name] for name in plan.replicated}
    units = []
    for planned in plan.units:
        if before_shard is not None:
            before_shard(planned.module, [by_name[name] for name in planned.parameters])
        fully_shard(
            planned.module,
            mesh=mesh,
            reshard_after_forward=None if planned.is_root and reshard_after_forward else reshard_after_forward,
            mp_policy=mp_policy,
            # Without pages of a GPU's driver there is nothing to pin.
            offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy(),
            ignored_params=replicated,
        )
        unit_module = planned.module
        assert isinstance(unit_module, FSDPModule)
        if secondary_mesh is not None and not planned.is_root:
            _keep_secondary_shard(unit_module, secondary_mesh)
        unit = ShardedUnit(planned.name, planned.module, planned.parameters, planned.is_root)
        unit_module.set_force_sum_reduction_for_comms(True)
        unit_module.set_gradient_divide_factor(1.0)
        if symmetric_memory:
            unit_module.set_symm_mem_for_comm()  # its reductions only add up, which is why that is set before
        else:
            unit_module.set_custom_all_gather(all_gather(unit))  # type: ignore[arg-type]
            unit_module.set_custom_reduce_scatter(reduce_scatter(unit))  # type: ignore[arg-type]
        if planned.name in recomputed:
            _hide_hooks_from_modes(unit_module)
        if gather_of is not None:
            for parameter in unit._fsdp_parameters:
                gather = gather_of(parameter._module_info.module, parameter._module_info.param_name)
                if gather is not None:
                    _travel(parameter, gather)
        units.append(unit)
    return units


class _TravellingParameter(FSDPParam):
    """A parameter of FSDP2 that travels as its :class:`WeightGather` says."""

    travelling: _Travelling

    @property
    def _sharded_local_tensor(self) -> Any:  # type: ignore[override]
        return self.travelling


class _Travelling:
    """What FSDP2 asks about the local tensor of such a parameter."""

    def __init__(self, parameter: FSDPParam, gather: WeightGather, shard: torch.Tensor | None = None) -> None:
        self._parameter, self._gather, self._shard = parameter, gather, shard

    def size(self) -> torch.Size:
        return self._parameter.padded_sharded_param_size

    def to(self, device: torch.device, non_blocking: bool = False) -> _Travelling:
        """Of a shard in host memory, before it is cast: the same on the device."""
        there = self._parameter._sharded_param_data.to(device, non_blocking=non_blocking)
        return _Travelling(self._parameter, self._gather, there)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        shard = self._parameter._sharded_param_data if self._shard is None else self._shard
        payload, inverse_scale = self._gather.pack(shard.view(self.size()))
        return (payload,), (inverse_scale,)

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        weight = self._gather.unpack(gathered[0], metadata[0], self._parameter._orig_size, dtype, out)
        return None if weight is None else (weight, ())


def _travel(parameter: FSDPParam, gather: WeightGather) -> None:
    parameter.__class__ = _TravellingParameter
    parameter.travelling = _Travelling(parameter, gather)  # type: ignore[attr-defined]
    parameter._init_extensions()


def _keep_secondary_shard(module: FSDPModule, mesh: DeviceMesh) -> None:
    group: Any = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    group.post_forward_mesh_info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for parameter in group.fsdp_params:
        parameter.post_forward_mesh_info = group.post_forward_mesh_info
        parameter._init_sharded_post_forward_param_metadata(torch.empty(parameter._orig_size, device="meta"))


@dataclass(frozen=True)
class GivenPolicy:
    """What a model that came sharded computes and reduces in (None: the parameters' own dtype), and whether its shards
    live in host memory."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    offloads: bool


def given_policy(model: nn.Module) -> GivenPolicy:
    """The policy of the first unit that has parameters."""
    group = next(_groups(model))
    offloads = type(group.offload_policy) is not OffloadPolicy
    return GivenPolicy(group.mp_policy.param_dtype, group.mp_policy.reduce_dtype, offloads)


def adopt_units(
    model: nn.Module,
    all_gather: Callable[[ShardedUnit], CommObject],
    reduce_scatter: Callable[[ShardedUnit], CommObject],
) -> list[ShardedUnit]:
    """The units of a model that somebody else gave to ``fully_shard``, with our communication objects. Modules that
    were sharded together are one unit, named after the last of them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    inner = {m for outer in model.modules() if isinstance(outer, FSDPModule) for m in outer.modules() if m is not outer}
    units, known = [], set()
    for name, module in reversed(list(model.named_modules())):
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        if state in known:
            continue
        known.add(state)
        group = state._fsdp_param_group
        own = [] if group is None else [names[parameter.sharded_param] for parameter in group.fsdp_params]
        unit = ShardedUnit(name, cast(nn.Module, module), own, module not in inner, in_order=True)
        module.set_custom_all_gather(all_gather(unit))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(reduce_scatter(unit))  # type: ignore[arg-type]
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        units.append(unit)
    return units


def settle_given_parameters(model: nn.Module) -> None:
    """Let the units of a model that came sharded see its parameters as they are now.

    A parameter that two units manage, because it was tied after they were sharded, has to have one shard: where its
    rows do not divide evenly each unit would pad a copy of its own, and gather that one for ever.
    """
    shards: dict[nn.Parameter, torch.Tensor] = {}
    parameters = [parameter for group in _groups(model) for parameter in group.fsdp_params]
    for parameter in parameters:
        parameter.reset_sharded_param()
        shards[parameter.sharded_param] = parameter._sharded_param_data
    for parameter in parameters:
        parameter._sharded_param_data = shards[parameter.sharded_param]


def holds_partial_sums(model: nn.Module) -> bool:
    """Whether torch's own two-hop holds gradients that are not reduced across replicas yet."""
    return any(group._partial_reduce_output is not None for group in _groups(model))


def forget_partial_sums(model: nn.Module) -> None:
    """Drop what torch's own two-hop holds."""
    for group in _groups(model):
        group._partial_reduce_output = None


def _groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group: Any = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                yield group


def reshard(model: nn.Module) -> None:
    """Free what roots keep gathered after a forward without backward, so that ``model.parameters()`` are shards again
    and nothing reads weights from before a checkpoint was loaded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group: Any = module._get_fsdp_state()._fsdp_param_group
            if group is not None and group._all_gather_result is not None:
                _drop_gather(group)
            module.reshard()


def _drop_gather(group: Any) -> None:
    """Its messages have to arrive all the same, or they would meet those of the next gather."""
    work = group._all_gather_result.all_gather_work
    if work is not None:
        work.wait()
    group._all_gather_result = None


@torch.no_grad()
def forget_passes(units: Iterable[ShardedUnit]) -> None:
    """Bring units back to where they are between steps, also from the middle of a forward or backward that failed:
    sharded, nothing in flight, no gradients."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    for unit in units:
        state: Any = unit.module._get_fsdp_state()  # type: ignore[operator]
        if state._is_root:
            _wait_for_gathers(state)
            if hasattr(unit.module, "reset_iter_state"):  # torch >= 2.13
                unit.module.reset_iter_state()  # type: ignore[operator]
            else:
                _reset_tree(state)
        for parameter in unit._fsdp_parameters:
            parameter.sharded_param.grad = None
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def _wait_for_gathers(root: Any) -> None:
    """Gathers in flight have to end: their messages would meet those of the next pass."""
    for state in root._state_ctx.all_states:
        group = state._fsdp_param_group
        if group is not None and group._all_gather_result is not None:
            _drop_gather(group)


def _reset_tree(root: Any) -> None:
    context = root._comm_ctx
    for name in ("all_gather_state", "reduce_scatter_state"):
        if hasattr(context, name):
            setattr(context, name, None)
    context.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        group = state._fsdp_param_group
        if group is not None:
            for name in (
                "_all_gather_result",
                "_post_reduce_event",
                "_all_reduce_state",
                "_reshard_after_forward_event",
            ):
                setattr(group, name, None)
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def fsdp_roots(units: Sequence[ShardedUnit]) -> Iterator[FSDPModule]:
    """The outermost unit modules."""
    inner = {m for unit in units for m in unit.module.modules() if m is not unit.module}
    for unit in units:
        if unit.module not in inner:
            assert isinstance(unit.module, FSDPModule)
            yield unit.module


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the present backward pass is over and FSDP2 has finished it for every root.

    FSDP2's roots queue their own final callbacks while the pass runs, some perhaps after this call; queueing once more
    from the end of the pass puts ours behind all of them.
    """
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.queue_callback(lambda: engine.queue_callback(callback))


def backward_pass() -> int:
    """A number for the backward pass that is running, to tell it from the one before."""
    return torch._C._current_graph_task_id()

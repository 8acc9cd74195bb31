"""What is patched where models are sharded: torch, for all of them in a process, from
the first one on (:func:`change_this_process`); and methods of a model's modules
(:func:`follow_window`).

Two tables say what of torch is replaced, and by what: :data:`CHANGES`, attributes, and
:data:`OPERATIONS`, operations on DTensors. The replacements are in the files that the
tables name; and here:

``float(p.norm())``, ``p.mean().item()`` and ``if p.isnan().any():`` are numbers of
whole tensors, and ``p.tolist()`` has all of them: torch's ``DTensor.item()`` gives this
rank's part of a result that is not added up yet; here it adds up first, over the ranks
that hold the parameter together, as every other operation on such a result does; so
they all have to ask.

No shard is pickled in silence: `torch.save(model.state_dict())` on one rank would write
that rank's part. Gathering it would need all ranks, and a script that saves calls
`torch.save` on one of them. The reducer is registered for the type with `copyreg`,
which every pickler reads (also cloudpickle, dill and `all_gather_object`); safetensors
and numpy refuse DTensors by themselves.

``zero_grad`` of a sharded model and of every module in it drops what an open window
holds of the parameters, as an optimizer's does. ``load_state_dict`` of them takes whole
tensors, of which each rank keeps its part: a hook goes before each module's own
parameters are loaded, for a user's calls; ``load_full_state`` calls it for a
checkpoint, with weights that may be finer than the parameters that hold them. Both run
on every rank alike and send nothing, so every rank has to have the tensors, as after
``torch.load`` on all of them.

torch has no public name for the tensor that another one is a view of (``_base``).
"""

from __future__ import annotations

import copyreg
import functools
import logging
import pickle
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from smp_core.checkpoint import copy_into, shard_like
from smp_core.cluster import SmpMesh, note_mesh
from smp_core.sharding import (
    error_notes,
    named_gradients,
    operands,
    random_values,
)
from smp_core.sharding.fsdp import DATA_OF_COPY, is_noted, name_of_shard
from smp_core.sharding.gradients import Window
from smp_core.sharding.optimizer import take_scaler
from smp_core.torch_facts import ABSENT, clean_name, is_absent, is_rank_0
from smp_core.watch import sync_metric

logger = logging.getLogger("smp")

# On what was replaced: by what.
_OURS = "smp_replacement"
_DATA: Any = torch.Tensor.data


def change_this_process(mesh: SmpMesh) -> None:
    """Switch on what holds for all sharded models of this process; ``mesh``: of the
    model that goes on now."""
    note_mesh(mesh)
    _change_operations()
    for module, owner_name, name, replacement in CHANGES:
        owner: Any = sys.modules.get(module)
        # Nothing was made yet of a package that was not imported, or is blocked.
        if owner is None:
            continue
        if owner_name:
            owner = attrgetter(owner_name)(owner)
        before = getattr(owner, name)
        # Others may have replaced it since, as they do with the hook for errors.
        if not callable(replacement):
            setattr(owner, name, replacement)
        elif getattr(before, _OURS, None) is not replacement:
            setattr(owner, name, _around(before, replacement))


def _around(before: Callable[..., Any], replacement: Callable[..., Any]) -> Any:
    @functools.wraps(before)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return replacement(before, *args, **kwargs)

    setattr(replaced, _OURS, replacement)
    return replaced


@functools.cache
def _change_operations() -> None:
    # A DTensor of which this process holds a part is refused; one that is unsharded
    # here (replicated, or on a mesh of one rank) is pickled as a plain tensor.
    copyreg.pickle(DTensor, _reduce)  # type: ignore[arg-type]
    # All else that torch has in place ends in "_".
    taken = " ".join(names for _, names in OPERATIONS).split()
    known = {*dir(torch.Tensor), *dir(torch)}
    in_place = {each for each in known if each.endswith("_") and each[:2] != "__"}
    rest = " ".join(in_place.difference(taken))
    into_others = " ".join(each[:-1] for each in in_place)
    for rule, names in (
        *OPERATIONS,
        (operands.write_into, rest),
        (operands.write_out, into_others),
    ):
        for name in names.split():
            packet_name, _, one = name.partition(".")
            packet = getattr(torch.ops.aten, packet_name, None)
            overloads = [] if packet is None else packet.overloads()
            for overload in [one] if one else overloads:
                # Variants with out= write into a tensor of the caller's.
                if ("out" in overload) == (rule is operands.write_out):
                    torch.library.register_torch_dispatch(
                        getattr(packet, overload), DTensor, rule
                    )


def _item(
    kind: type, function: Any, types: Any, args: tuple[DTensor, ...], kwargs: Any = None
) -> Any:
    if is_absent(args[0]):
        raise RuntimeError(ABSENT % list(args[0].shape))
    # A number of the whole tensor: what is not added up yet is added up here.
    return function(args[0].full_tensor())


def _detach(
    kind: type, function: Any, types: Any, args: tuple[DTensor, ...], kwargs: Any = None
) -> Any:
    if args[0]._base is not None:
        operands.note_copy(args[0])
    return NotImplemented


def _tolist(before: Any, tensor: DTensor) -> Any:
    if is_absent(tensor):
        raise RuntimeError(ABSENT % list(tensor.shape))
    return tensor.full_tensor().tolist()


def _set_data(shard: DTensor, value: Tensor) -> None:
    # `p.data += 1` sets what it was given, of the same storage, when it has written.
    is_written = (
        isinstance(value, DTensor)
        and value.untyped_storage() is shard.untyped_storage()
    )
    name = None if is_written else name_of_shard(shard)
    if name is not None:
        raise ValueError(
            f"{name}.data was assigned to, which has no effect on a sharded parameter (a torch DTensor); write "
            "into it instead: with torch.no_grad(): parameter.copy_(value). A backup of a parameter that is "
            "written into is parameter.detach().clone()"
        )
    _DATA.__set__(shard, value)


def _data_of_view(tensor: Tensor) -> Tensor:
    # Of a row or slice of a copy: what is written into it counts as written into that.
    base = tensor._base if type(tensor) is Tensor else None
    if isinstance(base, nn.Parameter) and is_noted(base):
        return tensor.detach()
    return _DATA.__get__(tensor)  # type: ignore[no-any-return]


def _is_any_true(
    kind: type, function: Any, types: Any, args: tuple[DTensor, ...], kwargs: Any = None
) -> Any:
    return function(args[0].to_local())


def is_a_part(tensor: object) -> bool:
    """Return whether it is a tensor of which this process holds a part, or (other
    pipeline stages') nothing."""
    if is_absent(tensor):
        return True
    # Replicated, or on one rank: all of the tensor is here.
    if not isinstance(tensor, DTensor) or tensor.device_mesh.size() == 1:
        return False
    return not all(placement.is_replicate() for placement in tensor.placements)


def _reduce(tensor: DTensor) -> tuple[Any, ...]:
    # A plain tensor is pickled in its place.
    if not is_a_part(tensor):
        return tensor.to_local().detach().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    raise pickle.PicklingError(
        f"torch.save or pickle of a sharded tensor {tuple(tensor.shape)} would write this rank's part alone, which is "
        f"{tuple(tensor.to_local().shape)}; to get whole tensors on rank 0 call on every rank "
        "accelerator.get_state_dict(model), or smp_core.checkpoint.full_state_dict(state) for any state; for a "
        "checkpoint that any number of ranks loads: accelerator.save_state, trainer.save_checkpoint or fabric.save; to "
        "save this part on purpose: tensor.to_local()"
    )


CHANGES: tuple[tuple[str, str, str, Any], ...] = (
    ("torch.autograd", "", "backward", named_gradients.backward),
    ("torch.autograd", "", "grad", named_gradients.grad),
    (
        "torch.autograd.graph",
        "",
        "register_multi_grad_hook",
        named_gradients.register_multi_grad_hook,
    ),
    ("torch.distributed.tensor", "DTensor", "tolist", _tolist),
    ("torch.distributed.tensor", "DTensor", "data", property(_DATA.__get__, _set_data)),
    ("torch.nn", "Parameter", "data", DATA_OF_COPY),
    ("torch", "Tensor", "data", property(_data_of_view, _DATA.__set__)),
    ("torch.amp", "GradScaler", "unscale_", take_scaler),
    ("torch.amp", "GradScaler", "step", take_scaler),
    ("torchmetrics", "Metric", "sync", sync_metric),
    ("sys", "", "excepthook", error_notes.explain_uncaught),
)
"""Module, what in it has the attribute ("": the module itself), the attribute, and what
takes its place: a property as it is; a function is called with what was there before,
and then the arguments."""

OPERATIONS: tuple[tuple[Callable[..., Any], str], ...] = (
    (operands.compute, operands.ELEMENTWISE),
    (operands.compute_with_empty_parts, operands.LARGEST),
    (operands.compute_outside_of_forward, operands.PRODUCTS),
    (_detach, "detach"),
    (random_values.draw, random_values.DRAWN),
    # What calls item() follows it: float, bool, int; lists of numbers are read
    # elsewhere.
    (_item, "_local_scalar_dense"),
    # torch.autograd's detect_anomaly asks it of gradients; each rank looks at its part,
    # without messages.
    (_is_any_true, "_is_any_true"),
)
"""What computes operations on DTensors, and their names in torch.ops.aten: with all
variants that return a tensor of their own, or the one behind the dot."""


def follow_window(model: nn.Module, window: Window) -> None:
    """Let ``zero_grad`` and ``load_state_dict`` of the model's modules mean what the
    window holds, too."""
    for module in model.modules():
        module.zero_grad = _ZeroGrad(module, window)  # type: ignore[method-assign]
        # Only modules with parameters of their own have anything to cut.
        if any(True for _ in module.parameters(recurse=False)):
            module.register_load_state_dict_pre_hook(_TakingOwnParts(window))


@dataclass(eq=False)
class _ZeroGrad:
    """A method of the instance, because every module of the model has one and their
    classes are not ours. It copies and pickles as the plain method of the copy."""

    module: nn.Module
    window: Window

    def __call__(self, set_to_none: bool = True) -> None:
        """Reset gradients of all the module's parameters, held by the open window or
        not."""
        self.window.zero_grad(self.module.parameters(), set_to_none)
        type(self.module).zero_grad(self.module, set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        # The copied module is in memo already; it has torch's own method.
        return _plain(memo[id(self.module)])

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module]]:
        return _plain, (self.module,)


def _plain(module: nn.Module) -> Callable[..., None]:
    return types.MethodType(type(module).zero_grad, module)


@dataclass(eq=False)
class _TakingOwnParts:
    """The hook; a copy of the module has one that does nothing."""

    window: Window

    @torch.no_grad()
    def __call__(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *_: Any,
    ) -> None:
        # Units, masters and optimizers go by the parameters that are there: what is
        # loaded is copied into these, also where torch would put it in their place.
        if local_metadata.get("assign_to_params_buffers"):
            _require_same_dtypes(module, state_dict, prefix)
            local_metadata["assign_to_params_buffers"] = False
            if is_rank_0():
                _say_copied()
        for name, parameter in module.named_parameters(recurse=False):
            value = state_dict.get(prefix + name)
            if not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue  # torch says what does not fit
            # torch copies the state dict's values next, and these fit by then.
            if not isinstance(value, DTensor):
                value = state_dict[prefix + name] = shard_like(parameter, value)
            # Masters over the world have to follow, or the next step brings the old
            # weights back.
            world = self.window.world
            if world is not None:
                world.take_weights({id(parameter): value})

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _inert, ()


def _require_same_dtypes(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str
) -> None:
    """Refuse values whose dtypes the module would take over with ``assign=True``.

    Raises:
        ValueError: on every rank alike.
    """
    for name, parameter in module.named_parameters(recurse=False):
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and value.dtype != parameter.dtype:
            raise ValueError(
                f"load_state_dict(assign=True): {prefix}{name} is {value.dtype} in what is loaded and "
                f"{parameter.dtype} in the sharded model, which keeps its dtypes; leave assign out, so that values are "
                "cast as they are copied, or load before the model is prepared"
            )


@functools.cache
def _say_copied() -> None:
    logger.warning(
        "load_state_dict(assign=True) copies into the parameters of a sharded model, which units and optimizers go on "
        "with, as without assign"
    )


def _inert() -> Callable[..., None]:
    return _nothing


def _nothing(*_: Any) -> None:
    pass


def load_full_state(
    module: nn.Module, given: Mapping[str, Any], live: Mapping[str, Any], strict: bool
) -> tuple[list[str], list[str]]:
    """Call ``module.load_state_dict`` with unsharded tensors; its hooks and those of
    its submodules run as ever. Local.

    Args:
        given: the state dict; values that are in their place already are those of
            ``live``.
        live: the tensors that are the weights, by clean name
            (:meth:`smp_core.engine.parallel_model.ParallelModel.model_state`).
        strict: as of ``load_state_dict``.

    Returns:
        names that are missing in ``given``, and names that only ``given`` has.
    """
    # Masters, where there are any, are finer than the parameters that show them.
    finest = {
        id(parameter): live.get(clean_name(name))
        for name, parameter in module.named_parameters()
    }
    with _OwnParts({key: value for key, value in finest.items() if value is not None}):
        outcome: Any = module.load_state_dict(given, strict=strict)
    return list(getattr(outcome, "missing_keys", [])), list(
        getattr(outcome, "unexpected_keys", [])
    )


class _OwnParts(TorchFunctionMode):
    """Under it a copy into a sharded parameter takes this rank's part of a whole
    tensor.

    Args:
        instead: what to copy into in the place of a parameter, by its id.
    """

    def __init__(self, instead: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._instead = instead

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not Tensor.copy_:
            return func(*args, **(kwargs or {}))
        target, value = args[:2]
        # Where the weight is a master, or on the host, that is what is written.
        into = self._instead.get(id(target), target)
        if into is value:
            return target
        if isinstance(into, DTensor) and not isinstance(value, DTensor):
            copy_into(into, value.expand(into.shape))
        else:
            into.copy_(value)
        return target

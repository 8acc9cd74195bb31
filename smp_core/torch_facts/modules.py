"""Modules and parameters as the user wrote them, and what stands in their place: names
without what wraps a module; mixins before classes whose objects are there already;
which parameters lie on other pipeline stages, what an optimizer steps where that is not
the model's parameter, and which steps count.

``torch.compile`` keeps the module that it wraps under ``_orig_mod``, torch's and
fairscale's activation checkpointing under ``_checkpoint_wrapped_module``. No public
name leads there, and both show in the names of parameters.

Python lets an object change its class only where ``__dict__`` comes into both chains of
first bases at the same place. A mixin that is put before a class which begins with a
base that has none (``ABC``, ``Generic``, empty ``__slots__``) moves it, unless the
mixin begins with that base, too.

An absent tensor is one of which this rank has nothing, a parameter of another stage or
a state like it: a DTensor on a mesh that this rank is not in.
"""

from __future__ import annotations

import inspect
import sys
import types
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
"""The arguments of a module's call, as its forward and hooks get them."""

DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)

_COMPILED = "_orig_mod"
_WRAPPERS = (_COMPILED, "_checkpoint_wrapped_module")

# The code of what torch puts around every step, to call its hooks.
_AROUND_STEP = Optimizer.profile_hook_step(lambda *_: None).__code__

_model_parameters = WeakIdKeyDictionary()  # master -> the parameter whose part it is
# What an optimizer steps -> its float32 master on the host.
_host_masters = WeakIdKeyDictionary()
# The same -> values that were loaded for it, of this rank's part.
_loaded_masters = WeakIdKeyDictionary()

ABSENT = (
    "a tensor %s lies on other pipeline stages, and this rank has nothing of it; for whole tensors save a sharded "
    "checkpoint on all ranks and bring it together with `smp checkpoint consolidate`"
)


def clean_name(name: str) -> str:
    """Return a module's or parameter's name without the marks of wrappers: the same
    with and without them."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def first_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return each parameter's name, of tied ones the first."""
    return {parameter: name for name, parameter in model.named_parameters()}


def lies_in(name: str, module: str) -> bool:
    """Return whether a module or parameter is ``module`` or in it, by their names; ""
    is the whole model."""
    return not module or f"{name}.".startswith(f"{module}.")


def fsdp_has(method: str) -> bool:
    """Return whether this torch's FSDP2 has a method of its modules."""
    return hasattr(FSDPModule, method)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` wrapped, if ``module`` is what it
    returned; otherwise the module itself."""
    found = getattr(module, _COMPILED, None)
    return found if isinstance(found, nn.Module) else module


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` returned the module, or its own ``compile()``
    was called, which leaves its mark in ``_compiled_call_impl`` only."""
    return (
        uncompiled(module) is not module
        or vars(module).get("_compiled_call_impl") is not None
    )


T = TypeVar("T")


def modules_that_look_up(
    model: nn.Module, name: str
) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return the modules whose forward looks a global name up, each with the globals
    among which it finds it."""
    found = []
    for module in model.modules():
        # A class in TorchScript has none.
        forward: Any = inspect.unwrap(getattr(type(module), "forward", None))  # type: ignore[arg-type]
        names = getattr(forward, "__globals__", {})
        if name in names and name in forward.__code__.co_names:
            found.append((module, names))
    return found


def base_without_dict(kind: type) -> type:
    """Return the class below the one that brings ``__dict__`` into the chain of first
    bases; object for most."""
    # Upwards as long as the next base has a dict of its own.
    brings: Any = kind
    while brings.__base__.__dictoffset__:
        brings = brings.__base__
    return cast(type, brings.__base__)


def mixin_before(mixin: type, kind: type) -> type:
    """Return what may stand before ``kind`` among the bases of a class that objects of
    ``kind`` take: the mixin, or a class of its name and methods."""
    base: Any = base_without_dict(kind)
    if base is object:
        return mixin
    return types.new_class(
        mixin.__name__, (Generic[T] if base is Generic else base, mixin)
    )


def is_absent(tensor: object) -> bool:
    """Return whether it is a tensor of which this rank has nothing."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: its part of a DTensor, all of another
    one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return what the groups of an optimizer hold, in order."""
    groups = optimizer.param_groups
    return [parameter for group in groups for parameter in group["params"]]


def stands_for(master: Tensor, parameter: Tensor) -> None:
    """Note that optimizers step ``master`` in the place of a parameter of the model."""
    _model_parameters[master] = parameter


def model_parameter(stepped: Tensor) -> Tensor:
    """Return the model's parameter that a master stands for; any other tensor is
    itself."""
    return _model_parameters.get(stepped, stepped)


def note_host_master(stepped: Tensor, master: Tensor) -> None:
    """Note the float32 master in host memory of a half precision tensor that an
    optimizer steps."""
    _host_masters[stepped] = master


def load_host_master(stepped: Tensor, value: Tensor) -> None:
    """Keep a value that was loaded in float32 for the master, which takes it up at the
    next step."""
    _loaded_masters[stepped] = value.to("cpu", torch.float32, copy=True)


def take_loaded(stepped: Tensor) -> Tensor | None:
    """Return the value of :func:`load_host_master`, once."""
    return _loaded_masters.pop(stepped, None)


def with_host_master(stepped: Tensor) -> Tensor:
    """Return a tensor's local values in float32 in host memory: its master's, where
    that is what was rounded."""
    own = local_part(stepped).detach().to("cpu")
    # A loaded value that was not taken up yet counts already.
    master = _loaded_masters.get(stepped, _host_masters.get(stepped))
    if master is None:
        return own.float()
    known = local_part(master).detach()
    return torch.where(known.to(own.dtype) == own, known, own.float())


class StepsOnHost:
    """An optimizer whose states never see the device
    (``state_offload="optimizer"``)."""

    __slots__ = ()

    @abstractmethod
    def host_bytes(self) -> int:
        """Return what states, masters and gradients take in host memory."""


def is_outermost(optimizer: Optimizer) -> bool:
    """Return whether the step whose hook runs is one that the trainer called.

    torch calls the hooks around each class's ``step``: where one calls that of its
    base, twice for one step. Frames (``sys._getframe``) tell it also behind a step that
    raised; a count of hooks would not come back to zero.
    """
    # Each frame of torch's wrapper around this optimizer's step is one class's step.
    frame, around = sys._getframe(1), 0
    while frame is not None and around < 2:
        if frame.f_code is _AROUND_STEP and frame.f_locals["args"][0] is optimizer:
            around += 1
        frame = frame.f_back  # type: ignore[assignment]
    return around < 2


def after_each_step(optimizer: Optimizer, act: Callable[[], Any]) -> RemovableHandle:
    """Call ``act`` once behind every step that the trainer calls, by whatever steps it
    is made of."""

    def behind(stepped: Optimizer, *_: Any) -> None:
        if is_outermost(stepped):
            act()

    return optimizer.register_step_post_hook(behind)

"""Facts about parameters that steps, norms, checkpoints and reports share: which of
them lie on other pipeline stages, what an optimizer steps where that is not the model's
parameter, and which steps count.

An absent tensor is one of which this rank has nothing, a parameter of another stage or
a state like it: a DTensor on a mesh that this rank is not in.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

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

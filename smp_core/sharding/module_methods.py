"""``zero_grad`` and ``load_state_dict`` of a sharded model and of every module in it.

``zero_grad`` drops what an open window holds of the parameters, as an optimizer's does.

``load_state_dict`` takes whole tensors, of which each rank keeps its part: a hook goes
before each module's own parameters are loaded, for a user's calls; ``load_full_state``
calls it for a checkpoint, with weights that may be finer than the parameters that hold
them. Both run on every rank alike and send nothing, so every rank has to have the
tensors, as after ``torch.load`` on all of them.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from smp_core.checkpoint import copy_into, shard_like
from smp_core.sharding.gradients import Window
from smp_core.torch_facts import clean_name, is_rank_0

logger = logging.getLogger("smp")


def follow_window(model: nn.Module, window: Window) -> None:
    """Let ``zero_grad`` and ``load_state_dict`` of the model's modules mean what the
    window holds, too."""
    for module in model.modules():
        module.zero_grad = _ZeroGrad(module, window)  # type: ignore[method-assign]
        # Only modules with parameters of their own have anything to cut.
        if any(True for _ in module.parameters(recurse=False)):
            module.register_load_state_dict_pre_hook(_TakingOwnParts(window))


class _ZeroGrad:
    """A method of the instance, because every module of the model has one and their
    classes are not ours. It copies and pickles as the plain method of the copy."""

    def __init__(self, module: nn.Module, window: Window) -> None:
        self._module, self._window = module, window

    def __call__(self, set_to_none: bool = True) -> None:
        """Reset gradients of all the module's parameters, held by the open window or
        not."""
        self._window.zero_grad(self._module.parameters(), set_to_none)
        _plain(self._module)(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        # The copied module is in memo already; it has torch's own method.
        return _plain(memo[id(self._module)])

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module]]:
        return _plain, (self._module,)


def _plain(module: nn.Module) -> Callable[..., None]:
    return types.MethodType(type(module).zero_grad, module)


class _TakingOwnParts:
    """The hook; a copy of the module has one that does nothing."""

    def __init__(self, window: Window) -> None:
        self._window = window

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
            world = self._window.world
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
        (:meth:`smp_core.engine.conversions.ParallelModel.model_state`). strict: as of
        ``load_state_dict``.

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

"""Whole tensors into sharded modules: what ``nn.Module.load_state_dict`` copies, each rank takes its own part of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from smp_core.checkpoint import copy_into
from smp_core.torch_facts import clean_name


def load_full_state(
    module: nn.Module, given: Mapping[str, Any], live: Mapping[str, Any], strict: bool
) -> tuple[list[str], list[str]]:
    """Call ``module.load_state_dict`` with unsharded tensors; its hooks and those of its submodules run as ever. Local.

    Args:
        given: the state dict; values that are in their place already are those of ``live``.
        live: the tensors that are the weights, by clean name
        (:meth:`smp_core.engine.conversions.ParallelModel.model_state`). strict: as of ``load_state_dict``.

    Returns:
        names that are missing in ``given``, and names that only ``given`` has.
    """
    # The weights may be finer than the parameters that hold them.
    finest = {id(parameter): live.get(clean_name(name)) for name, parameter in module.named_parameters()}
    with _OwnParts({key: value for key, value in finest.items() if value is not None}):
        outcome: Any = module.load_state_dict(given, strict=strict)
    return list(getattr(outcome, "missing_keys", [])), list(getattr(outcome, "unexpected_keys", []))


class _OwnParts(TorchFunctionMode):
    """Under it a copy into a sharded parameter takes this rank's part of a whole tensor.

    Args:
        instead: what to copy into in the place of a parameter, by its id.
    """

    def __init__(self, instead: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._instead = instead

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.copy_:
            return func(*args, **(kwargs or {}))
        target, value = args[:2]
        into = self._instead.get(id(target), target)
        if isinstance(into, DTensor) and not isinstance(value, DTensor):
            copy_into(into, value.expand(into.shape))
        else:
            into.copy_(value)
        return target

"""Methods besides forward that use a model's own parameters, and gather them therefore."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from smp_core.plan import units_with
from smp_core.sharding.fsdp import Calls, ShardedUnit

# What Transformers and PEFT call besides forward. In PEFT's `generate` the adapted model is called, past the root, in
# Transformers' the encoder.
KNOWN_METHODS = (
    "generate",
    "generate_batch",
    "get_text_features",
    "get_image_features",
    "get_audio_features",
    "get_video_features",
)


def register_forward_methods(
    model: nn.Module, units: Collection[ShardedUnit], calls: Calls, methods: Collection[str]
) -> None:
    """Let methods gather parameters as forward does: ``"decode"`` of every root that has it, ``"encoder.encode"`` of
    the named unit, and of roots those that are known.

    Also tells Transformers that forward is collective (``_is_fsdp_managed_module``, as its own sharding does; Dynamo
    wants ``_fsdp_use_orig_params`` with it): ranks then generate as long as any of them needs to, and none leaves out a
    layer by chance.

    Raises:
        ValueError: no unit has the method.
    """
    for module in model.modules():
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
        module._fsdp_use_orig_params = True  # type: ignore[assignment]
    found = [(unit, name) for unit in units if unit.is_root for name in KNOWN_METHODS if name not in methods]
    for entry in methods:
        found += [(unit, entry.rpartition(".")[2]) for unit in units_with(model, units, entry)]
    for unit, method in found:
        own = getattr(unit.module, method, None)
        if callable(own):
            setattr(unit.module, method, _as_forward(unit, calls, own))


def _as_forward(unit: ShardedUnit, calls: Calls, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def as_forward(*args: Any, **kwargs: Any) -> Any:
        return calls.run_as_forward(unit, method, *args, **kwargs)

    return as_forward

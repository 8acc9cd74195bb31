"""The FP8 layers of other libraries, behind the same recipe.

The modules that the native backend would choose (``nn.Linear`` only) become the
library's own. Parameters stay the same objects with the same names; weights are
gathered in the parameters' dtype, because both libraries' FP8 all-gathers turn
parameters into tensor subclasses that state dicts would show. :class:`Fp8Recipe`
refuses settings that a library lacks.

``backend="torchao"``: dynamic tensorwise scaling. Its layers keep no state between
steps, so nothing is stepped or saved.

``backend="transformer_engine"``: see :mod:`smp_core.fp8.transformer_engine`.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp_core.config import Fp8Recipe
from smp_core.fp8.convert import choose
from smp_core.torch_facts import device_multiplies_fp8

_INSTALL = {
    "torchao": "pip install torchao",
    "transformer_engine": "pip install --no-build-isolation 'transformer_engine[pytorch]'",
}


@dataclass(frozen=True)
class OtherLayers:
    """The needs of another library's layers in a training step.

    Attributes:
        left_out: module name -> reason, of every module with a matrix product that
            stays as it is.
        region: makes the context that an outermost forward pass runs in.
    """

    left_out: Mapping[str, str]
    region: Callable[[], contextlib.AbstractContextManager[Any]] = (
        contextlib.nullcontext
    )


def convert_with(
    model: nn.Module,
    recipe: Fp8Recipe,
    device: torch.device,
    amax_group: dist.ProcessGroup | None = None,
) -> OtherLayers:
    """Give ``model`` the FP8 layers of ``recipe.backend``, in place; before it is
    sharded.

    Args:
        device: where the model will compute.
        amax_group: the ranks that agree on scales, where the library keeps any; default
            the world.

    Raises:
        ValueError: the library is not installed (the message has the command), or it
            cannot convert any layer.
    """
    backend = recipe.backend
    # Said before anything changes, with the command that installs it.
    if importlib.util.find_spec(backend) is None:
        raise ValueError(
            f"fp8: backend={backend!r} needs a package that is not installed: {_INSTALL[backend]}; or write "
            "backend='native'"
        )

    # The layers that the native backend would choose, as far as the library has a
    # counterpart.
    chosen, left_out = choose(model, recipe)
    names = {
        name: module for name, module, _ in chosen if name and type(module) is nn.Linear
    }
    # The library's classes stand for nn.Linear, in a parent.
    for name, *_ in chosen:
        if name not in names:
            left_out[name] = (
                "it converts nn.Linear only"
                if name
                else "it cannot replace the model itself"
            )
    if not names:
        why = "; ".join(
            f"{name or 'the model'}: {reason}"
            for name, reason in list(left_out.items())[:5]
        )
        raise ValueError(
            f"fp8: backend={backend!r} can convert no layer ({why}); write backend='native'"
        )

    # The library's own layers.
    if backend == "transformer_engine":
        from smp_core.fp8.transformer_engine import convert

        return OtherLayers(left_out, convert(model, names, recipe, device, amax_group))
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    linears = set(names.values())
    convert_to_float8_training(
        model,
        module_filter_fn=lambda module, _: module in linears,
        config=Float8LinearConfig(emulate=not device_multiplies_fp8(device)),
    )
    return OtherLayers(left_out)

"""Names and classes of modules: as the user wrote them, without what wraps a module;
and mixins before classes whose objects are there already.

``torch.compile`` keeps the module that it wraps under ``_orig_mod``, torch's and
fairscale's activation checkpointing under ``_checkpoint_wrapped_module``. No public
name leads there, and both show in the names of parameters.

Python lets an object change its class only where ``__dict__`` comes into both chains of
first bases at the same place. A mixin that is put before a class which begins with a
base that has none (``ABC``, ``Generic``, empty ``__slots__``) moves it, unless the
mixin begins with that base, too.
"""

from __future__ import annotations

import types
from typing import Any, Generic, TypeVar, cast

from torch import nn

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


def compiled_of(module: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile`` wrapped, if ``module`` is what it
    returned; otherwise None."""
    found = getattr(module, _COMPILED, None)
    return found if isinstance(found, nn.Module) else None


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` returned the module, or its own ``compile()``
    was called, which leaves its mark in ``_compiled_call_impl`` only."""
    return (
        compiled_of(module) is not None
        or vars(module).get("_compiled_call_impl") is not None
    )


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module itself, whether ``torch.compile`` wraps it or not."""
    return compiled_of(module) or module


T = TypeVar("T")


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

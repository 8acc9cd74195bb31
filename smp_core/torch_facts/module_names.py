"""Names and classes of modules as the user wrote them, without what wraps a module.

``torch.compile`` keeps the module that it wraps under ``_orig_mod``, torch's and fairscale's activation checkpointing
under ``_checkpoint_wrapped_module``. No public name leads there, and both show in the names of parameters.
"""

from __future__ import annotations

from torch import nn

_COMPILED = "_orig_mod"
_WRAPPERS = (_COMPILED, "_checkpoint_wrapped_module")


def clean_name(name: str) -> str:
    """Return a module's or parameter's name without the marks of wrappers: the same with and without them."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def lies_in(name: str, module: str) -> bool:
    """Return whether a module or parameter is ``module`` or in it, by their names; "" is the whole model."""
    return not module or f"{name}.".startswith(f"{module}.")


def compiled_of(module: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile`` wrapped, if ``module`` is what it returned; otherwise None."""
    found = getattr(module, _COMPILED, None)
    return found if isinstance(found, nn.Module) else None


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` returned the module, or its own ``compile()`` was called, which leaves its mark
    in ``_compiled_call_impl`` only."""
    return compiled_of(module) is not None or vars(module).get("_compiled_call_impl") is not None


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module itself, whether ``torch.compile`` wraps it or not."""
    return compiled_of(module) or module

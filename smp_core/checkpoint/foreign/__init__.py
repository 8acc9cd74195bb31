"""Checkpoints of other programs, in and out, read without running their code.

torch.save files, folders of torch.distributed.checkpoint and safetensors are read by a pickle reader that stands in for
every class (inert_pickle); conversion imports and exports them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.checkpoint.foreign.torch_file import check_torch_file, step_of_file

_PLACES = {
    "check_torch_file": "torch_file",
    "step_of_file": "torch_file",
}

__all__ = [
    "check_torch_file",
    "step_of_file",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

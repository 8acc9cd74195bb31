"""Payloads that are smaller than their tensors: bfloat16, blockwise int8 and int4, fp8.

``codec(name)`` returns one; its ``size`` is what anything else asks for bytes. On CUDA the blockwise ones run as one
kernel each way (triton_codec).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.codecs.codec import ALIGN, Codec, CodeName

_PLACES = {
    "ALIGN": "codec",
    "Codec": "codec",
    "CodeName": "codec",
}

__all__ = [
    "ALIGN",
    "Codec",
    "CodeName",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

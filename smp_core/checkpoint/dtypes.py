"""The names of dtypes: torch's, as index.json has them, and those of safetensors."""

from __future__ import annotations

import torch

from smp_core.checkpoint.untrusted import CheckpointError

_SAFETENSORS_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in index.json: ``"bfloat16"`` for
    ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """Parse the name of a dtype, as in index.json, or short: ``bf16``, ``fp16``,
    ``fp32``, ``fp64``.

    Raises:
        CheckpointError: the name is no torch dtype.
    """
    short = {
        "bf16": "bfloat16",
        "fp16": "float16",
        "fp32": "float32",
        "fp64": "float64",
    }
    # torch has many names; only its dtypes count.
    dtype = getattr(torch, short.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"dtype={name!r} is not a torch dtype; write e.g. bfloat16, float16 or float32"
        )
    return dtype


def safetensors_dtype(dtype: torch.dtype) -> str | None:
    """Return the safetensors name of a dtype, or None where safetensors has none
    (stored as bytes, dtype in the index).
    """
    return _SAFETENSORS_NAMES.get(dtype)


def torch_dtype(safetensors_name: str) -> torch.dtype:
    """Return the dtype with this safetensors name.

    Raises:
        CheckpointError: torch has no such dtype.
    """
    for dtype, name in _SAFETENSORS_NAMES.items():
        if name == safetensors_name:
            return dtype
    raise CheckpointError(f"safetensors dtype {safetensors_name} is not supported")

"""What computes on the devices of this machine: FP8 tensor cores, Triton."""

from __future__ import annotations

import importlib.util

import torch

_CAPABLE: dict[torch.device, bool] = {}


@torch.compiler.assume_constant_result
def device_multiplies_fp8(device: torch.device) -> bool:
    """Return whether ``torch._scaled_mm`` runs on the device's tensor cores (Ada,
    Hopper and later).

    On CPU the operator exists too, as a reference kernel that is 500 times slower than
    dequantising: never used outside tests.
    """
    if device not in _CAPABLE:
        # On ROCm "cuda" is AMD's, whose numbers mean something else and whose FP8
        # formats are others.
        is_nvidia = device.type == "cuda" and torch.version.hip is None
        _CAPABLE[device] = is_nvidia and torch.cuda.get_device_capability(device) >= (
            8,
            9,
        )
    return _CAPABLE[device]


_TRITON = importlib.util.find_spec("triton") is not None


def has_triton() -> bool:
    """Return whether Triton is installed."""
    return _TRITON

"""Asynchronous devices: rules for sharing memory and numbers between streams and the
host.

The host queues work on an accelerator's streams and does not wait for it. Memory is a
stream's: it may be used again, by what that stream is given next, as soon as the host
has no reference to it, whatever other streams still do with it. And to read a number,
or to copy from memory that is not pinned, the host waits until the device has come that
far.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def run_behind(device: torch.device) -> bool:
    """Return whether ``device`` does what it is given later, on streams."""
    return device.type != "cpu"


def pins(device: torch.device) -> bool:
    """Return whether host memory that is copied to or from ``device`` is pinned; no
    other driver can use such pages."""
    return device.type == "cuda"


def pinned_bytes(n_bytes: int) -> int:
    """Return the bytes that torch takes from the system for ``n_bytes`` of pinned
    memory, and keeps until the process ends."""
    return 1 << (n_bytes - 1).bit_length() if n_bytes else 0


def used_here(tensor: Tensor) -> None:
    """Keep the memory of ``tensor``, which is another stream's, until the present
    stream has done what it was given."""
    if run_behind(tensor.device):
        tensor.record_stream(torch.accelerator.current_stream())


def on_device(
    values: Sequence[int | float], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the host's numbers on ``device``, without waiting for it, as
    ``torch.tensor(..., device=device)`` does."""
    return moved_to(device, torch.tensor(values, dtype=dtype))


def moved_to(device: torch.device, tensor: Tensor) -> Tensor:
    """Return a tensor of the host on ``device``, without waiting for it, as
    ``tensor.to(device)`` does."""
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if run_behind(device)
        else tensor
    )

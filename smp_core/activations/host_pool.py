"""The pool of host memory for offloading: allocated once, then reused; pinned where the
device is a GPU, so that copies overlap with compute.

The pool holds as many buffers as were ever in use at one time, none larger than the
largest tensor offloaded so far: when no free buffer is large enough, the smallest free
one is replaced by a larger one. Pinned ones are not replaced: torch never gives pinned
memory back to the system, so that it may as well serve smaller tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from smp_core.plan import GIB
from smp_core.torch_facts import streams


class HostMemoryError(RuntimeError):
    """The host pool has reached its limit, or the system gave no more memory."""


@dataclass(eq=False)
class HostBuffer:
    """A buffer of the pool.

    Attributes:
        bytes: uint8 [capacity].
        free_after: an event of the stream that read the buffer last; None on CPU.
    """

    bytes: torch.Tensor
    free_after: Any = None


class HostPool:
    """A pool of host buffers for offloaded tensors.

    Args:
        limit_bytes: the most that all buffers together may take.
        pinned: page-locked memory (torch rounds it up to a power of two, and so does
            the pool).
        lower: the advice in the error's text when the limit is reached.
    """

    def __init__(self, limit_bytes: int, *, pinned: bool, lower: str) -> None:
        self.limit_bytes = limit_bytes
        self.pinned = pinned
        self._lower = lower
        self._free: list[HostBuffer] = []
        self.n_bytes = 0
        """The bytes of all buffers, in use or free."""
        self.bytes_in_use = 0
        self.allocations = 0
        """The buffers made so far; constant once the pool has met its largest step."""

    def take(self, n_bytes: int) -> HostBuffer:
        """Return a buffer of at least ``n_bytes``: the smallest free one that is large
        enough, or a new one.

        Raises:
            HostMemoryError: the limit is reached or there is no memory; the message
                says what to lower.
        """
        # The smallest that is large enough leaves larger ones to larger tensors.
        fitting = [buffer for buffer in self._free if buffer.bytes.numel() >= n_bytes]
        if fitting:
            buffer = min(fitting, key=lambda each: each.bytes.numel())
            self._free.remove(buffer)
        else:
            buffer = self._new(n_bytes)
        self.bytes_in_use += buffer.bytes.numel()
        return buffer

    def give(self, buffer: HostBuffer) -> None:
        """Return a buffer to the pool."""
        self.bytes_in_use -= buffer.bytes.numel()
        self._free.append(buffer)

    def _new(self, n_bytes: int) -> HostBuffer:
        """Allocate a buffer, in the place of the smallest free one if there is any and
        it is not pinned."""
        # It makes room for a larger one, which will serve its tensors, too.
        if self._free and not self.pinned:
            smallest = min(self._free, key=lambda each: each.bytes.numel())
            self._free.remove(smallest)
            self.n_bytes -= smallest.bytes.numel()
        # torch would round pinned memory up anyway: the rest would be lost.
        capacity = streams.pinned_bytes(n_bytes) if self.pinned else n_bytes
        if self.n_bytes + capacity > self.limit_bytes:
            raise HostMemoryError(
                f"host memory for offloading: {capacity / GIB:.3g} GiB more than the {self.n_bytes / GIB:.3g} GiB in "
                f"use would pass the limit of {self.limit_bytes / GIB:.3g} GiB per rank; {self._lower}"
            )
        try:
            made = torch.empty(capacity, dtype=torch.uint8, pin_memory=self.pinned)
        except RuntimeError as error:
            raise HostMemoryError(
                f"host memory for offloading: the system gave no {capacity / GIB:.3g} GiB on top of "
                f"{self.n_bytes / GIB:.3g} GiB ({error}); {self._lower}"
            ) from error
        self.n_bytes += capacity
        self.allocations += 1
        return HostBuffer(made)

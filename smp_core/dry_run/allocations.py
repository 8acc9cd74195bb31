"""Allocations: the memory that a rank would take, followed storage by storage while
fake tensors run.

A dispatch mode sees each tensor that an operation returns, follows its storage until it
is freed, and adds up what is alive. Storages that FSDP2 frees by resizing them count
with the size they have. Run the same step twice: the first run finds the operation
after which most is alive, the second run stops there and asks which storages these are,
and what each is.

Collectives of c10d communicate nothing.

Torch has no public names for which fake mode is active (torch._guards), which a step's
operations are told from DTensor's own trial runs by, and for the work that its own fake
collectives return (torch._C._distributed_c10d).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor

# _python_dispatch is where torch documents it to be.
from torch.utils._python_dispatch import TorchDispatchMode

from smp_core.checkpoint import iterate_tensors
from smp_core.fp8 import GatheredWeight

# Fake mode lacks them.
_RETURNS_WORK_ONLY = (
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_tensor_coalesced_",
)


class Allocations(TorchDispatchMode):
    """Follows what operations inside a ``with`` block allocate.

    Args:
        before: storages that exist already.
        at: the operation after which ``on_peak`` is called with the storages that are
            alive; None: never.
        inside: custom operator -> the function that it is; what operations there
            allocate is followed, too.

    Attributes:
        highest: the most bytes that were alive at one time.
        highest_at: the operation after which they were.
    """

    def __init__(
        self,
        before: Iterable[torch.UntypedStorage],
        at: int | None = None,
        on_peak: Callable[[Mapping[int, int]], None] | None = None,
        inside: Mapping[Any, Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__()
        self.highest = self.highest_at = 0
        self._at, self._on_peak = at, on_peak
        self._inside = inside or {}
        self._operations = 0
        self._live = 0
        self._sizes: dict[int, int] = {}
        self._watchers: dict[int, Any] = {}
        self._mode: Any = None
        self._resize: Any = None
        # What is there before is alive all the time.
        for storage in before:
            self._follow(storage)

    def __enter__(self) -> Allocations:
        # Operations of this mode are the step's own; DTensor tries others in its mode.
        self._mode = active_fake_mode()
        self._resize = torch.UntypedStorage.resize_
        resize = self._resize

        # FSDP2 frees storages by making them empty.
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._follow(storage)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # so that its local operations come here
        # Autograd asks this three times for each operator; a fake tensor knows it.
        if func is torch.ops.prim.device.default:
            return args[0].device
        # Nothing is sent; what returns work has to return something.
        if func.namespace == "c10d":
            works = func.overloadpacket.__name__ in _RETURNS_WORK_ONLY
            return FakeWork().boxed() if works else func(*args, **(kwargs or {}))
        # A custom operator hides its allocations, so it is opened.
        if func in self._inside:
            return self._within(self._inside[func], args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if active_fake_mode() is not self._mode:
            return result  # DTensor tries an operation on whole shapes
        tensors = _tensors(result)
        if not tensors:
            # Other questions are asked, or not, as fake tensors remember the answers.
            return result
        for tensor in tensors:
            self._follow(tensor.untyped_storage())
        # The number of an operation is how the second run finds the same instant.
        self._operations += 1
        if self._live > self.highest:
            self.highest, self.highest_at = self._live, self._operations
        if self._operations == self._at:
            assert self._on_peak is not None
            self._on_peak(dict(self._sizes))
        return result

    def _within(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        super().__enter__()
        try:
            return function(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        address, size = id(storage), storage.nbytes()
        # A resize changes what a storage counts as.
        self._live += size - self._sizes.get(address, 0)
        self._sizes[address] = size
        # The weak reference tells when a storage is freed.
        if address not in self._watchers:
            self._watchers[address] = weakref.ref(
                storage, lambda _: self._forget(address)
            )

    def _forget(self, address: int) -> None:
        self._live -= self._sizes.pop(address, 0)
        self._watchers.pop(address, None)


def _tensors(value: Any) -> list[torch.Tensor]:
    # A wrapper has no bytes of its own.
    return [
        each.data8 if isinstance(each, GatheredWeight) else each
        for _, each in iterate_tensors(value)
    ]

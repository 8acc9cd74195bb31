"""Knobs of offloading, and what is alive on the device."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

OFFLOADED = {"checkpoint": "full", "offload": True, "offload_min_bytes": 0}


SAMPLES, LENGTH = 4, 12


class LiveStorages(TorchDispatchMode):
    """Storages made by operators while it is on, and which of them are alive."""

    def __init__(self, ignored: Any = ()) -> None:
        super().__init__()
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}
        self._made: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._ignored:
                    self._made[id(storage)] = (weakref.ref(storage), storage.nbytes())
        return result

    def alive(self) -> int:
        gc.collect()
        return sum(
            size for reference, size in self._made.values() if reference() is not None
        )

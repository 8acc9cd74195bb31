"""``parameter.data`` of sharded models, and copies that a forward has changed: what is
done in vain is an error.

DTensor ignores that ``.data`` is assigned to, and keeps the shard that it had. Inside a
forward a parameter is a gathered copy, which is thrown away; what is written into its
``.data`` there, or into that of a row or slice of it, leaves no trace in the copy's
version. So the attribute is replaced, once for the process: setting a shard's is refused,
and what is written into a copy's counts as written into the copy
(:mod:`smp_core.sharding.patched` replaces the attributes).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# On a copy: its version when it was gathered, or when a parametrization was registered,
# which sets it to itself; None: its .data was assigned to.
_VERSION = "smp_noted_version"
_DATA: Any = torch.Tensor.data


def _of_copy(copy: nn.Parameter) -> Tensor:
    # Of the same memory, like .data, and of the same version.
    return copy.detach() if is_noted(copy) else _DATA.__get__(copy)


def _set_copy(copy: nn.Parameter, value: Tensor) -> None:
    if is_noted(copy) and not _is_same(copy, value):
        setattr(copy, _VERSION, None)
    _DATA.__set__(copy, value)


DATA_OF_COPY = property(_of_copy, _set_copy)
"""``.data`` of parameters, of which some are copies."""


def note_copy(copy: nn.Parameter) -> None:
    """Take note of a copy that was just gathered."""
    setattr(copy, _VERSION, _version(copy))


def carry_notes(shard: nn.Parameter, copy: nn.Parameter) -> None:
    """Give a copy, when it is first gathered, what users noted on its parameter, which
    forwards read."""
    if not is_noted(copy):
        vars(copy).update(vars(shard) | vars(copy))


def is_noted(copy: nn.Parameter) -> bool:
    return hasattr(copy, _VERSION)


def require_unchanged(copy: nn.Parameter, name: str) -> None:
    """Refuse a copy that was changed since it was gathered.

    Raises:
        ValueError: it was, which would be lost with it.
    """
    if getattr(copy, _VERSION, 0) != _version(copy):
        raise ValueError(
            f"{name} was changed in place inside a forward or training_step, where it is a gathered copy "
            "that is thrown away (an embedding with max_norm does that too); change it between calls, for example "
            "in on_train_batch_end, where the module shows its shards"
        )


def _is_same(copy: nn.Parameter, value: Tensor) -> bool:
    """Return whether a copy loses nothing if its ``.data`` becomes this: it is its own,
    or a frozen one's in the dtype of what it is computed with."""
    if value.shape != copy.shape:
        return False
    if value.data_ptr() == copy.data_ptr():
        return True
    is_cast = not copy.requires_grad and value.dtype != copy.dtype
    return is_cast and value.equal(copy.to(value.dtype))


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return 0 if tensor.is_inference() else tensor._version

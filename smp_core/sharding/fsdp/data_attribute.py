"""``parameter.data`` of sharded models, and copies that a forward has changed: what is
done in vain is an error.

DTensor ignores that ``.data`` is assigned to, and keeps the shard that it had. Inside a
forward a parameter is a gathered copy, which is thrown away; what is written into its
``.data`` there leaves no trace in the copy's version. So the attribute is replaced, once
for the process: setting a shard's is refused, and a copy remembers what it was when its
``.data`` was first asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# On a copy: its version when it was gathered, or when a parametrization was registered,
# which sets it to itself.
_VERSION = "smp_noted_version"
# On a copy: its bytes when its .data was first asked for; None: it was assigned to.
_BYTES = "smp_noted_bytes"


@functools.cache
def watch_data_attribute(name_of: Callable[[Tensor], str | None]) -> None:
    """Replace ``.data`` of shards and of copies in this process.

    Args:
        name_of: returns the name of a parameter in shards; None: of no model.
    """
    plain: Any = torch.Tensor.data

    def set_shard(shard: DTensor, value: Tensor) -> None:
        # `p.data += 1` sets what it was given, of the same storage, when it has written.
        is_written = (
            isinstance(value, DTensor)
            and value.untyped_storage() is shard.untyped_storage()
        )
        name = None if is_written else name_of(shard)
        if name is not None:
            raise ValueError(
                f"{name}.data was assigned to, which has no effect on a sharded parameter (a torch DTensor); write "
                "into it instead: with torch.no_grad(): parameter.copy_(value). A backup of a parameter that is "
                "written into is parameter.detach().clone()"
            )
        plain.__set__(shard, value)

    def of_copy(copy: nn.Parameter) -> Tensor:
        if hasattr(copy, _VERSION) and not hasattr(copy, _BYTES):
            setattr(copy, _BYTES, _bytes_of(plain.__get__(copy)).clone())
        return plain.__get__(copy)  # type: ignore[no-any-return]

    def set_copy(copy: nn.Parameter, value: Tensor) -> None:
        if hasattr(copy, _VERSION):
            setattr(copy, _BYTES, None)
        plain.__set__(copy, value)

    DTensor.data = property(plain.__get__, set_shard)  # type: ignore[assignment]
    nn.Parameter.data = property(of_copy, set_copy)  # type: ignore[assignment]


def note_copy(copy: nn.Parameter) -> None:
    """Take note of a copy that was just gathered."""
    setattr(copy, _VERSION, _version(copy))
    vars(copy).pop(_BYTES, None)


def is_noted(copy: nn.Parameter) -> bool:
    return hasattr(copy, _VERSION)


def require_unchanged(copy: nn.Parameter, name: str) -> None:
    """Refuse a copy that was changed since it was gathered.

    Raises:
        ValueError: it was, which would be lost with it.
    """
    changed = _version(copy) != getattr(copy, _VERSION, 0)
    if hasattr(copy, _BYTES):
        before = getattr(copy, _BYTES)
        changed = changed or before is None
        changed = changed or not torch.equal(before, _bytes_of(copy.detach()))
    if changed:
        raise ValueError(
            f"{name} was changed in place inside a forward or training_step, where it is a gathered copy "
            "that is thrown away (an embedding with max_norm does that too); change it between calls, for example "
            "in on_train_batch_end, where the module shows its shards"
        )


def _bytes_of(tensor: Tensor) -> Tensor:
    # Not values: nan differs from itself.
    return tensor.contiguous().view(-1).view(torch.uint8)


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return 0 if tensor.is_inference() else tensor._version

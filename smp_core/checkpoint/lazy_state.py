"""The state dicts whose values are read when a hook looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any


@dataclass(frozen=True)
class Unread:
    """A value that has not been read yet.

    Attributes:
        name: the value's name where it is stored, or its place there.
        read: reads the value, with unsharded tensors on the CPU.
        shape: the shape of a tensor; None for other values.
    """

    name: Any
    read: Callable[[], Any]
    shape: tuple[int, ...] | None = None


if TYPE_CHECKING:
    _Dict = dict[str, Any]
else:

    class _Dict(MutableMapping, dict):
        """A dict whose ``items``, ``values``, ``get``, ``pop``, ... go through
        ``__getitem__``."""


class LazyState(_Dict):
    """A dict in which each :class:`Unread` becomes its value when it is accessed.

    It is a dict for isinstance; ``__iter__`` is overridden, so that ``dict(state)`` and
    ``{**state}`` read values too, instead of copying the content of the dict beneath.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        dict.__init__(self)
        for key, value in values.items():
            self[key] = value

    def __getitem__(self, key: str) -> Any:
        value = dict.__getitem__(self, key)
        # Read once; from then on it is an ordinary value.
        if isinstance(value, Unread):
            value = value.read()
            dict.__setitem__(self, key, value)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        dict.__setitem__(self, key, value)

    def __delitem__(self, key: str) -> None:
        dict.__delitem__(self, key)

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self)

    def __len__(self) -> int:
        return dict.__len__(self)

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key)

    def __or__(self, other: Any) -> Any:
        return {**self, **other}

    def __ror__(self, other: Any) -> Any:
        return {**other, **self}

    def copy(self) -> dict[str, Any]:
        return {**self}


def as_it_lies(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as they are now, without reading any."""
    if not isinstance(state, LazyState):
        return dict(state)
    return {key: dict.__getitem__(state, key) for key in dict.__iter__(state)}

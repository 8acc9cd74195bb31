"""Data loaders that keep their own place (torchdata's StatefulDataLoader and others with a ``state_dict``).

Lightning asks for the state when a checkpoint is taken, and reads one batch ahead of training where a loader has no
length, as one of a stream: that batch would be lost in a resumed run. So the state from before each batch is kept, and
the one that is told is from before the first batch that no training step has begun with.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

# Of a class that was derived here: the loader's own class, and its place.
_KIND, _PLACE = "_smp_kind", "_smp_place"


@runtime_checkable
class KeepsPlace(Protocol):
    """A data loader whose state is its place, as Lightning finds it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def tell_place_of_training(loader: Any) -> None:
    """Let a loader that keeps its place tell that of training, in place; other loaders stay as they are."""
    if isinstance(loader, KeepsPlace):
        _PlaceOfTraining(loader)


def begin_batch(loader: Any) -> None:
    """Note that training begins with the next of the batches that were read of a loader."""
    place: _PlaceOfTraining | None = getattr(type(loader), _PLACE, None)
    if place is not None:
        place.begin_batch()


class _PlaceOfTraining:
    """The place of training in a loader that keeps one, told by the loader from now on."""

    def __init__(self, loader: KeepsPlace) -> None:
        kind: Any = getattr(type(loader), _KIND, type(loader))
        object.__setattr__(loader, "__class__", kind)
        self._state_of: Callable[[], dict[str, Any]] = loader.state_dict
        self._before: deque[dict[str, Any]] = deque()  # batches that were read and that training has not begun with

        def iterate(loader: Any) -> Iterator[Any]:
            self._before.clear()
            return self._reading(iter(kind.__iter__(loader)))

        own = {"__iter__": iterate, "state_dict": lambda _: self._state(), "__slots__": (), _KIND: kind, _PLACE: self}
        derived = type(kind.__name__, (kind,), {**own, "__module__": kind.__module__})
        object.__setattr__(loader, "__class__", derived)

    def begin_batch(self) -> None:
        if self._before:
            self._before.popleft()

    def _reading(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            self._before.append(copy.deepcopy(self._state_of()))
            try:
                batch = next(batches)
            except StopIteration:
                self._before.pop()
                return
            yield batch

    def _state(self) -> dict[str, Any]:
        return self._before[0] if self._before else self._state_of()


def places_of_loaders(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the states of the training data loaders, as Lightning puts them into a checkpoint."""
    places: list[dict[str, Any]] = checkpoint["loops"]["fit_loop"].get("state_dict", {}).get("combined_loader", [])
    return places

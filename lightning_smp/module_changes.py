"""What a step keeps in its LightningModule. The call of the model ends a step on all
pipeline stages but the last, so that what is kept behind it
(``self.outputs.append(...)``, ``self.total += ...``) would be on the last stage
alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

_VALUES = (int, float, str, type(None))
_CHANGING = (list, deque, dict, set, np.ndarray, Tensor)  # in place
# What every LightningModule has; other private names are a user's.
_OWN = vars(LightningModule()).keys()


@dataclass(frozen=True)
class _Items:
    """The items of a list from a place on, and changes inside of the lists and dicts
    before it, by their places."""

    begin: int
    more: list[Any]
    inner: dict[int, Any]


@dataclass(frozen=True)
class _Other:
    """A value in the place of another one."""

    value: Any


class _SeenTensor(NamedTuple):
    """A tensor, and the count of its changes or, inside of inference mode where none
    are counted, its values."""

    tensor: Tensor
    state: int | Tensor

    def is_still(self, value: Any) -> bool:
        if value is not self.tensor:
            return False
        if isinstance(self.state, Tensor):
            return torch.equal(self.state, value)
        return self.state == value._version


class _SeenItems(NamedTuple):
    """A list or deque, the items that it had, the counts of changes of its tensors, and
    what was seen of its lists and dicts, by their places."""

    values: list[Any] | deque[Any]
    items: list[Any]
    versions: list[int]
    inner: dict[int, Any]

    def has_still(self, values: list[Any] | deque[Any]) -> bool:
        """Return whether these are the same items, whatever became of its lists and
        dicts."""
        if len(values) != len(self.items) or not all(map(is_, values, self.items)):
            return False
        return _versions(values) == self.versions


class _SeenValues(NamedTuple):
    """A set or an array, and what it held."""

    values: Any
    copy: Any

    def is_still(self, values: Any) -> bool:
        if values is not self.values:
            return False
        if isinstance(values, set):
            return bool(values == self.copy)
        return np.array_equal(values, self.copy)


class Kept:
    """The lists, dicts, sets, arrays, numbers, text and tensors in a module's
    attributes and its own buffers, as they are now.

    Private name: a tensor's ``_version``, the count of its in-place changes, which
    nothing public tells.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {
            name: _seen(value) for name, value in _attributes(module).items()
        }

    def changes(self) -> dict[str, Any]:
        """Return what has changed since."""
        found = {}
        for name, value in _attributes(self._module).items():
            change = _change(value, self._before.get(name))
            if change is not None:
                found[name] = change
        return found

    def take(self, changes: dict[str, Any]) -> None:
        """Change this rank's module likewise."""
        for name, change in changes.items():
            setattr(
                self._module, name, _changed(getattr(self._module, name, None), change)
            )


def _attributes(module: nn.Module) -> dict[str, Any]:
    kinds = (*_CHANGING, *_VALUES)
    attributes = {
        name: value
        for name, value in vars(module).items()
        if name not in _OWN and isinstance(value, kinds)
    }
    return {**attributes, **dict(module.named_buffers(recurse=False))}


def _seen(value: Any) -> Any:
    """Return what tells whether a value has changed. It holds the value: a new one does
    not get its address."""
    if isinstance(value, dict):
        return {key: _seen(each) for key, each in value.items()}
    if isinstance(value, (list, deque)):
        inner = {}
        # A module may have long lists of text or tensors: nothing is made for each.
        if any(issubclass(kind, _CHANGING) for kind in set(map(type, value))):
            for place, each in enumerate(value):
                counts_changes = isinstance(each, Tensor) and not each.is_inference()
                if isinstance(each, _CHANGING) and not counts_changes:
                    inner[place] = _seen(each)
        return _SeenItems(value, list(value), _versions(value), inner)
    if isinstance(value, Tensor):
        return _SeenTensor(
            value, value.clone() if value.is_inference() else value._version
        )
    if isinstance(value, (set, np.ndarray)):
        return _SeenValues(value, value.copy())
    return value


def _versions(values: Iterable[Any]) -> list[int]:
    tensors = (each for each in values if isinstance(each, Tensor))
    return [each._version for each in tensors if not each.is_inference()]


def _is_still(value: Any, before: Any) -> bool:
    if isinstance(before, (_SeenTensor, _SeenValues)):
        return before.is_still(value)
    if isinstance(before, _SeenItems):
        return (
            value is before.values
            and before.has_still(value)
            and all(_is_still(value[at], seen) for at, seen in before.inner.items())
        )
    if isinstance(before, dict):
        return (
            isinstance(value, dict)
            and value.keys() == before.keys()
            and all(_is_still(value[key], each) for key, each in before.items())
        )
    # Numbers and text are as good as others of the same value.
    if isinstance(before, _VALUES):
        return type(value) is type(before) and value == before
    return value is before


def _change(value: Any, before: Any) -> Any:
    """Return how a value differs from what was seen of it, None where it does not."""
    if (
        isinstance(value, dict)
        and isinstance(before, dict)
        and before.keys() <= value.keys()
    ):
        changes = {key: _change(each, before.get(key)) for key, each in value.items()}
        new = {
            key: change
            for key, change in changes.items()
            if change is not None or key not in before
        }
        # A new key whose value is None is told as such.
        for key, change in new.items():
            if change is None:
                new[key] = _Other(value[key])
        return new or None
    # A list that only grew, or whose own lists and dicts did: what is new is sent, and
    # not all outputs of an epoch once more in each step.
    if isinstance(before, _SeenItems) and isinstance(value, list):
        count = len(before.items)
        if value is before.values and before.has_still(value[:count]):
            inner = _changes_inside(value, before.inner)
            if inner is not None:
                more = value[count:]
                return _Items(count, more, inner) if more or inner else None
    # All else is the same object with the same value, or another one.
    return None if _is_still(value, before) else _Other(value)


def _changes_inside(values: list[Any], before: dict[int, Any]) -> dict[int, Any] | None:
    """Return the changes of a list's own lists and dicts, by their places; None: one of
    its items has to be sent as a whole."""
    found: dict[int, Any] = {}
    for place, seen in before.items():
        change = _change(values[place], seen)
        if isinstance(change, _Other):
            return None
        if change is not None:
            found[place] = change
    return found


def _changed(value: Any, change: Any) -> Any:
    if isinstance(change, _Other):
        return change.value
    if isinstance(change, _Items):
        for place, inner in change.inner.items():
            value[place] = _changed(value[place], inner)
        value[change.begin :] = change.more
        return value
    for key, inner in change.items():
        value[key] = _changed(value.get(key), inner)
    return value

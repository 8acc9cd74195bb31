"""What a step keeps in its LightningModule. The call of the model ends a step on all
pipeline stages but the last, so that what is kept behind it
(``self.outputs.append(...)``, ``self.total += ...``) would be on the last stage
alone."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_VALUES = (int, float, str, type(None))


@dataclass(frozen=True)
class _More:
    """The items of a list from a place on."""

    begin: int
    items: list[Any]


@dataclass(frozen=True)
class _Other:
    """A value in the place of another one."""

    value: Any


@dataclass(frozen=True, eq=False)
class _SeenTensor:
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


class Kept:
    """The lists, dicts, numbers, text and tensors in a module's public attributes, as
    they are now.

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
    # Private attributes are Lightning's and torch's own.
    kinds = (list, deque, dict, Tensor, *_VALUES)
    return {
        name: value
        for name, value in vars(module).items()
        if name[0] != "_" and isinstance(value, kinds)
    }


def _seen(value: Any) -> Any:
    """Return what tells whether a value has changed."""
    if isinstance(value, dict):
        return {key: _seen(each) for key, each in value.items()}
    if isinstance(value, (list, deque)):
        return id(value), len(value), None if not len(value) else id(value[0])
    if isinstance(value, Tensor):
        return _SeenTensor(
            value, value.clone() if value.is_inference() else value._version
        )
    return value if isinstance(value, _VALUES) else id(value)


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
        return {
            key: _Other(value[key]) if change is None else change
            for key, change in new.items()
        } or None
    # What is no dict is the same object with the same value, or another one.
    if isinstance(before, _SeenTensor):
        return None if before.is_still(value) else _Other(value)
    now = _seen(value)
    if type(now) is type(before) and now == before:
        return None
    # A list that only grew.
    if isinstance(value, list) and isinstance(before, tuple) and len(before) == 3:
        same_list, count, first = before
        if (
            id(value) == same_list
            and len(value) > count
            and (count == 0 or id(value[0]) == first)
        ):
            return _More(count, value[count:])
    return _Other(value)


def _changed(value: Any, change: Any) -> Any:
    if isinstance(change, _Other):
        return change.value
    if isinstance(change, _More):
        value[change.begin :] = change.items
        return value
    for key, inner in change.items():
        value[key] = _changed(value.get(key), inner)
    return value

"""Attributes that have another value for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def changed(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes of an object, a class or a module other values inside the block;
    behind it they have those of before. An object's own attribute may hide one of its
    class for that time."""
    before = {name: getattr(owner, name) for name in values}
    own = set(getattr(owner, "__dict__", ()))
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            # What is the object's own inside the block alone goes with it.
            if name not in own and name in getattr(owner, "__dict__", ()):
                delattr(owner, name)
            else:
                setattr(owner, name, value)

"""Mixins before classes whose objects are there already.

Python lets an object change its class only where ``__dict__`` comes into both chains of first bases at the same
place. A mixin that is put before a class which begins with a base that has none (``ABC``, ``Generic``, empty
``__slots__``) moves it, unless the mixin begins with that base, too.
"""

from __future__ import annotations

import types
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


def base_without_dict(kind: type) -> type:
    """Return the class below the one that brings ``__dict__`` into the chain of first bases; object for most."""
    brings: Any = kind
    while brings.__base__.__dictoffset__:
        brings = brings.__base__
    return cast(type, brings.__base__)


def mixin_before(mixin: type, kind: type) -> type:
    """Return what may stand before ``kind`` among the bases of a class that objects of ``kind`` take: the mixin, or a
    class of its name and methods."""
    base: Any = base_without_dict(kind)
    if base is object:
        return mixin
    return types.new_class(mixin.__name__, (Generic[T] if base is Generic else base, mixin))

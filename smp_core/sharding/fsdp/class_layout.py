"""Classes of modules that ``fully_shard`` cannot derive from, and what it gets in their place.

``fully_shard`` makes a module an object of a class with the bases (FSDPModule, the module's class). Python allows that
only between classes in whose chains of first bases ``__dict__`` comes in at the same place, and refuses where a class
begins with a base that has none: ``class Block(ABC, nn.Module)``, ``Generic[T]``, a mixin with empty ``__slots__``. It
is no matter of torch's private names: a class of one's own, with that base before FSDPModule, is allowed.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any, Generic, TypeVar, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

T = TypeVar("T")
_set_class = vars(object)["__class__"].__set__


@contextlib.contextmanager
def any_class(module: nn.Module) -> Iterator[None]:
    """Let ``fully_shard`` in the lines inside take a module of any class."""
    kind = type(module)
    if _base_without_dict(kind) is object:
        yield
        return

    def take(module: nn.Module, sharded: type) -> None:
        _set_class(module, _sharded(kind, sharded))  # type: ignore[arg-type]  # modules' classes are hashable

    # Seen from outside the module keeps its class, and takes another one than it is given.
    _set_class(module, type(kind.__name__, (kind,), {"__class__": property(lambda _: kind, take)}))
    try:
        yield
    finally:
        if not issubclass(type(module), FSDPModule):  # it was refused
            _set_class(module, kind)


def _base_without_dict(kind: type) -> type:
    """Return the class below the one that brings ``__dict__`` into the chain of first bases; object for most."""
    brings: Any = kind
    while brings.__base__.__dictoffset__:
        brings = brings.__base__
    return cast(type, brings.__base__)


@functools.cache
def _sharded(kind: type, made: type) -> type:
    """Return a class like the one that ``fully_shard`` has made of ``kind``: that is the third class in its order, too,
    and FSDPModule's methods come before those of nn.Module."""
    base: Any = _base_without_dict(kind)
    first = types.new_class(FSDPModule.__name__, (Generic[T] if base is Generic else base, FSDPModule))
    return type(
        made.__name__, (first, kind), {"__deepcopy__": vars(made)["__deepcopy__"], "__module__": kind.__module__}
    )

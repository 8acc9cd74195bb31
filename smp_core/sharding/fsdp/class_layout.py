"""Classes of modules that ``fully_shard`` cannot derive from, and what it gets in their place.

``fully_shard`` makes a module an object of a class with the bases (FSDPModule, the module's class), which Python
refuses for ``class Block(ABC, nn.Module)`` and its like (:mod:`smp_core.torch_facts.class_layout` says why). A class of
one's own, with that base before FSDPModule, is allowed, and needs no private name of torch's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule

from smp_core.torch_facts import base_without_dict, mixin_before

_set_class = vars(object)["__class__"].__set__


@contextlib.contextmanager
def any_class(module: nn.Module) -> Iterator[None]:
    """Let ``fully_shard`` in the lines inside take a module of any class."""
    kind = type(module)
    if base_without_dict(kind) is object:
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


@functools.cache
def _sharded(kind: type, made: type) -> type:
    """Return a class like the one that ``fully_shard`` has made of ``kind``: that is the third class in its order, too,
    and FSDPModule's methods come before those of nn.Module."""
    own = {"__deepcopy__": vars(made)["__deepcopy__"], "__module__": kind.__module__}
    return type(made.__name__, (mixin_before(FSDPModule, kind), kind), own)

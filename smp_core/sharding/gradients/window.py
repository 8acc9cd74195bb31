"""Window: the interface to gradients between a step's first micro-batch and the step;
and ``zero_grad`` of modules, which drops what an open window holds of their parameters,
as an optimizer's does."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from smp_core.sharding.optimizer.shards import WorldSharding


class Window(Protocol):
    """Our own (:class:`smp_core.sharding.gradients.accumulation.AccumulationWindow`),
    or torch's (:class:`smp_core.sharding.given.NativeWindow`).

    Attributes:
        micro_batches: backward passes whose gradients are held and not closed yet.
        world: masters of this rank's part, where optimizer states are sharded over the
            world.
    """

    micro_batches: int
    world: WorldSharding | None

    @property
    def is_open(self) -> bool:
        """Return whether gradients are held that no ``.grad`` shows yet."""

    def attached(self) -> Mapping[str, Tensor]:
        """Return the parameters by name that the model got since it was sharded, and
        whose gradients nothing adds up yet."""

    def refuse_attached(self) -> None:
        """Refuse gradients of :meth:`attached`: called by ranks whose optimizer steps
        such parameters. Collective."""

    def held_bytes(self) -> int:
        """Return the bytes of gradients that no parameter's ``.grad`` shows."""

    def accumulate(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Treat backward passes inside as not the window's last."""

    def close(self) -> None:
        """Complete the gradients and set ``.grad``; a closed window is left as it is.
        Collective."""

    def abandon(self) -> None:
        """Drop the window's gradients, held and closed. Collective."""

    def drop(self, parameters: Iterable[Tensor], set_to_none: bool = True) -> None:
        """Drop what is held of these parameters."""

    def zero_grad(self, parameters: Iterable[Tensor], set_to_none: bool = True) -> None:
        """Do what ``zero_grad`` of a module means besides what it does to ``.grad`` of
        its parameters."""

    def shard_over_world(self, on_host: bool = False) -> WorldSharding:
        """Make masters of this rank's part; gradients are theirs from now on."""


Drop = Callable[[Iterable[Tensor], bool], None]


def drop_with_zero_grad(model: nn.Module, drop: Drop) -> None:
    """Let ``zero_grad`` of the model and of every module in it call ``drop``
    (parameters, set_to_none) first."""
    for module in model.modules():
        module.zero_grad = _ZeroGrad(module, drop)  # type: ignore[method-assign]


class _ZeroGrad:
    """A method of the instance, because every module of the model has one and their
    classes are not ours. It copies and pickles as the plain method of the copy."""

    def __init__(self, module: nn.Module, drop: Drop) -> None:
        self._module, self._drop = module, drop

    def __call__(self, set_to_none: bool = True) -> None:
        """Reset gradients of all the module's parameters, held by the open window or
        not."""
        self._drop(self._module.parameters(), set_to_none)
        _plain(self._module)(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        # The copied module is in memo already; it has torch's own method.
        return _plain(memo[id(self._module)])

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module]]:
        return _plain, (self._module,)


def _plain(module: nn.Module) -> Callable[..., None]:
    return types.MethodType(type(module).zero_grad, module)

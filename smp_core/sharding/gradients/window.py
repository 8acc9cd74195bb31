"""Window: the interface to gradients between a step's first micro-batch and the
step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

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

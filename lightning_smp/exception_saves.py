"""The checkpoints that callbacks save when an exception ends the run: Lightning's ``OnExceptionCheckpoint`` and
``ModelCheckpoint(save_on_exception=True)``.

A save needs all ranks. Where an exception is raised on all of them, they meet and save. Where it is raised on one, the
others wait for that rank in a collective of training: a save of its own would hang, and hide the error until the
timeout. So an instance of these callbacks, or of a user's subclass, becomes an instance of a derived class that saves
when all ranks have come.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_smp.processes import ProcessGroupStrategy
from smp_core.torch_facts import mixin_before
from smp_core.watch import ENDING, Preempted, looks_like_a_lost_peer

logger = logging.getLogger("smp")


def take_over_exception_saves(trainer: Trainer) -> None:
    """Make the callbacks that save at an exception do it on all ranks or on none."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        at_exceptions = isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False)
        if at_exceptions and not isinstance(callback, _SavesTogether):
            kind: Any = type(callback)
            callback.__class__ = _derived(kind)


def exception_checkpoints(trainer: Trainer) -> list[str]:
    """List the paths of ``OnExceptionCheckpoint``, which ``ckpt_path="last"`` looks at too."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback.ckpt_path for callback in callbacks if isinstance(callback, OnExceptionCheckpoint)]


@functools.cache
def _derived(kind: Any) -> Any:
    # The name is part of the key of ModelCheckpoint's state.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (mixin_before(_SavesTogether, kind), kind), names)


class _SavesTogether(Callback):
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        strategy = trainer.strategy
        if isinstance(exception, Preempted):
            return  # all ranks have saved
        if isinstance(strategy, ProcessGroupStrategy):
            alone = looks_like_a_lost_peer(exception) or not strategy.all_come("a save at an exception", ENDING)
            if alone:
                logger.error(
                    "%s saves no checkpoint: a save needs all ranks, and not all of them have raised an exception of "
                    "their own. The last checkpoint that was saved is the one to go on from",
                    type(self).__name__,
                )
                return
        super().on_exception(trainer, pl_module, exception)

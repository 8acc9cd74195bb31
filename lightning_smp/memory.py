"""The memory tier under a Trainer: when the newest state goes to shared memory, and when a run goes on from there.

A callback, because a state that resumes exactly is taken where ModelCheckpoint takes its own: in
``on_train_batch_end``. ``fit(ckpt_path="last")`` goes on from the newest of memory and disk; any other ``ckpt_path``,
or none, means that a run begins from there, and what memory has of a run before is removed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from smp_core.checkpoint.addresses import is_address
from smp_core.checkpoint.opening import OpenCheckpoint
from smp_core.config import SmpConfig
from smp_core.engine import memory_tier
from smp_core.topology import Topology

PLACE = f"{ModelCheckpoint.CHECKPOINT_NAME_LAST}-memory.ckpt"
"""An empty folder beside the checkpoints, so that Lightning finds a "last" before the first one is on disk."""
IN_MEMORY = "the newest state, in shared memory"
"""The path, by identity, that ``trainer.save_checkpoint`` gets for a state that goes to memory."""
_BARRIER_OF_SAVES = "Trainer.save_checkpoint"
"""The name of the barrier at the end of ``trainer.save_checkpoint``."""


class KeepsInMemory(Callback):
    """Keeps the newest state in shared memory. The strategy adds it. Its construction is collective.

    Attributes:
        tier: the states.
    """

    def __init__(self, trainer: Trainer, config: SmpConfig, topology: Topology) -> None:
        self.tier = memory_tier(config, topology, _saves_to(trainer), "lightning")
        self._place = os.path.join(_saves_to(trainer), PLACE)

    # The start

    def newest(self, path: Any, on_disk: Callable[[], OpenCheckpoint | str]) -> OpenCheckpoint | str:
        """Return the newest of memory and disk, and begin with it. Collective.

        Args:
            path: what ``ckpt_path="last"`` stands for; it may be in another callback's folder than the one that names
                the run.
            on_disk: as of :meth:`smp_core.checkpoint.memory_tier.MemoryTier.newest`.
        """
        newest = self.tier.newest(on_disk, in_folder=_folder_of(path) == _folder_of(self._place))
        assert newest is not None
        return cast("OpenCheckpoint | str", newest)

    def begins_from(self, path: Any) -> None:
        """Note that the run begins from ``path``, or from nothing, unless it goes on from memory. Collective."""
        if not self.tier.is_begun:
            self.tier.leave("" if path is None else os.fspath(path))

    def begin_run(self, trainer: Trainer) -> None:
        """Look after a run that goes on from memory, or begins from a checkpoint or from nothing. Collective."""
        self.begins_from(None)
        cast(Any, trainer).callbacks.append(self)

    # Training

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.tier.begin(trainer.global_step)
        if trainer.is_global_zero and not is_address(self._place) and trainer.checkpoint_callbacks:
            os.makedirs(self._place, exist_ok=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy: Any = trainer.strategy
        if strategy.window.is_open:
            return
        self.tier.after_step(trainer.global_step)
        if self.tier.is_due(trainer.global_step):
            with strategy.without_barrier(_BARRIER_OF_SAVES):  # the ranks commit in the background
                trainer.save_checkpoint(IN_MEMORY)

    def close(self, trainer: Trainer, ended_well: bool) -> None:
        """Free the memory if the run ended well; otherwise the state stays, and a line says so."""
        callbacks = cast(Any, trainer).callbacks
        if self in callbacks:
            callbacks.remove(self)
        self.tier.close(ended_well)
        if ended_well and trainer.is_global_zero:
            with contextlib.suppress(OSError):
                os.rmdir(self._place)


def _folder_of(path: Any) -> str:
    text = os.fspath(path)
    if is_address(text):
        return text.rstrip("/").rpartition("/")[0]
    return os.path.realpath(os.path.dirname(os.path.abspath(text)))


def _saves_to(trainer: Trainer) -> str:
    """Return the folder that names the run: ModelCheckpoint's, where ``ckpt_path="last"`` looks."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            return os.fspath(callback.dirpath)
    return os.fspath(trainer.default_root_dir)

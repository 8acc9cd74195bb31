"""The memory tier under a Trainer: when the newest state goes to shared memory, and when a run goes on from there.

A callback, because a state that resumes exactly is taken where ModelCheckpoint takes its own: in
``on_train_batch_end``. ``fit(ckpt_path="last")`` goes on from the newest of memory and disk; any other ``ckpt_path``,
or none, means that a run begins from there, and what memory has of a run before is removed.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from smp_core.checkpoint import CheckpointError, find_checkpoints
from smp_core.checkpoint.addresses import is_address
from smp_core.checkpoint.memory_records import MemoryCheckpoint
from smp_core.checkpoint.memory_search import Found
from smp_core.checkpoint.memory_tier import MemoryTier
from smp_core.checkpoint.opening import open_checkpoint
from smp_core.checkpoint.ranks import Ranks
from smp_core.config import SmpConfig
from smp_core.topology import RANKS_PER_NODE_VARIABLE, Topology

PLACE = f"{ModelCheckpoint.CHECKPOINT_NAME_LAST}-memory.ckpt"
"""An empty folder beside the checkpoints, so that Lightning finds a "last" before the first one is on disk."""
IN_MEMORY = "the newest state, in shared memory"
"""The path, by identity, that ``trainer.save_checkpoint`` gets for a state that goes to memory."""

_LAYOUT = ("shard_degree", "pipeline_parallel_degree", "tensor_parallel_degree", "optimizer_shard")


class KeepsInMemory(Callback):
    """Keeps the newest state in shared memory. The strategy adds it. Its construction is collective.

    Attributes:
        tier: the states.
    """

    def __init__(self, trainer: Trainer, config: SmpConfig, topology: Topology) -> None:
        layout = ", ".join(f"{knob}={getattr(config, knob)!r}" for knob in _LAYOUT)
        self.tier = MemoryTier(
            config.checkpoint.memory_every_n_steps,
            _saves_to(trainer),
            topology.nodes,
            posed=RANKS_PER_NODE_VARIABLE in os.environ,
            layout=layout,
        )
        self._found: Found | None = None
        self._is_settled = False
        self._place = os.path.join(_saves_to(trainer), PLACE)
        self._folder = _folder_of(self._place)

    # The start

    def newer_than(self, path: Any) -> MemoryCheckpoint | None:
        """Return the newest state in memory if it is not older than the newest checkpoint beside ``path``. Collective.

        Only rank 0 looks at the disk, and opens manifests only if there are some that were not there when the state
        was kept.
        """
        found = self._found = self.tier.find()
        if found is None:
            return None

        def is_newest() -> bool:
            folder = _folder_of(path)
            if folder != self._folder:
                return self._is_newer(found, path)
            if self.tier.saw_all_on_disk(found):
                return True
            try:
                names = find_checkpoints(folder)
            except CheckpointError:
                return True
            return not names or self._is_newer(found, os.path.join(folder, names[-1]))

        return self._take() if Ranks().on_first(f"{path} was not loaded", is_newest) else None

    def newer_than_undamaged(self, path: Any) -> MemoryCheckpoint | None:
        """Return the state that :meth:`newer_than` found, if newer checkpoints on disk have turned out to be broken."""
        found = self._found
        if found is None:
            return None
        return self._take() if Ranks().on_first("", lambda: self._is_newer(found, path)) else None

    def _is_newer(self, found: Found, path: Any) -> bool:
        """Compare a state with the checkpoint at ``path``. Sequence numbers are of one folder: elsewhere (another
        callback's ``dirpath``) the step decides, and the disk where it is the same."""
        manifest = open_checkpoint(path).manifest
        if _folder_of(path) == self._folder:
            return found.age >= manifest.age[:2]
        return found.step > (manifest.step or 0)

    def _take(self) -> MemoryCheckpoint:
        assert self._found is not None
        self._is_settled = True
        return self.tier.take(self._found)

    def begins_from(self, path: Any) -> None:
        """Note that the run begins from ``path``, or from nothing, unless it goes on from memory. Collective."""
        if not self._is_settled:
            self._is_settled = True
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

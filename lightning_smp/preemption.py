"""What a Trainer does when its job is about to be ended: it saves on all ranks at the
same place, and leaves.

A callback, the last one, because a checkpoint that resumes exactly is taken where
ModelCheckpoint takes its own: in ``on_train_batch_end``. In a validation that takes too
long it is taken after a batch, if all ranks have as many of them; the resumed run
begins with this validation (lightning_smp/due_validation.py).
"""

from __future__ import annotations

import math
import os
import signal
import time
from typing import Any, cast

from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn

from smp_core.checkpoint.folders import is_address
from smp_core.watch import SIGNALS, Preemption

NAME = f"{ModelCheckpoint.CHECKPOINT_NAME_LAST}-preempted.ckpt"
"""One of the names that ``ckpt_path="last"`` looks at."""


class LeavesWhenTold(Callback):
    """Saves and leaves when a launcher gives notice. The strategy adds it. Its
    construction is collective.

    Args:
        grace: ``checkpoint.preemption_grace_s``.
    """

    def __init__(self, grace: float) -> None:
        self.preemption = Preemption(grace)
        self._users: dict[int, Any] = {}
        self._in_validation = self._requeued = False

    # Between these two, Lightning installs handlers of its own, which start collectives
    # at any instant.

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The usual signals, and the one that SLURM was told to send.
        environment: Any = cast(Any, trainer.strategy).cluster_environment
        numbers = list(SIGNALS)
        self._requeued = (
            isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        )
        if self._requeued:
            requeue = getattr(environment, "requeue_signal", None)
            numbers += [] if requeue in (None, *SIGNALS) else [requeue]
        self._users = {number: signal.getsignal(number) for number in numbers}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.preemption.install(list(self._users), self._users)
        self.preemption.begin_phase()

    def restore(self) -> None:
        """Put Lightning's handlers back, at the end of a run."""
        self.preemption.restore()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        strategy: Any = trainer.strategy
        if self.preemption.agreed(whole_step=not strategy.window.is_open):
            self._save_and_leave(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        in_fit = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        averages = any(isinstance(each, WeightAveraging) for each in trainer.callbacks)  # type: ignore[attr-defined]
        # With one, the module has the average's weights meanwhile.
        self._in_validation = in_fit and not averages
        if self._in_validation:
            # Ranks take as many steps, repeated ones included, where that number is
            # known.
            self._in_validation = math.inf not in trainer.num_val_batches
            self.preemption.begin_phase()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *arguments: Any
    ) -> None:
        if self._in_validation and self.preemption.agreed(whole_step=False):
            self._save_and_leave(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._in_validation:
            self.preemption.begin_phase()
        self._in_validation = False

    def _save_and_leave(self, trainer: Trainer) -> None:
        # The save is complete before this process leaves, also where saves run behind
        # training.
        begin = time.monotonic()
        path = _path(trainer)
        strategy = cast(Any, trainer.strategy)
        trainer.save_checkpoint(path)
        if strategy.background_saves is not None:
            strategy.background_saves.wait()
        environment = strategy.cluster_environment
        # SLURM's requeued job looks for Lightning's own name, which leads to the
        # checkpoint.
        if self._requeued and trainer.is_global_zero and not is_address(path):
            _link(
                os.path.abspath(path),
                os.path.join(trainer.default_root_dir, "hpc_ckpt_1.ckpt"),
            )
        # Lightning's launcher kills rank 0 when another of its processes ends with a
        # status of its own.
        its_child = (
            isinstance(environment, LightningEnvironment) and trainer.local_rank > 0
        )
        self.preemption.leave(
            f"step {trainer.global_step} is saved in {path} ({time.monotonic() - begin:.1f} s)",
            status=0 if its_child else None,
            requeue=getattr(environment, "auto_requeue", True),
        )


def _path(trainer: Trainer) -> str:
    """Return the checkpoint's place: alongside those of ModelCheckpoint, where
    ``ckpt_path="last"`` finds it; without one where ``ckpt_path="hpc"`` does. In a
    SLURM job that Lightning requeues, None means "hpc", and a link is there.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            return os.path.join(callback.dirpath, NAME)
    return os.path.join(trainer.default_root_dir, "hpc_ckpt_1.ckpt")


def _link(path: str, name: str) -> None:
    """Make ``name`` a link to ``path``, unless the checkpoint itself is there."""
    if path != os.path.abspath(name) and (
        os.path.islink(name) or not os.path.exists(name)
    ):
        # Replaced in one step: a job that is killed in between leaves the old link.
        os.symlink(path, f"{name}.new")
        os.replace(f"{name}.new", name)

"""The memory tier under a Trainer: when the newest state goes to shared memory, and
when a run goes on from there.

A callback, because a state that resumes exactly is taken where ModelCheckpoint takes
its own: in ``on_train_batch_end``. ``fit(ckpt_path="last")`` goes on from the newest of
memory and disk; any other ``ckpt_path``, or none, means that a run begins from there,
and what memory has of a run before is removed.

Private names: ``ModelCheckpoint._find_last_checkpoints``, where Lightning looks for
``"last"``. Where it finds none it forgets that it was asked; what Trainer hands to a
launcher is the only place where the word is seen.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lightning_smp.processes import exception_checkpoints
from smp_core.checkpoint import OpenCheckpoint, Ranks
from smp_core.checkpoint.folders import is_address
from smp_core.checkpoint.memory import launcher_job
from smp_core.config import SmpConfig
from smp_core.entry import memory_tier
from smp_core.topology import Topology

PLACE = f"{ModelCheckpoint.CHECKPOINT_NAME_LAST}-memory.ckpt"
"""The name of the path that ``"last"`` stands for where no checkpoint is on disk.
Nothing is there."""
IN_MEMORY = "the newest state, in shared memory"
"""The path, by identity, that ``trainer.save_checkpoint`` gets for a state that goes to
memory."""
_BARRIER_OF_SAVES = "Trainer.save_checkpoint"
"""The name of the barrier at the end of ``trainer.save_checkpoint``."""


class InThisProcess:
    """A launcher of Lightning for a process that is one of the run's already."""

    is_interactive_compatible = True

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Call a function."""
        return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Do nothing: it has started no processes."""


def finding_memory(launcher: Any) -> Any:
    """Return a launcher under which ``fit(ckpt_path="last")`` means what is in memory,
    also where no checkpoint is on disk; None: this process is launched."""
    launcher = launcher or InThisProcess()
    launch = launcher.launch

    def launched(
        function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        # By name, since Lightning passes it by place.
        call = inspect.signature(function).bind(*args, **kwargs)
        is_fit = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if (
            is_fit
            and call.arguments.get("ckpt_path") == "last"
            and not _is_on_disk(trainer)
        ):
            call.arguments["ckpt_path"] = os.path.join(run_folder(trainer), PLACE)
        return launch(function, *call.args, trainer=trainer, **call.kwargs)

    launcher.launch = launched
    return launcher


def _is_on_disk(trainer: Trainer) -> bool:
    savers = [
        each
        for each in trainer.checkpoint_callbacks
        if isinstance(each, ModelCheckpoint)
    ]
    return any(map(os.path.exists, exception_checkpoints(trainer))) or any(
        each._find_last_checkpoints(trainer) for each in savers
    )


def run_folder(trainer: Trainer) -> str:
    """Return the folder that names the run: ModelCheckpoint's, if it is the same one
    after a restart. Without one a folder that does not exist, in ``default_root_dir``;
    where that is not given either, named by the launcher's job."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            if callback.dirpath is not None and not _is_of_a_logger(
                callback.dirpath, trainer
            ):
                return os.fspath(callback.dirpath)
            if not trainer.loggers:
                return os.path.join(trainer.default_root_dir, "checkpoints")
    # Two runs in one working directory must not find each other's states: without a
    # folder of its own a run is named by its job.
    root, job = os.path.abspath(trainer.default_root_dir), launcher_job()
    return (
        os.path.join(root, "no-checkpoints")
        if root != os.getcwd() or not job
        else os.path.join(os.sep, "jobs", job)
    )


def _is_of_a_logger(path: Any, trainer: Trainer) -> bool:
    """Return whether ModelCheckpoint has taken a folder from a logger, which numbers
    its versions."""
    for logger in trainer.loggers:
        version = (
            logger.version
            if isinstance(logger.version, str)
            else f"version_{logger.version}"
        )
        own = os.path.join(
            str(logger.save_dir or trainer.default_root_dir),
            str(logger.name),
            version,
            "checkpoints",
        )
        if os.path.abspath(path) == os.path.abspath(own):
            return True
    return False


class KeepsInMemory(Callback):
    """Keeps the newest state in shared memory. The strategy adds it. Its construction
    is collective.

    Attributes:
        tier: the states.
    """

    def __init__(self, trainer: Trainer, config: SmpConfig, topology: Topology) -> None:
        folder = run_folder(trainer)
        self.tier = memory_tier(config, topology, folder, "lightning")
        self._place = os.path.join(folder, PLACE)

    # The start

    def newest(
        self, path: Any, on_disk: Callable[[], OpenCheckpoint | str]
    ) -> OpenCheckpoint | str:
        """Return the newest of memory and disk, and begin with it. Collective.

        Args:
            path: what ``ckpt_path="last"`` stands for; it may be in another callback's
                folder than the one that names the run.
            on_disk: as of :meth:`smp_core.checkpoint.memory.tier.MemoryTier.newest`.
        """
        in_folder = Ranks().on_first(
            "the run was not found", lambda: _folder_of(path) == _folder_of(self._place)
        )
        newest = self.tier.newest(on_disk, in_folder)
        assert newest is not None
        return cast("OpenCheckpoint | str", newest)

    def begins_from(self, path: Any) -> None:
        """Note that the run begins from ``path``, or from nothing, unless it goes on
        from memory. Collective."""
        if not self.tier.is_begun:
            self.tier.leave()

    def begin_run(self, trainer: Trainer) -> None:
        """Look after a run that goes on from memory, or begins from a checkpoint or
        from nothing. Collective."""
        self.begins_from(None)
        cast(Any, trainer).callbacks.append(self)

    # Training

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.tier.begin(trainer.global_step)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        strategy: Any = trainer.strategy
        if strategy.window.is_open:
            return
        if self.tier.is_due(trainer.global_step):
            # The ranks commit in the background.
            with strategy.without_barrier(_BARRIER_OF_SAVES):
                trainer.save_checkpoint(IN_MEMORY)

    def close(self, trainer: Trainer, ended_well: bool) -> None:
        """Free the memory if the run ended well; otherwise the state stays, and a line
        says so."""
        callbacks = cast(Any, trainer).callbacks
        if self in callbacks:
            callbacks.remove(self)
        self.tier.close(ended_well)


def _folder_of(path: Any) -> str:
    text = os.fspath(path)
    if is_address(text):
        return text.rstrip("/").rpartition("/")[0]
    return os.path.realpath(os.path.dirname(os.path.abspath(text)))

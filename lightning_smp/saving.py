"""SmpCheckpoint: a ModelCheckpoint by steps that keeps the newest few and can find its
own interval."""

from __future__ import annotations

import inspect
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from smp_core.checkpoint import SaveSchedule
from smp_core.checkpoint.folders import is_address

_STEPS = "write checkpoint_interval=..., in optimizer steps"
_BEST = "add ModelCheckpoint(monitor=...) beside it, which keeps the best"
# ModelCheckpoint's options that say when to save and what stays, and what to write.
_INSTEAD = {
    "every_n_train_steps": _STEPS,
    "every_n_epochs": _STEPS,
    "train_time_interval": _STEPS,
    "save_on_train_epoch_end": _STEPS,
    "monitor": _BEST,
    "mode": _BEST,
    "save_top_k": "write keep_last=...",
    "save_last": "leave it out: last.ckpt is always a link to the newest",
    "auto_insert_metric_name": "leave it out: filename=... is written as it stands",
}


class SmpCheckpoint(ModelCheckpoint):
    """A callback that saves ``dirpath/step-00001000.ckpt`` every so many optimizer
    steps and at the end, and keeps the newest.

    ``last.ckpt`` is a link to the newest, so that ``ckpt_path="last"`` finds it; object
    stores have no links.

    Args:
        dirpath: the folder; default: ModelCheckpoint's.
        checkpoint_interval: optimizer steps between two saves, or ``"auto"``: the
            interval that loses the least time (Daly 2006), from the measured times of
            steps and saves and the time between failures.
        mean_time_between_failures: of the whole job, in seconds or as a timedelta: one
            node's, divided by the number of nodes. Needed for ``"auto"``.
        keep_last: how many checkpoints stay; None: all.
        options: ModelCheckpoint's own (``filename``, ``save_weights_only``,
            ``save_on_exception``, ``verbose``).

    Raises:
        CheckpointError: a bad interval, or ``"auto"`` without a time between failures.
        ValueError: ``keep_last`` below 1; an option of ModelCheckpoint that would decide
            what is decided here.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        *,
        checkpoint_interval: int | str = "auto",
        mean_time_between_failures: float | timedelta | None = None,
        keep_last: int | None = 3,
        filename: str = "step-{step:08d}",
        **options: Any,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(
                f"keep_last={keep_last} must be 1 or more, or None to keep all"
            )
        # LightningCLI hands over ModelCheckpoint's defaults, which are no wishes.
        own = inspect.signature(ModelCheckpoint).parameters
        for name, instead in _INSTEAD.items():
            if options.pop(name, own[name].default) != own[name].default:
                raise ValueError(
                    f"{name} is an option of ModelCheckpoint, not of SmpCheckpoint; {instead}"
                )
        # ModelCheckpoint names, links and writes; when to save and what stays is
        # decided here.
        super().__init__(
            dirpath,
            filename=filename,
            auto_insert_metric_name=False,
            save_top_k=-1,
            save_last=None if dirpath is not None and is_address(dirpath) else "link",
            every_n_train_steps=1,
            **options,
        )
        self.schedule = SaveSchedule(checkpoint_interval, mean_time_between_failures)
        self.keep_last = keep_last
        self._kept: list[str] = []
        # Steps that the schedule has seen, and the step of the last save.
        self._counted_step = self._saved_step = -1

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}{{{str(self.dirpath)!r}}}"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._counted_step = self._saved_step = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == self._counted_step:
            return  # a micro-batch that is not its window's last
        self._counted_step = trainer.global_step
        if self.schedule.step():
            self._save_now(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The end of training is saved, unless its last step was.
        if trainer.global_step > self._saved_step:
            self._save_now(trainer, pl_module)

    def _save_now(self, trainer: Trainer, pl_module: LightningModule) -> None:
        begin = time.perf_counter()
        super().on_train_batch_end(trainer, pl_module, None, None, 0)
        self._saved_step = trainer.global_step
        newest = self.best_model_path  # without a metric to watch it is the newest
        if newest not in self._kept:
            self._kept.append(newest)
        # The checkpoint that the run began from stays: it is the user's to remove.
        while self.keep_last is not None and len(self._kept) > self.keep_last:
            oldest = self._kept.pop(0)
            if trainer.ckpt_path is None or os.path.abspath(oldest) != os.path.abspath(
                trainer.ckpt_path
            ):
                trainer.strategy.remove_checkpoint(oldest)
        self.schedule.saved(time.perf_counter() - begin)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "kept": self._kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # In another folder the older ones are another run's.
        if state_dict.get("dirpath") == self.dirpath:
            # The checkpoint that is loaded was not one of them yet when it was written.
            # Before the first regular save there was none, and only what lies in the
            # folder is this run's to remove.
            kept = [*state_dict.get("kept", []), state_dict["best_model_path"]]
            self._kept = [
                path
                for path in dict.fromkeys(kept)
                if path.startswith(str(self.dirpath).rstrip("/") + "/")
                and ".." not in path.split("/")
            ]

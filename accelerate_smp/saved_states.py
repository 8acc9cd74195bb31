"""The save_state and load_state of SmpAccelerator: one checkpoint folder (accelerate_smp/checkpoints.py)."""

from __future__ import annotations

import logging
from typing import Any

from accelerate_smp import checkpoints
from accelerate_smp.background import BackgroundSavingAccelerator
from accelerate_smp.handle import parallel_of
from smp_core.rank_watch import meet

logger = logging.getLogger("smp")


class SavedStatesAccelerator(BackgroundSavingAccelerator):
    """An Accelerator that saves and loads folders.

    Attributes:
        smp: False: Accelerate's own.
    """

    smp = True

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> str:
        """Save all prepared objects as one checkpoint folder, which any number of ranks loads. Collective.

        Saved are models, optimizers, schedulers, samplers, scaler, random states and registered objects
        (docs/checkpoint-format.md).

        With ``checkpoint="async"`` it returns when tensors have been copied to host memory; the first step after the
        writing has ended raises its error, and :meth:`wait_for_save` and ``end_training`` wait for it.

        Raises:
            CheckpointError: on every rank when any rank failed; the content of ``output_dir`` is then untouched.
        """
        if not self.smp:
            return super().save_state(output_dir, safe_serialization, **options)
        if not safe_serialization:
            raise ValueError(
                "safe_serialization=False: checkpoints are always safetensors; leave it out, or write one torch.save "
                "file from the folder: `smp checkpoint consolidate FOLDER model.pt`"
            )
        if options:
            raise TypeError(f"save_state options {sorted(options)} have no counterpart here; leave them out")
        meet("accelerator.save_state(...)")
        self._say_what_an_open_window_means()
        return checkpoints.save_state(self, output_dir)

    def load_state(self, input_dir: str | None = None, load_kwargs: dict | None = None, **options: Any) -> None:
        """Load what :meth:`save_state`, or Lightning under ``strategy="smp_sharded"``, has saved. Collective.

        Args:
            options: ``strict=False`` loads the weights that fit by name.

        Raises:
            CheckpointError: missing, half, damaged or foreign folder; tensors that do not fit.
        """
        if not self.smp:
            super().load_state(input_dir, load_kwargs, **options)
            return
        if load_kwargs:
            raise TypeError(f"load_kwargs {sorted(load_kwargs)} have no counterpart here; leave them out")
        meet("accelerator.load_state(...)")
        checkpoints.load_state(self, input_dir, **options)

    def _say_what_an_open_window_means(self) -> None:
        for handle in map(parallel_of, self._models):
            if handle is not None and handle.window.is_open:
                logger.warning(
                    "save_state in the middle of an accumulation window: weights and optimizer are those of before it, "
                    "and its %d micro-batches have to be seen again after load_state",
                    handle.window.micro_batches,
                )
                return

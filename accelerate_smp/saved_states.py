"""The save_state and load_state of SmpAccelerator: one checkpoint folder
(checkpoints.py), and its place.

Accelerate has no public names for the hooks ``_save_model_state_pre_hook`` and
``_load_model_state_pre_hook``, and for what was prepared: ``_models``, ``_schedulers``.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import DataLoader, IterableDataset

from accelerate_smp import checkpoints
from accelerate_smp.background import BackgroundSavingAccelerator
from accelerate_smp.handle import parallel_of
from smp_core.checkpoint import (
    OpenCheckpoint,
    is_checkpoint,
    remove_checkpoint,
    surplus,
)
from smp_core.watch import meet

logger = logging.getLogger("smp")


class SavedStatesAccelerator(BackgroundSavingAccelerator):
    """An Accelerator that saves and loads folders.

    Attributes:
        smp: False: Accelerate's own.
    """

    smp = True

    def save_state(
        self,
        output_dir: str | None = None,
        safe_serialization: bool = True,
        **options: Any,
    ) -> str:
        """Save all prepared objects as one checkpoint folder, which any number of ranks
        loads. Collective.

        Saved are models, optimizers, schedulers, samplers, scaler, random states and
        registered objects (docs/checkpoint-format.md).

        With ``checkpoint="async"`` it returns when tensors have been copied to host
        memory; the first step after the writing has ended raises its error, and
        :meth:`wait_for_save` and ``end_training`` wait for it.

        Raises:
            CheckpointError: on every rank when any rank failed; the content of
                ``output_dir`` is then untouched.
        """
        if not self.smp:
            return super().save_state(output_dir, safe_serialization, **options)
        # Options that Accelerate's folders have and ours do not are refused, in the
        # place of being dropped.
        if not safe_serialization:
            raise ValueError(
                "safe_serialization=False: checkpoints are always safetensors; leave it out, or write one torch.save "
                "file from the folder: `smp checkpoint consolidate FOLDER model.pt`"
            )
        if options:
            raise TypeError(
                f"save_state options {sorted(options)} have no counterpart here; leave them out"
            )
        # Every rank has to call it: one that does not is named.
        meet("accelerator.save_state(...)")
        self._say_what_an_open_window_means()
        return _save(self, output_dir)

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict | None = None,
        **options: Any,
    ) -> None:
        """Load what :meth:`save_state`, or Lightning under ``strategy="smp_sharded"``,
        has saved. Collective.

        Args:
            options: ``strict=False`` loads the weights that fit by name.

        Raises:
            CheckpointError: missing, half, damaged or foreign folder; tensors that do
                not fit.
        """
        if not self.smp:
            super().load_state(input_dir, load_kwargs, **options)
            return
        if load_kwargs:
            raise TypeError(
                f"load_kwargs {sorted(load_kwargs)} have no counterpart here; leave them out"
            )
        meet("accelerator.load_state(...)")
        load(self, input_dir, **options)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader of the batches that are left of an epoch. Its start draws no
        random number: the epoch's own start drew one, before the state was saved that
        goes on here.
        """
        is_dealt_out = (
            isinstance(dataloader, DataLoaderDispatcher)
            and not dataloader.split_batches
        )
        if (
            self.smp
            and is_dealt_out
            and not isinstance(dataloader.dataset, IterableDataset)
        ):
            # Its sampler yields as many for each batch.
            num_batches *= self.num_processes
        left = super().skip_first_batches(dataloader, num_batches)
        drawing = getattr(left, "base_dataloader", left)  # of Accelerate's own loaders
        if (
            self.smp
            and num_batches
            and isinstance(drawing, DataLoader)
            and drawing.generator is None
        ):
            # Workers' seeds come from it: each rank's own, and others than at the
            # epoch's start.
            drawing.generator = torch.Generator().manual_seed(
                torch.initial_seed() + num_batches
            )
        return left

    def _say_what_an_open_window_means(self) -> None:
        for handle in map(parallel_of, self._models):
            if handle is not None and handle.window.is_open:
                logger.warning(
                    "save_state in the middle of an accumulation window: weights and optimizer are those of before it, "
                    "and its %d micro-batches have to be seen again after load_state",
                    handle.window.micro_batches,
                )
                return


def _save(accelerator: BackgroundSavingAccelerator, output_dir: str | None) -> str:
    """Write everything the accelerator has prepared. Collective. Returns the folder."""
    output_dir = _folder_to_write(accelerator, output_dir)
    checkpoints.write(accelerator, output_dir, {"step": accelerator.optimizer_steps})
    if accelerator._save_model_state_pre_hook:
        accelerator.wait_for_save()  # hooks write into the folder
    # Hooks get what Accelerate's would: models and their states, which may be shards.
    weights = [model.state_dict() for model in accelerator._models]
    for hook in accelerator._save_model_state_pre_hook.values():
        hook(list(accelerator._models), weights, output_dir)
    # Older folders go once this one has committed.
    limit = accelerator.project_configuration.total_limit
    if (
        accelerator.project_configuration.automatic_checkpoint_naming
        and limit is not None
    ):
        # The working directory may be another one when the save has ended.
        root = os.path.abspath(os.path.dirname(output_dir))
        checkpoints.after_commit(
            accelerator,
            f"removal of the oldest in {root}",
            lambda: _keep_newest(root, limit),
        )
    accelerator.project_configuration.iteration += 1
    return output_dir


def load(
    accelerator: BackgroundSavingAccelerator,
    input_dir: str | OpenCheckpoint | None,
    strict: bool = True,
) -> None:
    """Load a folder of save_state, or of Lightning, or a state in memory.
    Collective."""
    accelerator.wait_for_save()
    if isinstance(input_dir, OpenCheckpoint):
        checkpoints.read(accelerator, input_dir, accelerator._schedulers, strict)
        return
    path = _folder_to_read(accelerator, input_dir)
    checkpoints.read(accelerator, path, accelerator._schedulers, strict)
    for hook in accelerator._load_model_state_pre_hook.values():
        # A hook takes out of the list what it has loaded itself.
        hook(list(accelerator._models), path)


def _keep_newest(root: str, limit: int) -> None:
    for folder in surplus(_numbered(root), max(limit, 1)):
        if is_checkpoint(folder):
            remove_checkpoint(folder)
        else:
            shutil.rmtree(folder)


def _folder_to_write(
    accelerator: BackgroundSavingAccelerator, output_dir: str | None
) -> str:
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming:
        if output_dir is None:
            raise ValueError(
                "save_state() needs a folder: save_state('checkpoints/step-100'), or "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
            )
        return os.fspath(output_dir)
    root = os.path.join(project.project_dir, "checkpoints")
    # A folder that is there may be the only whole state.
    target = os.path.join(root, f"checkpoint_{accelerator.save_iteration}")
    if os.path.exists(target):
        raise ValueError(
            f"{target} exists already; set accelerator.project_configuration.iteration to what comes next"
        )
    return target


def _folder_to_read(
    accelerator: BackgroundSavingAccelerator, input_dir: str | None
) -> str:
    if input_dir is not None:
        return os.path.expanduser(os.fspath(input_dir))
    project = accelerator.project_configuration
    found = _numbered(os.path.join(project.project_dir or "", "checkpoints"))
    if not project.automatic_checkpoint_naming or not found:
        raise ValueError(
            "load_state() needs a folder: load_state('checkpoints/step-100')"
        )
    return found[-1]


def _numbered(root: str) -> list[str]:
    """List the folders ``checkpoint_<n>``, oldest first."""
    if not os.path.isdir(root):
        return []
    names = [name for name in os.listdir(root) if re.fullmatch(r"checkpoint_\d+", name)]
    return [
        os.path.join(root, name)
        for name in sorted(names, key=lambda name: int(name.rpartition("_")[2]))
    ]

"""A Lightning checkpoint written as one folder of sharded tensors, or as one ordinary
``.ckpt``; and removed.

The folder holds Lightning's checkpoint dictionary: ``state_dict`` and
``optimizer_states`` as tensors (the latter by parameter name), everything else as the
rest. lightning_smp/loading.py reads it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_smp.background import BackgroundSaves, in_lightning_words
from lightning_smp.checkpoint_sources import CURRENT_MODEL, PER_RANK, main_module
from lightning_smp.resume import places_of_loaders, random_of_rank
from lightning_smp.steps import SteppingStrategy
from smp_core.checkpoint import (
    CheckpointError,
    Ranks,
    config_files,
    encode_rest,
    full_state_dict,
    is_checkpoint,
    numbered,
    remove_checkpoint,
    save_checkpoint,
    save_full_state,
)
from smp_core.checkpoint.folders import is_address
from smp_core.checkpoint.memory import MemoryTier
from smp_core.comm.remainder_state import remainder_state
from smp_core.config import SmpConfig
from smp_core.torch_facts import uncompiled

logger = logging.getLogger("smp")


def check_plugin(plugin: CheckpointIO, config: SmpConfig) -> None:
    """Refuse a CheckpointIO that has no part in sharded saves, or warn of one that only
    reads.

    Raises:
        ValueError: it is one that only writes, and has none.
    """
    if config.checkpoint.full_state_dict:
        return
    name = type(plugin).__name__
    # It would be passed over in silence otherwise: a sharded save does not ask it.
    if isinstance(plugin, AsyncCheckpointIO):
        raise ValueError(
            f"{name} writes ordinary .ckpt files, and sharded folders have a writer of their own: leave the plugin out "
            "and write SmpShardedStrategy(checkpoint='async'), or keep it with checkpoint='full'"
        )
    if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
        logger.warning(
            "%s reads ordinary .ckpt files; it writes none without checkpoint='full'",
            name,
        )


def check_before_training(trainer: Trainer, config: SmpConfig) -> None:
    """Refuse hyper-parameters that the checkpoints of a run cannot hold, before it has
    trained to the first of them. Warn of loggers that were asked to upload checkpoints
    (``WandbLogger(log_model=True)``, MLFlowLogger), which pass over folders without a
    word; ``_log_model`` is the only place of what they were asked.

    Raises:
        CheckpointError: with the names of the values.
    """
    if config.checkpoint.full_state_dict:
        return
    for each in trainer.loggers if trainer.is_global_zero else ():
        asked = getattr(each, "_log_model", False)
        # Lightning's stand-in for a logger (fast_dev_run) has a method of any name.
        if asked and not callable(asked):
            logger.warning(
                "%s(log_model=%r) uploads checkpoints that are files, and sharded ones are folders: none is uploaded; "
                "write SmpShardedStrategy(checkpoint='full'), or upload the folder of a checkpoint yourself on rank 0",
                type(each).__name__,
                asked,
            )
    # Hooks of a save may take out what it cannot hold.
    owners = (trainer.lightning_module, trainer.datamodule)  # type: ignore[attr-defined]
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    hooks = [
        is_overridden("on_save_checkpoint", each) for each in (*owners, *callbacks)
    ]
    if trainer.fast_dev_run or any(hooks):  # type: ignore[attr-defined]
        return
    for owner in owners:
        given = getattr(owner, "hparams", None)
        if isinstance(given, dict):
            key = getattr(owner, "CHECKPOINT_HYPER_PARAMS_KEY", "hyper_parameters")
            with in_lightning_words():
                encode_rest({key: dict(given)}, {})


def optimizer_state(
    strategy: SteppingStrategy, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return one optimizer's state by parameter name, or in torch's own numbered form
    with ``checkpoint="full"``."""
    # LightningOptimizer holds the real one.
    optimizer = getattr(optimizer, "optimizer", optimizer)
    named = strategy.parallel.optimizer_state(optimizer)
    return numbered(named) if strategy.config.checkpoint.full_state_dict else named


def save(
    strategy: SteppingStrategy,
    checkpoint: dict[str, Any],
    path: Any,
    storage_options: Any,
    behind_training: BackgroundSaves | None,
) -> None:
    """Write a checkpoint dictionary to ``path``. Collective; an error on one rank is
    raised on all.

    Args:
        behind_training: what saves with ``checkpoint="async"``; it returns when the
            tensors have been copied to host memory.
    """
    if strategy.config.checkpoint.full_state_dict:
        _save_full(strategy, checkpoint, path, storage_options)
        return
    # A folder of sharded tensors.
    # Options and paths that a folder cannot take are refused before anything is
    # gathered.
    if storage_options is not None:
        raise TypeError(
            "storage_options have no effect on a sharded checkpoint; give an fsspec address as the path, or set "
            "checkpoint='full' to write one file through the CheckpointIO"
        )
    if os.path.isfile(path):
        raise CheckpointError(
            f"{path} is a file, perhaps of a run with checkpoint='full'; a sharded checkpoint is a folder: "
            "give another path or remove the file"
        )
    # A save that a run can go on from also has each rank's random states, places of
    # loaders, and what compression has left over.
    _, inner = main_module(strategy.parallel.module)
    if _can_resume(checkpoint):
        checkpoint = {**checkpoint, **remainder_state(strategy.parallel.traffic)}
    options: dict[str, Any] = {
        "metadata": _facts(strategy, checkpoint),
        "extra_files": config_files(uncompiled(inner)),
        "per_rank": _own_part(strategy, checkpoint)
        if _can_resume(checkpoint)
        else None,
    }
    with in_lightning_words():
        if behind_training is None:
            save_checkpoint(path, checkpoint, **options)
        else:
            behind_training.save(path, checkpoint, **options)


def save_in_memory(
    strategy: SteppingStrategy, checkpoint: dict[str, Any], tier: MemoryTier
) -> None:
    """Keep a checkpoint dictionary in shared memory. Collective; an error on one rank
    is raised on all."""
    # Weights and optimizer states are copied behind training, before the next step
    # changes them; all else is copied now.
    state = {**checkpoint, **remainder_state(strategy.parallel.traffic)}
    # An average changes when it is taken, not when an optimizer steps.
    later = () if CURRENT_MODEL in checkpoint else ("state_dict.", "optimizer_states.")
    with in_lightning_words():
        tier.save(
            state,
            checkpoint["global_step"],
            _facts(strategy, checkpoint),
            _own_part(strategy, checkpoint),
            later,
        )


def _facts(strategy: SteppingStrategy, checkpoint: dict[str, Any]) -> dict[str, Any]:
    prefix, _ = main_module(strategy.parallel.module)
    return {
        "step": checkpoint["global_step"],
        "module_prefix": prefix,
        "trainer": "lightning",
    }


def _can_resume(checkpoint: dict[str, Any]) -> bool:
    # ModelCheckpoint(save_weights_only=True) leaves the optimizers out.
    return "optimizer_states" in checkpoint


def _own_part(strategy: SteppingStrategy, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's random states, and the places of its training data loaders
    that keep one."""
    # Where the resumed run begins: at an open window's start, before the validation
    # that runs, or here.
    assert strategy.lightning_module is not None
    trainer = strategy.lightning_module.trainer
    start = None if strategy.open_window is None else strategy.open_window.random
    own = random_of_rank(
        trainer, start or strategy.before_validation.random_states(trainer)
    )
    return {**own, "loaders": places_of_loaders(checkpoint)}


def _save_full(
    strategy: SteppingStrategy,
    checkpoint: dict[str, Any],
    path: Any,
    storage_options: Any,
) -> None:
    if _can_resume(checkpoint):
        checkpoint[PER_RANK] = Ranks().gather(_own_part(strategy, checkpoint))
        if strategy.config.compression.error_feedback and strategy.is_global_zero:
            logger.warning(
                "%s: one whole file has no place for each rank's remainders of compression.error_feedback",
                path,
            )
    if (
        type(strategy.checkpoint_io) is TorchCheckpointIO
        and storage_options is None
        and not is_address(path)
    ):
        with in_lightning_words():
            save_full_state(path, checkpoint, stages=strategy.parallel.stage_group)
        return
    # Another CheckpointIO writes the file, and takes the complete dictionary.
    whole = full_state_dict(checkpoint, stages=strategy.parallel.stage_group)

    def write() -> None:
        if is_checkpoint(path):
            remove_checkpoint(path)
        Strategy.save_checkpoint(strategy, whole, path, storage_options)

    Ranks().on_first(f"checkpoint {path} was not saved", write)


def remove(
    strategy: SteppingStrategy, path: Any, behind_training: BackgroundSaves | None
) -> None:
    """Remove a folder so that no half of it stays behind, or a file; once the pending
    save has committed. On rank 0."""

    def remove_now() -> None:
        # A link ("last.ckpt") goes alone; what it leads to has a name of its own.
        if os.path.islink(path):
            Path(path).unlink()
        elif is_checkpoint(path):
            remove_checkpoint(path)
        else:
            strategy.checkpoint_io.remove_checkpoint(path)

    if behind_training is None:
        remove_now()
    else:
        behind_training.after_commit(f"removal of {path}", remove_now)

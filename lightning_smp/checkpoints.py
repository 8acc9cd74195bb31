"""A Lightning checkpoint as one folder of sharded tensors, or as one ordinary ``.ckpt``; and back, on any sharding.

What is in the folder is Lightning's checkpoint dictionary: ``state_dict`` and ``optimizer_states`` as tensors (the
latter by parameter name), everything else as the rest. An ordinary file of any other strategy loads too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_smp.background import in_lightning_words
from lightning_smp.resume import Resume, random_of_rank
from smp_core.checkpoint import (
    CheckpointError,
    find_checkpoints,
    first_whole,
    full_state_dict,
    is_checkpoint,
    load_checkpoint,
    read_manifest,
    read_per_rank,
    read_rest,
    remove_checkpoint,
    save_checkpoint,
    save_full_state,
)
from smp_core.checkpoint.addresses import is_address
from smp_core.checkpoint.optimizers import (
    copy_into,
    load_named_optimizer_state,
    load_whole_optimizer_state,
    named_optimizer_state,
    names_between,
)
from smp_core.checkpoint.random_state import resumed_random_state
from smp_core.checkpoint.ranks import Ranks
from smp_core.comm.remainder_state import KEY as REMAINDERS
from smp_core.comm.remainder_state import load_remainder_state, remainder_state
from smp_core.module_names import clean_name, uncompiled

if TYPE_CHECKING:
    from lightning_smp.strategy import SmpShardedStrategy

logger = logging.getLogger("smp")

# In a file: what a folder has as each rank's own part.
_PER_RANK = "smp_per_rank"
FP8_STATE = "smp_fp8"
"""Key of the FP8 scales in the checkpoint dictionary: plain tensors by module name."""


def model_state(strategy: SmpShardedStrategy) -> dict[str, Any]:
    """The module's state dict; sharded parameters as DTensors."""
    return strategy.parallel.model_state()


def optimizer_state(strategy: SmpShardedStrategy, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """One optimizer's state by parameter name, or in torch's own numbered form with ``save_full_state_dict``."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # LightningOptimizer holds the real one
    if strategy.config.save_full_state_dict:
        return optimizer.state_dict()
    return named_optimizer_state(strategy.parallel.module, optimizer)


def save(strategy: SmpShardedStrategy, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:
    """Write a checkpoint dictionary to ``path``. Collective; an error on one rank is raised on all.

    With ``async_save`` it returns when the tensors have been copied to host memory.
    """
    if strategy.config.save_full_state_dict:
        _save_whole(strategy, checkpoint, path, storage_options)
        return
    if storage_options is not None:
        raise TypeError(
            "storage_options have no effect on a sharded checkpoint; give an fsspec address as the path, or set "
            "save_full_state_dict=True to write one file through the CheckpointIO"
        )
    if os.path.isfile(path):
        raise CheckpointError(
            f"{path} is a file, perhaps of a run with save_full_state_dict=True; a sharded checkpoint is a folder: "
            "give another path or remove the file"
        )
    module = strategy.parallel.module
    prefix, inner = main_module(module)
    if _can_resume(checkpoint):
        checkpoint = {**checkpoint, **remainder_state(strategy.parallel.traffic)}
    options: dict[str, Any] = {
        "metadata": {"step": checkpoint["global_step"], "module_prefix": prefix, "trainer": "lightning"},
        "extra_files": _model_files(inner),
        "per_rank": _own_part(strategy) if _can_resume(checkpoint) else None,
    }
    with in_lightning_words():
        if strategy.background_saves is None:
            save_checkpoint(path, checkpoint, **options)
        else:
            strategy.background_saves.save(path, checkpoint, **options)


def _can_resume(checkpoint: dict[str, Any]) -> bool:
    return "optimizer_states" in checkpoint  # not of ModelCheckpoint(save_weights_only=True)


def _own_part(strategy: SmpShardedStrategy) -> dict[str, Any]:
    assert strategy.lightning_module is not None
    return random_of_rank(strategy.lightning_module.trainer)


def _save_whole(strategy: SmpShardedStrategy, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:
    if _can_resume(checkpoint):
        checkpoint[_PER_RANK] = Ranks().gather(_own_part(strategy))
        if strategy.config.error_feedback and strategy.is_global_zero:
            logger.warning("%s: one whole file has no place for each rank's remainders of error_feedback", path)
    if type(strategy.checkpoint_io) is TorchCheckpointIO and storage_options is None and not is_address(path):
        with in_lightning_words():
            save_full_state(path, checkpoint)
        return
    # Somebody else writes the file, and takes the whole dictionary.
    whole = full_state_dict(checkpoint)

    def write() -> None:
        if is_checkpoint(path):
            remove_checkpoint(path)
        Strategy.save_checkpoint(strategy, whole, path, storage_options)

    Ranks().on_first(f"checkpoint {path} was not saved", write)


def main_module(module: nn.Module) -> tuple[str, nn.Module]:
    """The one child that holds all parameters, with its name and a dot, or the module itself and ""."""
    children = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
    if len(children) == 1 and not any(True for _ in module.parameters(recurse=False)):
        return f"{children[0][0]}.", children[0][1]
    return "", module


def _model_files(module: nn.Module) -> dict[str, str]:
    """``config.json`` and ``generation_config.json`` of a Transformers model, so that an export is complete."""
    files = {}
    inner = uncompiled(module)
    for attribute, name in (("config", "config.json"), ("generation_config", "generation_config.json")):
        to_json = getattr(getattr(inner, attribute, None), "to_json_string", None)
        if callable(to_json):
            files[name] = to_json(use_diff=False) if attribute == "config" else to_json()
    return files


def load(strategy: SmpShardedStrategy, path: Any, weights_only: bool | None) -> dict[str, Any]:
    """Load weights, and optimizer states when fitting, into the sharded module. Collective.

    Returns:
        the rest of the checkpoint dictionary for the Trainer.
    """
    verify = strategy.config.verify_checkpoint
    if _means_newest(strategy, path):
        path, verify = _newest_whole(path, verify), "sizes"
    if os.path.isfile(path):
        return _load_whole(strategy, path, weights_only)
    module = strategy.parallel.module
    strict = getattr(module, "strict_loading", True)
    rest: dict[str, Any] = read_rest(
        path, tensors=["*"], exclude=["state_dict.*", "optimizer_states.*", f"{REMAINDERS}.*"]
    )
    manifest = read_manifest(path)
    # A folder saved without a LightningModule around the model (by accelerate_smp) has the names without its prefix.
    prefix_there = manifest.metadata.get("module_prefix", "")
    by_lightning = manifest.metadata.get("trainer") == "lightning"
    name_there = names_between(prefix_there if by_lightning else main_module(module)[0], prefix_there)
    if "loops" not in rest:
        rest.setdefault("pytorch-lightning_version", lightning.__version__)
        rest.setdefault("global_step", 0)
        logger.warning("%s was not saved by Lightning: weights and optimizers go on, loops start anew", path)
    state = strategy.parallel.model_state()
    fitting = _is_fitting(strategy)
    if fitting:
        _check_complete(rest, path)
    with in_lightning_words():
        load_checkpoint(
            path,
            {"state_dict": {name_there(name): value for name, value in state.items()}},
            strict=strict,
            verify=verify,
        )
    strategy.parallel.take_model_state(state)
    if fitting:
        _check_number(strategy, len(rest["optimizer_states"]), path)
        for number, optimizer in enumerate(strategy.optimizers):
            where = ("optimizer_states", number)
            load_named_optimizer_state(path, where, module, optimizer, name_there, verify="sizes")
        _begin_resume(strategy, rest, read_per_rank(path), path)
        load_remainder_state(strategy.parallel.traffic, path)
    _load_fp8(strategy, rest, path, name_there)
    return {**rest, "state_dict": state}


def _means_newest(strategy: SmpShardedStrategy, path: Any) -> bool:
    """Whether a path is what ``ckpt_path="last"`` stands for."""
    assert strategy.lightning_module is not None
    folder, name = os.path.split(os.path.abspath(path))
    for callback in strategy.lightning_module.trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            parts = os.path.splitext(name)[0].split(callback.CHECKPOINT_JOIN_CHAR)
            if os.path.abspath(callback.dirpath) == folder and callback.CHECKPOINT_NAME_LAST in parts:
                return True
    return False


def _newest_whole(path: Any, verify: str) -> str:
    """``path`` or, where that is broken, the newest whole checkpoint beside it. Collective."""

    def candidates() -> list[str]:
        folder = os.path.dirname(os.path.abspath(path))
        folders = [os.path.join(folder, name) for name in reversed(find_checkpoints(folder))]
        files = sorted((str(file) for file in Path(folder).glob("*.ckpt") if file.is_file()), key=os.path.getmtime)
        others = [*files[::-1], *folders] if os.path.isfile(path) else [*folders, *files[::-1]]
        return [str(path), *(each for each in others if os.path.realpath(each) != os.path.realpath(path))]

    ordered = Ranks().on_first(f"{path} was not loaded", candidates)
    return first_whole(ordered, verify)


def _check_complete(checkpoint: dict[str, Any], path: Any) -> None:
    if "optimizer_states" not in checkpoint:
        raise CheckpointError(
            f"{path} holds weights only (save_weights_only=True): no training to go on with. To begin a new one from "
            "them, leave ckpt_path out and use YourModule.load_from_checkpoint on an ordinary .ckpt; `smp checkpoint "
            f"consolidate {path} weights.ckpt` makes one of a folder"
        )


def _begin_resume(strategy: SmpShardedStrategy, checkpoint: dict[str, Any], per_rank: list[Any], path: Any) -> None:
    """Remember what is settled when the data loaders are known and the first batch comes."""
    parts = [part if isinstance(part, dict) else {} for part in per_rank]
    random, world = None, strategy.world_size
    if any("random" in part for part in parts):
        seed, step = int(os.environ.get("PL_GLOBAL_SEED", "0")), int(checkpoint["global_step"])
        saved = [part.get("random") for part in parts]
        random = resumed_random_state(saved, strategy.global_rank, world, seed, step, os.fspath(path))
    epoch_random = parts[strategy.global_rank].get("epoch_random") if len(parts) == world else None
    place = checkpoint.get("smp_data")
    data_size = strategy.mesh.data_size
    strategy.resume = Resume(place, random, epoch_random, data_size, strategy.config.allow_batch_change)


def _load_whole(strategy: SmpShardedStrategy, path: Any, weights_only: bool | None) -> dict[str, Any]:
    checkpoint = strategy.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
    if "state_dict" not in checkpoint:
        raise CheckpointError(f"{path} is no Lightning checkpoint: it has no 'state_dict' but {sorted(checkpoint)[:8]}")
    fitting = _is_fitting(strategy)
    if fitting:
        _check_complete(checkpoint, path)
    module = strategy.parallel.module
    saved = {clean_name(name): value for name, value in checkpoint["state_dict"].items()}
    state = strategy.parallel.model_state()
    _check_names(path, saved, state, strict=getattr(module, "strict_loading", True))
    for name, value in state.items():
        if name in saved:
            copy_into(value, saved[name])
    strategy.parallel.take_model_state(state)
    if fitting:
        _check_number(strategy, len(checkpoint["optimizer_states"]), path)
        for optimizer, optimizer_saved in zip(strategy.optimizers, checkpoint["optimizer_states"], strict=True):
            load_whole_optimizer_state(optimizer, optimizer_saved)
        _begin_resume(strategy, checkpoint, checkpoint.get(_PER_RANK, []), path)
    _load_fp8(strategy, checkpoint, path)
    return checkpoint


def _load_fp8(
    strategy: SmpShardedStrategy, checkpoint: dict[str, Any], path: Any, name_there: Callable[[str], str] = str
) -> None:
    """FP8 scales, after the weights."""
    fp8, saved = strategy.parallel.fp8, checkpoint.get(FP8_STATE)
    if fp8 is not None:
        fp8.load_state_dict(saved, name_there)
    elif saved is not None:
        logger.info("%s has FP8 scales, which are not used: this run computes without FP8", path)


def _check_names(path: Any, saved: dict[str, Any], state: dict[str, Any], strict: bool) -> None:
    missing, unexpected = sorted(state.keys() - saved.keys()), sorted(saved.keys() - state.keys())
    shapes = [
        f"{name}: file {list(saved[name].shape)}, model {list(value.shape)}"
        for name, value in state.items()
        if name in saved and saved[name].shape != value.shape
    ]
    problems = []
    if strict and missing:
        problems.append(f"not in the file: {', '.join(missing[:5])}")
    if strict and unexpected:
        problems.append(f"in the file but not in the model: {', '.join(unexpected[:5])}")
    if shapes:
        problems.append(f"of another shape (another architecture?): {'; '.join(shapes[:5])}")
    if problems:
        raise CheckpointError(f"{path} does not fit the model: {'; '.join(problems)}")
    for what, names in (("missing in the file, kept", missing), ("in the file only, not used", unexpected)):
        if names:
            logger.warning("%s: %s: %s", path, what, ", ".join(names[:5]))


def _check_number(strategy: SmpShardedStrategy, saved: int, path: Any) -> None:
    if saved != len(strategy.optimizers):
        raise CheckpointError(
            f"{path} holds states of {saved} optimizers, but configure_optimizers made {len(strategy.optimizers)}; "
            "build it as it was, or load the weights alone"
        )


def _is_fitting(strategy: SmpShardedStrategy) -> bool:
    module = strategy.lightning_module
    return module is not None and module.trainer.state.fn == TrainerFn.FITTING


def remove(strategy: SmpShardedStrategy, path: Any) -> None:
    """Remove a folder so that no half of it stays behind, or a file; once the pending save has committed. On rank 0."""

    def remove_now() -> None:
        if os.path.islink(path):
            Path(path).unlink()
        elif is_checkpoint(path):
            remove_checkpoint(path)
        else:
            strategy.checkpoint_io.remove_checkpoint(path)

    if strategy.background_saves is None:
        remove_now()
    else:
        strategy.background_saves.after_commit(f"removal of {path}", remove_now)

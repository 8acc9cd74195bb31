"""A checkpoint that a run begins with: opened before the module is sharded, read when
it is.

Lightning restores in this order, under this strategy as under DDP:

    load_checkpoint             opens and checks it; its dictionary has weights and states that are read when looked at
    on_load_checkpoint          the LightningModule's hook edits the dictionary
    load_model_state_dict       what it holds now are the weights to load
    callbacks, datamodule       take their states
    setup                       shards the module; then the weights are loaded, and optimizers are made
    load_optimizer_state_dict   their states, after on_fit_start; and where the data go on

Values that no hook has looked at are streamed, each rank its shards. Values that a hook
has looked at are unsharded, in host memory, and rank 0's edits count, as they do under
DDP.

``load_from_checkpoint`` of LightningModules and data modules reads folders too, by way
of a file.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_smp.background import in_lightning_words, is_held_place
from lightning_smp.checkpoint_sources import CheckpointFile, CheckpointFolder, Place
from lightning_smp.memory import PLACE, KeepsInMemory
from lightning_smp.processes import exception_checkpoints
from lightning_smp.resume import Resume, places_of_loaders
from lightning_smp.steps import SteppingStrategy
from smp_core.checkpoint import (
    CheckpointError,
    NoSuchFolder,
    OpenCheckpoint,
    Ranks,
    Unread,
    as_it_lies,
    consolidate,
    find_checkpoints,
    is_checkpoint,
    open_first_undamaged,
    resumed_random_state,
)
from smp_core.checkpoint.folders import is_address
from smp_core.checkpoint.foreign import check_torch_file, step_of_file
from smp_core.cluster import broadcast_from_rank_0
from smp_core.engine import ParallelModel, fill
from smp_core.sharding import load_full_state
from smp_core.torch_facts import clean_name

logger = logging.getLogger("smp")

FP8_STATE = "smp_fp8"
"""Key of the FP8 scales in the checkpoint dictionary: plain tensors by module name."""


class Loading:
    """A checkpoint between Lightning's calls. Its construction is collective.

    Args:
        weights_only: as of ``torch.load``; for a file.
        memory: the states in shared memory, where the knob is set.

    Attributes:
        content: the checkpoint dictionary for Lightning and its hooks.

    Raises:
        CheckpointError: the checkpoint is broken or missing, or it has no optimizer
            states and training is to go on.
    """

    def __init__(
        self,
        strategy: SteppingStrategy,
        path: Any,
        weights_only: bool | None,
        memory: KeepsInMemory | None,
    ) -> None:
        verify = strategy.config.checkpoint.verify
        # "last" may be damaged, or older than what memory has: the newest whole one is
        # looked for, and is checked by that. A path that a user wrote is taken as it
        # is.
        is_checked = _means_newest(strategy, path)
        if is_checked:
            path = _newest(strategy, path, verify, memory)
        # Whatever else memory has of a run before is removed: this run begins
        # elsewhere.
        if memory is not None:
            memory.begins_from(path)
        self.path = os.fspath(path)
        module = strategy.lightning_module
        assert module is not None
        # Both kinds answer the same questions from here on.
        self._source: CheckpointFolder | CheckpointFile
        if os.path.isfile(path):
            # torch.load does not compare its checksums.
            if verify != "sizes" and not is_checked and zipfile.is_zipfile(path):
                Ranks().on_first(
                    f"{path} was not loaded", lambda: check_torch_file(path)
                )
            self._source = CheckpointFile(
                path,
                strategy.checkpoint_io.load_checkpoint(path, weights_only=weights_only),
            )
        else:
            self._source = CheckpointFolder(path, verify, module)
        self.content = self._source.content
        # Weights alone can be evaluated, but are no run to go on with.
        if module.trainer.state.fn == TrainerFn.FITTING:
            _check_complete(self.content, self.path)
        # Unless averages were saved: averaging.py.
        self._given = as_it_lies(self.content["state_dict"])
        self._strict = True

    def take_model_state(self, state: Mapping[str, Any], strict: bool) -> None:
        """Remember the weights that are to be loaded, as the module's hook left
        them."""
        self._given, self._strict = as_it_lies(state), strict

    def load_weights(self, parallel: ParallelModel) -> None:
        """Load the weights into the sharded module, and the scales of FP8, which follow
        from the weights. Collective.

        Raises:
            CheckpointError: the weights do not fit.
        """
        # Each value is a tensor to be streamed into, or an unsharded one.
        parallel.reshard()
        given = _agreed(self._given, self._source.unread, parallel.mesh.device)
        live, module = parallel.model_state(), parallel.module
        # Names without what wrappers put in front (activation checkpointing, compile),
        # and how the module itself has them.
        own_names = {clean_name(name): name for name in module.state_dict()}
        shown: dict[str, Any] = {}
        streamed: dict[Place, Tensor] = {}
        # What fits is streamed, each rank its shards. What does not is read as a whole,
        # so that torch's own error names it.
        for key, value in given.items():
            target = live.get(clean_name(key))
            if isinstance(value, Unread):
                if isinstance(target, Tensor) and value.shape == tuple(target.shape):
                    streamed[value.name] = target
                    value = target
                else:
                    value = value.read()
            shown[own_names.get(clean_name(key), key)] = value
        with in_lightning_words():
            self._source.fill_weights(streamed)

        # The module takes the unsharded ones, with its own hooks.
        what = f"{self.path} does not fit the model"
        (missing, unexpected), _ = Ranks().together(
            what, lambda: self._load_full(module, shown, live)
        )
        # Without strict loading the differences are said, and training goes on.
        for where, names in (
            ("missing in it, kept", missing),
            ("in it only, not used", unexpected),
        ):
            if names:
                logger.warning("%s: %s: %s", self.path, where, ", ".join(names[:5]))
        parallel.take_model_state(live, by_module=False)
        parallel.reshard()
        self._load_fp8(parallel)

    def load_into(
        self, tensors: Mapping[str, Any], given: Mapping[str, Any], device: torch.device
    ) -> None:
        """Fill tensors like those of the model's state from a part of the dictionary.
        Collective."""
        streamed: dict[Place, Tensor] = {}
        for key, value in _agreed(
            as_it_lies(given), self._source.unread, device
        ).items():
            target = tensors.get(clean_name(key))
            if (
                isinstance(value, Unread)
                and isinstance(target, Tensor)
                and value.shape == tuple(target.shape)
            ):
                streamed[value.name] = target
            elif isinstance(target, Tensor):
                fill(target, value.read() if isinstance(value, Unread) else value)
        with in_lightning_words():
            self._source.fill_weights(streamed)

    def _load_full(
        self, module: nn.Module, shown: dict[str, Any], live: Mapping[str, Any]
    ) -> tuple[list[str], list[str]]:
        try:
            return load_full_state(module, shown, live, self._strict)
        except RuntimeError as error:  # torch's for names and shapes
            hint = (
                "; strict_loading=False on the LightningModule loads what fits by name"
                if self._strict
                else ""
            )
            raise CheckpointError(f"{error}{hint}") from error

    def _load_fp8(self, parallel: ParallelModel) -> None:
        fp8, saved = parallel.fp8, self.content.get(FP8_STATE)
        if fp8 is not None:
            fp8.load_state_dict(saved, self._source.name_there)
        elif saved is not None:
            logger.info(
                "%s has FP8 scales, which are not used: this run computes without FP8",
                self.path,
            )

    def load_training(
        self, strategy: SteppingStrategy, checkpoint: Mapping[str, Any]
    ) -> Resume:
        """Load the optimizer states of ``checkpoint``; return how the data are resumed.
        Collective.

        Raises:
            CheckpointError: the states do not fit the optimizers.
        """
        # States are matched with optimizers by their order.
        states = checkpoint["optimizer_states"]
        if len(states) != len(strategy.optimizers):
            raise CheckpointError(
                f"{self.path} holds states of {len(states)} optimizers, but configure_optimizers made "
                f"{len(strategy.optimizers)}; build it as it was, or load the weights alone"
            )
        for number, (optimizer, state) in enumerate(
            zip(strategy.optimizers, states, strict=True)
        ):
            self._source.load_optimizer(
                strategy.parallel.module, number, optimizer, state
            )
        self._source.load_remainders(strategy.parallel)

        # Random states, and the place in the data.
        parts = [
            part if isinstance(part, dict) else {} for part in self._source.per_rank()
        ]
        random = None
        rank = strategy.global_rank
        world = dist.get_world_size()
        # On as many ranks each has its own states back; on others they follow from the
        # seed, the step and the rank.
        if any("random" in part for part in parts):
            seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
            step = int(checkpoint["global_step"])
            saved = [part.get("random") for part in parts]
            random = resumed_random_state(
                saved, rank, world, seed, step, os.fspath(self.path)
            )
        # An epoch's order on other ranks is another one anyway.
        epoch_random = parts[rank].get("epoch_random") if len(parts) == world else None
        allow = strategy.config.checkpoint.allow_batch_change
        data_size = strategy.mesh.data_size
        in_window = "smp_window" in checkpoint
        loaders = places_of_loaders(checkpoint)
        of_ranks = [part.get("loaders", loaders) for part in parts]
        if len(parts) == world:
            loaders = of_ranks[rank]
        elif rank == 0 and len(set(map(repr, of_ranks))) > 1:
            logger.warning(
                "each of %d ranks saved a place of its own in the training data; here are %d, and all begin at "
                "rank 0's: some samples may be seen twice, others not at all",
                len(parts),
                world,
            )
        place, metrics = checkpoint.get("smp_data"), checkpoint.get("smp_metrics", {})
        return Resume(
            place, random, epoch_random, data_size, allow, in_window, loaders, metrics
        )


def _agreed(
    given: dict[str, Any], unread: Callable[[Place], Unread], device: torch.device
) -> dict[str, Any]:
    """Return rank 0's state dict on every rank: a hook may have drawn its values at
    random. Collective."""

    def described(value: Any) -> Any:
        if isinstance(value, Unread):
            return "unread", value.name
        if isinstance(value, Tensor):
            return "sharded" if isinstance(value, DTensor) else "whole", (
                value.shape,
                value.dtype,
            )
        return "value", value

    if dist.get_world_size() == 1:
        return given
    # Rank 0 says what there is; tensors that it has whole follow one by one.
    carried: list[Any] = [{key: described(value) for key, value in given.items()}]
    dist.broadcast_object_list(carried, src=0, device=device)
    agreed: dict[str, Any] = {}
    for key, (kind, about) in carried[0].items():
        if kind == "unread":
            agreed[key] = unread(about)
        elif kind == "whole":
            mine = (
                given[key].detach()
                if dist.get_rank() == 0
                else torch.empty(about[0], dtype=about[1])
            )
            broadcast_from_rank_0([mine], device)
            agreed[key] = mine
        else:
            agreed[key] = given[key] if kind == "sharded" else about
    return agreed


class NothingSaved(dict[str, Any]):
    """A checkpoint that counts as empty, so that Lightning restores nothing; it has the
    version that is asked for."""

    def __init__(self) -> None:
        super().__init__({"pytorch-lightning_version": str(lightning.__version__)})

    def __bool__(self) -> bool:
        return False


def nothing_saved(
    strategy: SteppingStrategy, path: Any, memory: KeepsInMemory | None
) -> bool:
    """Return whether ``ckpt_path="last"`` stands for the place of a first save that has
    not committed, and nothing is in memory either. Collective.

    A run that ends while it writes its first checkpoint behind training leaves the
    place that was held, and the link ``last.ckpt`` to it. Nothing is lost when the next
    run begins from nothing.
    """

    # Asked on the first rank alone: others may see an older state of a shared file
    # system.
    def held() -> bool:
        return (
            _means_newest(strategy, path)
            and (_is_place(path) or is_held_place(path))
            and not _others(path)
        )

    if not Ranks().on_first(f"{path} was not loaded", held) or (
        memory is not None and memory.tier.find() is not None
    ):
        return False
    if strategy.is_global_zero:
        logger.warning(
            "%s: no save has been completed there yet: the run begins anew", path
        )
    return True


def _is_place(path: Any) -> bool:
    return os.path.basename(path) == PLACE and not os.path.lexists(path)


def _means_newest(strategy: SteppingStrategy, path: Any) -> bool:
    """Return whether a path is the one that ``ckpt_path="last"`` stands for."""
    if _is_place(path):
        return True
    assert strategy.lightning_module is not None
    trainer = strategy.lightning_module.trainer
    # By the name that ModelCheckpoint gives its last one ("last", "last-v1",
    # "epoch=1-last"), in its own folder.
    folder, name = os.path.split(os.path.abspath(path))
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            parts = os.path.splitext(name)[0].split(callback.CHECKPOINT_JOIN_CHAR)
            if (
                os.path.abspath(callback.dirpath) == folder
                and callback.CHECKPOINT_NAME_LAST in parts
            ):
                return True
    return os.path.abspath(path) in map(os.path.abspath, exception_checkpoints(trainer))


def _newest(
    strategy: SteppingStrategy, path: Any, verify: str, memory: KeepsInMemory | None
) -> Any:
    """Return the newest unbroken one of the checkpoints beside ``path`` and the states
    in memory. Collective."""
    if memory is None:
        return _newest_undamaged(strategy, path, verify)
    return memory.newest(path, lambda: _newest_undamaged(strategy, path, verify))


def _newest_undamaged(
    strategy: SteppingStrategy, path: Any, verify: str
) -> OpenCheckpoint | str:
    """Return ``path`` or, where that is broken, the newest unbroken checkpoint in its
    folder, open. Collective."""
    assert strategy.lightning_module is not None
    at_exceptions = [
        os.path.abspath(each)
        for each in exception_checkpoints(strategy.lightning_module.trainer)
    ]

    def candidates() -> list[str]:
        others = _others(path)
        # Lightning takes the one of on_exception.ckpt, last.ckpt, last-v1.ckpt, ...
        # that clocks call the newest.
        named = [each for each in others if _is_last(each) or each in at_exceptions]
        lasts = [each for each in named if os.path.isfile(each) == os.path.isfile(path)]
        # Each checkpoint once, however many links lead to it; the first place of each
        # counts.
        found = dict.fromkeys(
            [*lasts, *([] if _is_place(path) else [str(path)]), *others]
        )
        return list(
            {os.path.realpath(each): each for each in reversed(found)}.values()
        )[::-1]

    ordered = Ranks().on_first(f"{path} was not loaded", candidates)
    return open_first_undamaged(ordered, verify)


def _others(path: Any) -> list[str]:
    """List the checkpoints in the folder of ``path``, itself included, the newest
    first; those of its kind first."""
    folder = os.path.dirname(os.path.abspath(path))
    names: list[str] = []
    with contextlib.suppress(NoSuchFolder):
        names = find_checkpoints(folder)
    folders = [os.path.join(folder, name) for name in reversed(names)]
    files = sorted(
        (str(file) for file in Path(folder).glob("*.ckpt") if file.is_file()),
        key=step_of_file,
    )
    return (
        [*files[::-1], *folders] if os.path.isfile(path) else [*folders, *files[::-1]]
    )


def _is_last(path: str) -> bool:
    name = os.path.splitext(os.path.basename(path))[0]
    return ModelCheckpoint.CHECKPOINT_NAME_LAST in name.split(
        ModelCheckpoint.CHECKPOINT_JOIN_CHAR
    )


def _check_complete(checkpoint: dict[str, Any], path: Any) -> None:
    if "optimizer_states" not in checkpoint:
        raise CheckpointError(
            f"{path} holds weights only (save_weights_only=True): no training to go on with. To begin a new one from "
            "them, leave ckpt_path out and use YourModule.load_from_checkpoint on an ordinary .ckpt; `smp checkpoint "
            f"consolidate {path} weights.ckpt` makes one of a folder"
        )


class LoadFromCheckpoint:
    """A replacement of Lightning's classmethod ``load_from_checkpoint``, which reads
    one file; it makes such a file of a folder.

    Args:
        stock: Lightning's own, as it stands in the class.
    """

    def __init__(self, stock: Any) -> None:
        self.stock = stock

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        load = self.stock.__get__(instance, owner)

        @functools.wraps(load)
        def load_from_checkpoint(
            checkpoint_path: Any, *args: Any, **kwargs: Any
        ) -> Any:
            with _as_file(checkpoint_path) as file:
                return load(file, *args, **kwargs)

        return load_from_checkpoint


def read_folders(kind: type) -> None:
    """Let ``kind.load_from_checkpoint`` and its subclasses' read folders."""
    stock = vars(kind)["load_from_checkpoint"]
    if not isinstance(stock, LoadFromCheckpoint):
        kind.load_from_checkpoint = LoadFromCheckpoint(stock)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _as_file(path: Any) -> Iterator[Any]:
    # Lightning reads files at web addresses by itself.
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    stored = is_address(text) and not text.startswith("http") and is_checkpoint(text)
    if not os.path.isdir(text) and not stored:
        yield path
        return
    # One file of all weights, which has to fit beside the folder on the disk of
    # temporary files.
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "whole.ckpt")
        consolidate(text, file)
        yield file

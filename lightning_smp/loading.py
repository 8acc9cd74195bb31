"""A checkpoint that a run begins with: opened before the module is sharded, read when it is.

Lightning restores in this order, under this strategy as under DDP:

    load_checkpoint             opens and checks it; its dictionary has weights and states that are read when looked at
    on_load_checkpoint          the LightningModule's hook edits the dictionary
    load_model_state_dict       what it holds now are the weights to load
    callbacks, datamodule       take their states
    setup                       shards the module; then the weights are loaded, and optimizers are made
    load_optimizer_state_dict   their states, after on_fit_start; and where the data go on

What a hook has not looked at is streamed, each rank its shards. What it has looked at is whole, in host memory, and
rank 0's edits count, as they do under DDP.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_smp.background import in_lightning_words
from lightning_smp.resume import Resume
from smp_core.averaging import fill
from smp_core.checkpoint import (
    CheckpointError,
    find_checkpoints,
    first_whole,
    load_checkpoint,
    read_per_rank,
    read_rest,
)
from smp_core.checkpoint.lazy_state import LazyState, Unread, as_it_lies
from smp_core.checkpoint.optimizers import (
    copy_into,
    load_named_optimizer_state,
    load_whole_optimizer_state,
    names_between,
    parameter_names,
    stepped_parameters,
)
from smp_core.checkpoint.random_state import resumed_random_state
from smp_core.checkpoint.ranks import Ranks
from smp_core.checkpoint.reader import TensorFiles
from smp_core.checkpoint.verify import open_checked
from smp_core.comm.remainder_state import KEY as REMAINDERS
from smp_core.comm.remainder_state import load_remainder_state
from smp_core.module_names import clean_name
from smp_core.parallel_model import ParallelModel
from smp_core.sharding.own_parts import load_whole_state
from smp_core.sharding.rank_0 import broadcast_from_rank_0

if TYPE_CHECKING:
    from lightning_smp.strategy import SmpShardedStrategy

logger = logging.getLogger("smp")

PER_RANK = "smp_per_rank"
"""In a file: what a folder has as each rank's own part."""
CURRENT_MODEL = "current_model_state"
"""Key of the trained weights where ``state_dict`` is an average of them (lightning_smp/averaging.py)."""
FINER_AVERAGE = "smp_average"
"""Key of the average where it is kept in a finer dtype than the weights."""
MODELS = ("state_dict", CURRENT_MODEL, FINER_AVERAGE)
_OF_SWA = ("average_model_state",)
_NOT_READ = (*(f"{key}.*" for key in MODELS), f"callbacks.*.{_OF_SWA[0]}.*", "optimizer_states.*.state.*")
Place = tuple[Any, ...]
FP8_STATE = "smp_fp8"
"""Key of the FP8 scales in the checkpoint dictionary: plain tensors by module name."""


class Loading:
    """A checkpoint between Lightning's calls. Making one is collective.

    Args:
        weights_only: as of ``torch.load``; for a file.

    Attributes:
        content: the checkpoint dictionary for Lightning and its hooks.

    Raises:
        CheckpointError: it is broken or none; or it has no optimizer states and training is to go on.
    """

    def __init__(self, strategy: SmpShardedStrategy, path: Any, weights_only: bool | None) -> None:
        verify = strategy.config.verify_checkpoint
        if _means_newest(strategy, path):
            path, verify = _newest_whole(path, verify), "sizes"
        self.path = path
        module = strategy.lightning_module
        assert module is not None
        self._source: _Folder | _File
        if os.path.isfile(path):
            self._source = _File(path, strategy.checkpoint_io.load_checkpoint(path, weights_only=weights_only))
        else:
            self._source = _Folder(path, verify, module)
        self.content = self._source.content
        if module.trainer.state.fn == TrainerFn.FITTING:
            _check_complete(self.content, path)
        self._given = as_it_lies(self.content["state_dict"])  # unless averages were saved: averaging.py
        self._strict = True

    def take_model_state(self, state: Mapping[str, Any], strict: bool) -> None:
        """Remember the weights that are to be loaded, as the module's hook left them."""
        self._given, self._strict = as_it_lies(state), strict

    def load_weights(self, parallel: ParallelModel) -> None:
        """Into the sharded module; and the scales of FP8, which go by what the weights are. Collective.

        Raises:
            CheckpointError: they do not fit.
        """
        parallel.reshard()
        given = _agreed(self._given, self._source.unread, parallel.mesh.device)
        live, module = parallel.model_state(), parallel.module
        own_names = {clean_name(name): name for name in module.state_dict()}
        shown: dict[str, Any] = {}
        streamed: dict[Place, torch.Tensor] = {}
        for key, value in given.items():
            target = live.get(clean_name(key))
            if isinstance(value, Unread):
                if isinstance(target, torch.Tensor) and value.shape == tuple(target.shape):
                    streamed[value.name] = target
                    value = target
                else:
                    value = value.read()
            shown[own_names.get(clean_name(key), key)] = value
        with in_lightning_words():
            self._source.fill_weights(streamed)
        what = f"{self.path} does not fit the model"
        (missing, unexpected), _ = Ranks().together(what, lambda: self._load_whole(module, shown, live))
        for where, names in (("missing in it, kept", missing), ("in it only, not used", unexpected)):
            if names:
                logger.warning("%s: %s: %s", self.path, where, ", ".join(names[:5]))
        parallel.take_model_state(live)
        parallel.reshard()
        self._load_fp8(parallel)

    def load_into(self, tensors: Mapping[str, Any], given: Mapping[str, Any], device: torch.device) -> None:
        """Fill tensors like those of the model's state from a part of the dictionary. Collective."""
        streamed: dict[Place, torch.Tensor] = {}
        for key, value in _agreed(as_it_lies(given), self._source.unread, device).items():
            target = tensors.get(clean_name(key))
            if isinstance(value, Unread) and isinstance(target, torch.Tensor) and value.shape == tuple(target.shape):
                streamed[value.name] = target
            elif isinstance(target, torch.Tensor):
                fill(target, value.read() if isinstance(value, Unread) else value)
        with in_lightning_words():
            self._source.fill_weights(streamed)

    def _load_whole(
        self, module: nn.Module, shown: dict[str, Any], live: Mapping[str, Any]
    ) -> tuple[list[str], list[str]]:
        try:
            return load_whole_state(module, shown, live, self._strict)
        except RuntimeError as error:  # torch's for names and shapes
            hint = "; strict_loading=False on the LightningModule loads what fits by name" if self._strict else ""
            raise CheckpointError(f"{error}{hint}") from error

    def _load_fp8(self, parallel: ParallelModel) -> None:
        fp8, saved = parallel.fp8, self.content.get(FP8_STATE)
        if fp8 is not None:
            fp8.load_state_dict(saved, self._source.name_there)
        elif saved is not None:
            logger.info("%s has FP8 scales, which are not used: this run computes without FP8", self.path)

    def load_training(self, strategy: SmpShardedStrategy, checkpoint: Mapping[str, Any]) -> None:
        """Optimizer states of ``checkpoint``; and remember what is settled when the data loaders are known. Collective.

        Raises:
            CheckpointError: they do not fit the optimizers.
        """
        states = checkpoint["optimizer_states"]
        if len(states) != len(strategy.optimizers):
            raise CheckpointError(
                f"{self.path} holds states of {len(states)} optimizers, but configure_optimizers made "
                f"{len(strategy.optimizers)}; build it as it was, or load the weights alone"
            )
        for number, (optimizer, state) in enumerate(zip(strategy.optimizers, states, strict=True)):
            self._source.load_optimizer(strategy.parallel.module, number, optimizer, state)
        self._source.load_remainders(strategy.parallel)
        parts = [part if isinstance(part, dict) else {} for part in self._source.per_rank()]
        random, rank, world = None, strategy.global_rank, strategy.world_size
        if any("random" in part for part in parts):
            seed, step = int(os.environ.get("PL_GLOBAL_SEED", "0")), int(checkpoint["global_step"])
            saved = [part.get("random") for part in parts]
            random = resumed_random_state(saved, rank, world, seed, step, os.fspath(self.path))
        epoch_random = parts[rank].get("epoch_random") if len(parts) == world else None
        allow, data_size = strategy.config.allow_batch_change, strategy.mesh.data_size
        strategy.resume = Resume(checkpoint.get("smp_data"), random, epoch_random, data_size, allow)


class _Folder:
    """A sharded checkpoint."""

    def __init__(self, path: Any, verify: str, module: nn.Module) -> None:
        self._path = path
        self._opened = open_checked(path, verify, Ranks(), f"checkpoint {os.fspath(path)} was not loaded")
        self._places = self._opened.index.by_path()
        content = read_rest(path, tensors=["*"], exclude=[*_NOT_READ, f"{REMAINDERS}.*"])
        # A folder saved without a LightningModule around the model, by accelerate_smp, has names without its prefix.
        facts = self._opened.manifest.metadata
        prefix_there = facts.get("module_prefix", "")
        prefix_here = prefix_there if facts.get("trainer") == "lightning" else main_module(module)[0]
        self.name_there = names_between(prefix_here, prefix_there)
        name_here = names_between(prefix_there, prefix_here)
        if "loops" not in content:
            content.setdefault("pytorch-lightning_version", lightning.__version__)
            content.setdefault("global_step", 0)
            logger.warning("%s was not saved by Lightning: weights and optimizers go on, loops start anew", path)
        for key in MODELS:
            stored = {**dict.fromkeys(self._children(key)), **content.get(key, {})}
            if stored:
                content[key] = LazyState({name_here(name): self.unread((key, name)) for name in stored})
        for place in dict.fromkeys(
            path[:3] for path in self._places if path[0] == "callbacks" and path[2:3] == _OF_SWA
        ):
            names = self._children(*place)
            lazy = LazyState({name_here(name): self.unread((*place, name)) for name in names})
            content["callbacks"][place[1]][place[2]] = lazy
        for number, state in enumerate(content.get("optimizer_states", [])):
            self._make_lazy(number, state)
        self.content: dict[str, Any] = content

    def _children(self, *place: Any) -> list[str]:
        """Names under ``place`` below which there are tensors."""
        depth = len(place)
        return list(dict.fromkeys(path[depth] for path in self._places if path[:depth] == place))

    def _make_lazy(self, number: int, state: dict[str, Any]) -> None:
        def unread(name: str) -> Unread:
            place = ("optimizer_states", number, "state", name)
            return Unread(name, lambda: read_rest(self._path, place, tensors=["*"]))

        names = {**state.get("state", {}), **dict.fromkeys(self._children("optimizer_states", number, "state"))}
        state["state"] = LazyState({name: unread(name) for name in names})

    def unread(self, place: Place) -> Unread:
        """A value by its place in the folder."""
        stored = self._places.get(place)
        if stored is None:
            return Unread(place, lambda: read_rest(self._path, place, tensors=["*"]))

        def read() -> torch.Tensor:
            with TensorFiles(self._opened) as files:
                return files.whole(stored)

        return Unread(place, read, self._opened.index.record(stored).shape)

    def fill_weights(self, targets: dict[Place, torch.Tensor]) -> None:
        stored = {place: self._places[place] for place in targets}
        _say_what_is_cast(
            self._path, targets, {place: self._opened.index.record(there).dtype for place, there in stored.items()}
        )
        template: dict[str, Any] = {}
        for place, target in targets.items():
            inner = template
            for key in place[:-1]:
                inner = inner.setdefault(key, {})
            inner[place[-1]] = target
        load_checkpoint(self._path, template, only=stored.values(), verify="sizes", allow_dtype_cast=True)

    def load_optimizer(
        self, module: nn.Module, number: int, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        if all(isinstance(name, int) for group in state["param_groups"] for name in group["params"]):
            load_whole_optimizer_state(optimizer, state)  # a hook has put another one in its place
            return
        where = ("optimizer_states", number)
        saved = [name for group in state["param_groups"] for name in group["params"]]
        name_there = self._also_renamed(parameter_names(module, optimizer), stepped_parameters(optimizer), saved)
        load_named_optimizer_state(self._path, where, module, optimizer, name_there, verify="sizes", given=state)

    def _also_renamed(self, names: list[str], parameters: list[torch.Tensor], saved: list[str]) -> Callable[[str], str]:
        """How an optimizer's parameters are called in the folder. Where some have other names now, which a hook has
        translated for the weights, the ones without a partner belong together in their order, as in one process."""
        there = [self.name_there(name) for name in names]
        mine = [(name, p) for name, at, p in zip(names, there, parameters, strict=True) if at not in set(saved)]
        theirs = [name for name in saved if name not in set(there)]
        shapes = [tuple(parameter.shape) for _, parameter in mine]
        if not mine or shapes != [self.unread(("state_dict", name)).shape for name in theirs]:
            return self.name_there  # or they do not fit, which is an error there
        partners = {name: old for (name, _), old in zip(mine, theirs, strict=True)}
        pairs = [f"{old} -> {name}" for name, old in partners.items()]
        logger.warning("%s: optimizer states of renamed parameters: %s", self._path, ", ".join(pairs[:5]))
        return lambda name: partners.get(name) or self.name_there(name)

    def load_remainders(self, parallel: ParallelModel) -> None:
        load_remainder_state(parallel.traffic, self._path)

    def per_rank(self) -> list[Any]:
        return read_per_rank(self._path)


class _File:
    """One ordinary ``.ckpt``, in host memory as a whole."""

    name_there: Callable[[str], str] = staticmethod(str)

    def __init__(self, path: Any, content: dict[str, Any]) -> None:
        if "state_dict" not in content:
            raise CheckpointError(
                f"{path} is no Lightning checkpoint: it has no 'state_dict' but {sorted(content)[:8]}"
            )
        self._path = path
        self._values = {(key, name): value for key in MODELS for name, value in content.get(key, {}).items()}
        self.content = dict(content)
        for key in MODELS:
            if key in content:
                self.content[key] = LazyState({name: self.unread((key, name)) for name in content[key]})

    def unread(self, place: Place) -> Unread:
        value = self._values[place]
        return Unread(place, lambda: value, tuple(value.shape) if isinstance(value, torch.Tensor) else None)

    def fill_weights(self, targets: dict[Place, torch.Tensor]) -> None:
        _say_what_is_cast(self._path, targets, {place: self._values[place].dtype for place in targets})
        for place, target in targets.items():
            copy_into(target, self._values[place])

    def load_optimizer(
        self, module: nn.Module, number: int, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        load_whole_optimizer_state(optimizer, state)

    def load_remainders(self, parallel: ParallelModel) -> None:
        """A file has none."""

    def per_rank(self) -> list[Any]:
        return list(self.content.get(PER_RANK, []))


def _agreed(given: dict[str, Any], unread: Callable[[Place], Unread], device: torch.device) -> dict[str, Any]:
    """Rank 0's state dict on every rank: what a hook has made may have been drawn at random. Collective."""

    def described(value: Any) -> Any:
        if isinstance(value, Unread):
            return "unread", value.name
        if isinstance(value, torch.Tensor):
            return "sharded" if isinstance(value, DTensor) else "whole", (value.shape, value.dtype)
        return "value", value

    if dist.get_world_size() == 1:
        return given
    carried: list[Any] = [{key: described(value) for key, value in given.items()}]
    dist.broadcast_object_list(carried, src=0, device=device)
    agreed: dict[str, Any] = {}
    for key, (kind, about) in carried[0].items():
        if kind == "unread":
            agreed[key] = unread(about)
        elif kind == "whole":
            mine = given[key].detach() if dist.get_rank() == 0 else torch.empty(about[0], dtype=about[1])
            broadcast_from_rank_0([mine], device)
            agreed[key] = mine
        else:
            agreed[key] = given[key] if kind == "sharded" else about
    return agreed


def _say_what_is_cast(path: Any, targets: Mapping[Place, torch.Tensor], saved: Mapping[Place, torch.dtype]) -> None:
    cast = [name for name, target in targets.items() if target.dtype != saved[name]]
    if cast:
        change = f"{saved[cast[0]]} to {targets[cast[0]].dtype}"
        logger.warning("%s: %d tensors are cast, e.g. %s from %s", path, len(cast), cast[0][-1], change)


def main_module(module: nn.Module) -> tuple[str, nn.Module]:
    """The one child that holds all parameters, with its name and a dot, or the module itself and ""."""
    children = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
    if len(children) == 1 and not any(True for _ in module.parameters(recurse=False)):
        return f"{children[0][0]}.", children[0][1]
    return "", module


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

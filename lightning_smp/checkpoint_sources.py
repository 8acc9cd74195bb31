"""The two sources of a checkpoint that a run begins with: a sharded folder, or one
ordinary ``.ckpt`` file.

Both have the same methods. Values are read when a hook looks at them
(:mod:`smp_core.checkpoint.lazy_state`): from a folder, each rank streams its shards of
all others; a file is in host memory as a whole.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_core.checkpoint import (
    CheckpointError,
    LazyState,
    Ranks,
    TensorFiles,
    Unread,
    copy_into,
    load_checkpoint,
    load_full_optimizer_state,
    load_named_optimizer_state,
    names_between,
    open_checked,
    parameter_names,
    read_per_rank,
    read_rest,
    stepped_parameters,
)
from smp_core.comm import KEY as REMAINDERS, load_remainder_state
from smp_core.engine import ParallelModel

logger = logging.getLogger("smp")

PER_RANK = "smp_per_rank"
"""Key, in a file, of the values that a folder keeps for each rank."""
CURRENT_MODEL = "current_model_state"
"""Key of the trained weights where ``state_dict`` is an average of them
(lightning_smp/averaging.py)."""
FINER_AVERAGE = "smp_average"
"""Key of the average where it is kept in a finer dtype than the weights."""
MODELS = ("state_dict", CURRENT_MODEL, FINER_AVERAGE)
_OF_SWA = ("average_model_state",)
_NOT_READ = (
    *(f"{key}.*" for key in MODELS),
    f"callbacks.*.{_OF_SWA[0]}.*",
    "optimizer_states.*.state.*",
)
Place = tuple[Any, ...]


class CheckpointFolder:
    """A sharded checkpoint."""

    def __init__(self, path: Any, verify: str, module: nn.Module) -> None:
        self._path = os.fspath(path)
        # All files are checked once, together on all ranks, and stay open for later
        # reads.
        self._opened = open_checked(
            path, verify, Ranks(), f"checkpoint {os.fspath(path)} was not loaded"
        )
        self._places = self._opened.index.by_path()
        # All tensors but those that are read when a hook looks at them.
        content = read_rest(
            self._opened, tensors=["*"], exclude=[*_NOT_READ, f"{REMAINDERS}.*"]
        )

        # Names. A folder saved by accelerate_smp, without a LightningModule around the
        # model, has no prefix.
        facts = self._opened.manifest.metadata
        prefix_there = facts.get("module_prefix", "")
        prefix_here = (
            prefix_there
            if facts.get("trainer") == "lightning"
            else main_module(module)[0]
        )
        self.name_there = names_between(prefix_here, prefix_there)
        name_here = names_between(prefix_there, prefix_here)
        # Lightning asks for its version and counters before any hook.
        if "loops" not in content:
            content.setdefault("pytorch-lightning_version", lightning.__version__)
            content.setdefault("global_step", 0)
            logger.warning(
                "%s was not saved by Lightning: weights and optimizers go on, loops start anew",
                self._path,
            )

        # Weights, averages of weights and optimizer states, which are read when a hook
        # looks at them.
        for key in MODELS:
            stored = {**dict.fromkeys(self._children(key)), **content.get(key, {})}
            if stored:
                content[key] = LazyState(
                    {name_here(name): self.unread((key, name)) for name in stored}
                )
        averages = [
            path[:3]
            for path in self._places
            if path[0] == "callbacks" and path[2:3] == _OF_SWA
        ]
        for place in dict.fromkeys(averages):
            names = self._children(*place)
            lazy = LazyState(
                {name_here(name): self.unread((*place, name)) for name in names}
            )
            content["callbacks"][place[1]][place[2]] = lazy
        for number, state in enumerate(content.get("optimizer_states", [])):
            self._make_lazy(number, state)
        self.content: dict[str, Any] = content

    def _children(self, *place: Any) -> list[str]:
        """List the names under ``place`` below which there are tensors."""
        # Places are paths in the checkpoint's nest; of each the key at this depth.
        depth = len(place)
        return list(
            dict.fromkeys(path[depth] for path in self._places if path[:depth] == place)
        )

    def _make_lazy(self, number: int, state: dict[str, Any]) -> None:
        def unread(name: str) -> Unread:
            place = ("optimizer_states", number, "state", name)
            return Unread(name, lambda: read_rest(self._opened, place, tensors=["*"]))

        # Some states have values that are no tensors, which the folder's rest has.
        names = {
            **state.get("state", {}),
            **dict.fromkeys(self._children("optimizer_states", number, "state")),
        }
        state["state"] = LazyState({name: unread(name) for name in names})

    def unread(self, place: Place) -> Unread:
        """Return an unread value by its place in the folder."""
        # A value that is no tensor, or of no known shape, is read from the rest.
        stored = self._places.get(place)
        if stored is None:
            return Unread(place, lambda: read_rest(self._opened, place, tensors=["*"]))

        def read() -> Tensor:
            with TensorFiles(self._opened) as files:
                return files.unsharded(stored)

        return Unread(place, read, self._opened.index.record(stored).shape)

    def fill_weights(self, targets: dict[Place, Tensor]) -> None:
        stored = {place: self._places[place] for place in targets}
        dtypes = {
            place: self._opened.index.record(there).dtype
            for place, there in stored.items()
        }
        _warn_of_casts(self._path, targets, dtypes)
        # The reader takes a nest of tensors, as the checkpoint's own is.
        template: dict[str, Any] = {}
        for place, target in targets.items():
            inner = template
            for key in place[:-1]:
                inner = inner.setdefault(key, {})
            inner[place[-1]] = target
        load_checkpoint(
            self._opened,
            template,
            only=stored.values(),
            verify="sizes",
            allow_dtype_cast=True,
        )

    def load_optimizer(
        self,
        module: nn.Module,
        number: int,
        optimizer: Optimizer,
        state: Mapping[str, Any],
    ) -> None:
        if all(
            isinstance(name, int)
            for group in state["param_groups"]
            for name in group["params"]
        ):
            # A hook has put another one in its place.
            load_full_optimizer_state(optimizer, state)
            return
        # By name: shards are streamed to where the parameters of the same names are.
        where = ("optimizer_states", number)
        saved = [name for group in state["param_groups"] for name in group["params"]]
        names = parameter_names(module, optimizer)
        name_there = self._also_renamed(names, stepped_parameters(optimizer), saved)
        load_named_optimizer_state(
            self._opened,
            where,
            module,
            optimizer,
            name_there,
            verify="sizes",
            given=state,
        )

    def _also_renamed(
        self, names: list[str], parameters: list[Tensor], saved: list[str]
    ) -> Callable[[str], str]:
        """Return the translation of an optimizer's parameter names to those in the
        folder.

        Some parameters may have other names in the folder, which a hook has translated
        for the weights. The parameters without a partner, here and there, are then
        paired in their order, as in one process.
        """
        # Pairs only where shapes agree, one by one: otherwise the loader's own error
        # says what is missing.
        there = [self.name_there(name) for name in names]
        mine = [
            (name, p)
            for name, at, p in zip(names, there, parameters, strict=True)
            if at not in set(saved)
        ]
        theirs = [name for name in saved if name not in set(there)]
        shapes = [tuple(parameter.shape) for _, parameter in mine]
        if not mine or shapes != [
            self.unread(("state_dict", name)).shape for name in theirs
        ]:
            return self.name_there  # or they do not fit, which is an error there
        partners = {name: old for (name, _), old in zip(mine, theirs, strict=True)}
        pairs = [f"{old} -> {name}" for name, old in partners.items()]
        logger.warning(
            "%s: optimizer states of renamed parameters: %s",
            self._path,
            ", ".join(pairs[:5]),
        )
        return lambda name: partners.get(name) or self.name_there(name)

    def load_remainders(self, parallel: ParallelModel) -> None:
        load_remainder_state(parallel.traffic, self._opened)

    def per_rank(self) -> list[Any]:
        return read_per_rank(self._opened)


class CheckpointFile:
    """An ordinary ``.ckpt`` file, all of it in host memory."""

    name_there: Callable[[str], str] = staticmethod(str)

    def __init__(self, path: Any, content: dict[str, Any]) -> None:
        # torch.load reads any pickle.
        if "state_dict" not in content:
            raise CheckpointError(
                f"{path} is no Lightning checkpoint: it has no 'state_dict' but {sorted(content)[:8]}"
            )
        self._path = path
        # The file is in memory already: values are handed out when they are asked for.
        self._values = {
            (key, name): value
            for key in MODELS
            for name, value in content.get(key, {}).items()
        }
        self.content = dict(content)
        for key in MODELS:
            if key in content:
                self.content[key] = LazyState(
                    {name: self.unread((key, name)) for name in content[key]}
                )

    def unread(self, place: Place) -> Unread:
        value = self._values[place]
        return Unread(
            place,
            lambda: value,
            tuple(value.shape) if isinstance(value, Tensor) else None,
        )

    def fill_weights(self, targets: dict[Place, Tensor]) -> None:
        _warn_of_casts(
            self._path, targets, {place: self._values[place].dtype for place in targets}
        )
        for place, target in targets.items():
            copy_into(target, self._values[place])

    def load_optimizer(
        self,
        module: nn.Module,
        number: int,
        optimizer: Optimizer,
        state: Mapping[str, Any],
    ) -> None:
        load_full_optimizer_state(optimizer, state)

    def load_remainders(self, parallel: ParallelModel) -> None:
        """Load nothing: a file has no remainders."""

    def per_rank(self) -> list[Any]:
        return list(self.content.get(PER_RANK, []))


def _warn_of_casts(
    path: Any, targets: Mapping[Place, Tensor], saved: Mapping[Place, torch.dtype]
) -> None:
    cast = [name for name, target in targets.items() if target.dtype != saved[name]]
    if cast:
        change = f"{saved[cast[0]]} to {targets[cast[0]].dtype}"
        logger.warning(
            "%s: %d tensors are cast, e.g. %s from %s",
            path,
            len(cast),
            cast[0][-1],
            change,
        )


def main_module(module: nn.Module) -> tuple[str, nn.Module]:
    """Return the one child that holds all parameters, with its name and a dot, or the
    module itself and ""."""
    # What a LightningModule is around: accelerate_smp saves the model without such a
    # prefix.
    children = [
        (name, child)
        for name, child in module.named_children()
        if next(child.parameters(), None) is not None
    ]
    if len(children) == 1 and next(module.parameters(recurse=False), None) is None:
        return f"{children[0][0]}.", children[0][1]
    return "", module

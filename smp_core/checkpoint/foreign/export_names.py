"""The names under which a checkpoint's tensors are exported: those of the model, and
those of optimizer states."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smp_core.checkpoint.layout import CheckpointError, optimizer_part
from smp_core.checkpoint.opening import OpenCheckpoint
from smp_core.checkpoint.tree import path_text, subtree

logger = logging.getLogger("smp")

MODEL_KEYS = ("state_dict", "model", "module")


@dataclass(frozen=True)
class ExportNames:
    """The names for an export.

    Attributes:
        model: name outside -> name in the checkpoint, in saved order; tied tensors
            under their first name only.
        ties: dropped name outside -> the name outside that is kept.
        optimizer: name in the checkpoint of every optimizer state tensor.
        optimizer_keys: top-level keys of the state that hold optimizers.
        model_key: top-level key of the model, None when the model's tensors are at the
            top.
    """

    model: dict[str, str]
    ties: dict[str, str]
    optimizer: list[str]
    optimizer_keys: list[str]
    model_key: str | None


def export_names(
    opened: OpenCheckpoint, strip_prefix: str | None = None
) -> ExportNames:
    """Sort the tensors of a checkpoint into model and optimizer states.

    The model is at ``metadata["model_key"]``, else at ``state_dict``, ``model`` or
    ``module``, else it is every tensor outside of optimizer states.

    Args:
        opened: the checkpoint.
        strip_prefix: taken off the front of names; None: ``metadata["module_prefix"]``,
            or nothing.

    Raises:
        CheckpointError: no tensor belongs to the model, the prefix fits none, or two
            names become the same.
    """
    index, metadata = opened.index, opened.manifest.metadata
    paths = {name: path for path, name in index.by_path().items()}
    optimizer = [name for name, path in paths.items() if optimizer_part(path)]
    # An optimizer without tensors (SGD) is found by its key.
    optimizer_keys = list(
        dict.fromkeys(str(paths[name][0]) for name in optimizer)
    ) or _optimizer_like(opened)
    # Under which key the model is.
    top = {path[0] for path in paths.values()}
    wished = metadata.get("model_key")
    keys = MODEL_KEYS if wished is None else [wished]
    key = next((each for each in keys if each in top), None)
    if wished is not None and key is None:
        raise CheckpointError(
            f"{opened.address} has no tensors under its model_key {wished!r}"
        )
    # All tensors under it, by their names inside the model.
    states = set(optimizer)
    chosen = {}
    for name, path in paths.items():
        if name in states:
            continue
        if key is not None and path[0] != key:
            continue
        text = path_text(path if key is None else path[1:])
        # Keys "a.b" and "a", "b", or 1 and "1": an export has one name for both.
        if text in chosen:
            raise CheckpointError(
                f"{opened.address} has two tensors that would both be called {text!r} in an export; rename one of "
                "their keys"
            )
        chosen[text] = name
    if not chosen:
        raise CheckpointError(
            f"{opened.address} holds no model tensors; its top-level keys are {sorted(map(str, top))}"
        )
    # Without a wish, a prefix that fits nothing is no error: some names may have none.
    prefix = metadata.get("module_prefix", "") if strip_prefix is None else strip_prefix
    outside = _without_prefix(chosen, prefix, must_fit=strip_prefix is not None)
    # Tied names: the first that the file keeps, the others refer to it.
    kept = {name: text for text, name in outside.items() if name not in index.aliases}
    ties = {
        text: kept[index.aliases[name]]
        for text, name in outside.items()
        if index.aliases.get(name) in kept
    }
    model = {text: name for text, name in outside.items() if text not in ties}
    return ExportNames(model, ties, optimizer, optimizer_keys, key)


def _optimizer_like(opened: OpenCheckpoint) -> list[str]:
    top: Mapping[str, Any] = subtree(opened.tree, ("state",))
    return [key for key in ("optimizer_states", "optimizer") if key in top]


def _without_prefix(
    names: dict[str, str], prefix: str, must_fit: bool
) -> dict[str, str]:
    if not prefix:
        return names
    # Tensors of another module alongside the model keep their names.
    fitting = [text for text in names if text.startswith(prefix)]
    if must_fit and not fitting:
        raise CheckpointError(
            f"strip_prefix={prefix!r} fits no tensor; names are e.g. {', '.join(list(names)[:3])}"
        )
    if len(fitting) < len(names):
        others = [text for text in names if not text.startswith(prefix)]
        logger.warning(
            "%d tensors do not begin with %r and keep their names: %s",
            len(others),
            prefix,
            others[:5],
        )
    stripped: dict[str, str] = {}
    for text, name in names.items():
        short = text.removeprefix(prefix)
        if short in stripped:
            raise CheckpointError(
                f"without {prefix!r} two tensors would be called {short!r}; use strip_prefix=''"
            )
        stripped[short] = name
    return stripped

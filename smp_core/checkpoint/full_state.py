"""The full state dict of a checkpoint folder (`consolidate`).

Every format streams, with one tensor in memory at a time: safetensors
(safetensors_export.py), `.ckpt` and `.pt` files (torch_file.py). The full state dict of
live ranks: live_state.py.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from smp_core.checkpoint.dtypes import dtype_from_name, dtype_name
from smp_core.checkpoint.folders.addresses import is_address, local_path
from smp_core.checkpoint.folders.file_system import (
    fsync_directory,
    new_save_id,
    rename_exchange,
    rename_new,
)
from smp_core.checkpoint.folders.leftovers import scratch_path
from smp_core.checkpoint.foreign.export_names import export_names
from smp_core.checkpoint.foreign.safetensors_export import (
    ExportOptions,
    Progress,
    parse_size,
    write_safetensors_folder,
)
from smp_core.checkpoint.foreign.torch_file import stream_torch_save
from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.opening import (
    OpenCheckpoint,
    foreign_kind,
    is_checkpoint,
    open_checkpoint,
)
from smp_core.checkpoint.optimizers import numbered
from smp_core.checkpoint.reader import decode_state
from smp_core.checkpoint.save_plan import LazyTensor
from smp_core.checkpoint.tensor_files import TensorFiles
from smp_core.checkpoint.tree import iterate_tensors
from smp_core.checkpoint.untrusted import only_checkpoint_errors
from smp_core.checkpoint.verify import check_files
from smp_core.outside import StrPath, long_wait

# Lightning restores optimizers and schedulers only together; without them the file is
# weights only.
_TRAINING_KEYS = ("optimizer_states", "optimizer", "lr_schedulers")


def consolidate(
    path: StrPath,
    out: StrPath,
    *,
    dtype: str | torch.dtype | None = None,
    output_format: str = "auto",
    optimizer: bool = False,
    workers: int = 1,
    max_shard_size: int | str = "5GB",
    strip_prefix: str | None = None,
    verify: str | None = "digests",
    overwrite: bool = False,
    allow_pickle: bool = False,
    progress: Progress | None = None,
) -> list[str]:
    """Write a sharded checkpoint as unsharded tensors.

    Args:
        path: checkpoint folder or address.
        out: the folder (safetensors) or file (``.ckpt``, ``.pt``) to make.
        dtype: cast floating-point model tensors to this floating-point dtype, e.g.
            ``"bf16"``; None keeps each tensor's own.
        output_format: ``"safetensors"``: ``model*.safetensors`` with index, as
            Transformers reads it, and the files stored along (``config.json``, ...);
            ``"ckpt"``: an ordinary Lightning checkpoint; ``"pt"``: a plain state dict;
            ``"auto"``: by the ending of ``out``.
        optimizer: also the optimizer states (``optimizer*.safetensors`` and
            ``optimizer.json``, or inside the file).
        workers: threads, each making one safetensors file at a time (``ckpt`` and
            ``pt`` are one file: one thread). Memory above start-up is, per worker, at
            most two of the largest tensors plus 200 MB.
        max_shard_size: bytes per safetensors file, or text such as ``"5GB"``; a larger
            tensor has a file of its own.
        strip_prefix: taken off tensor names; None: ``metadata["module_prefix"]`` when
            given, but nothing for ``ckpt``.
        verify: check of the checkpoint before: ``"digests"``, ``"sizes"`` or None.
        overwrite: replace what is at ``out``: a file, a checkpoint or an export.
        allow_pickle: for a checkpoint saved with ``allow_pickle=True``. Runs code from
            the file.
        progress: called with the total in bytes, gives a context manager over a
            function that takes bytes done.

    Returns:
        the files made, relative to ``out`` (its own name for a single file).

    Raises:
        CheckpointError: the checkpoint is broken, ``out`` exists, or an argument is out
            of range.
    """
    # The arguments.
    target = Path(local_path(out)).absolute()
    # Arguments and target are checked before the checkpoint, which takes long to read.
    chosen = _format(output_format, target)
    if workers < 1:
        raise CheckpointError(f"workers={workers} must be 1 or more")
    cast = dtype_from_name(dtype) if isinstance(dtype, str) else dtype
    if cast is not None and not cast.is_floating_point:
        raise CheckpointError(
            f"dtype={dtype_name(cast)} would cut off what stands behind the point of every weight; allowed are "
            "floating-point dtypes, e.g. bfloat16, float16 or float32"
        )
    options = ExportOptions(
        cast, optimizer, workers, parse_size(max_shard_size), progress
    )
    check_free(target, overwrite, path)

    # The source.
    opened = open_checkpoint(path)
    with long_wait(f"checking {os.fspath(path)}"):
        check_files(opened, verify)
    # All digests were just compared, or checks are not wanted: blocks need none then.
    opened.check_bytes = verify == "sizes"

    return _write(opened, target, chosen, strip_prefix, options, allow_pickle)


def _write(
    opened: OpenCheckpoint,
    target: Path,
    chosen: str,
    strip_prefix: str | None,
    options: ExportOptions,
    allow_pickle: bool,
) -> list[str]:
    """Write a checkpoint in the chosen format, under a temporary name until it is
    complete; return the files made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # The temporary lies next to the target, on the same file system: moving is a
    # rename.
    temporary = scratch_path(target)
    made = [target.name]
    # What the checkpoint says comes together before anything is written: errors of the
    # disk stay what they are.
    with only_checkpoint_errors(opened.address):
        if chosen == "safetensors":
            names = export_names(opened, strip_prefix)
        elif chosen == "ckpt":
            content = _lightning_content(opened, options, strip_prefix, allow_pickle)
        else:
            content = _plain_content(opened, options, strip_prefix)
    try:
        if chosen == "safetensors":
            made = write_safetensors_folder(opened, temporary, names, options)
        else:
            _write_torch_file(temporary, content, options)
        put_in_place(temporary, target)
    # After an exchange this is what was at the target before.
    finally:
        discard(temporary)
    return made


def check_free(target: Path, overwrite: bool, source: StrPath) -> None:
    """Refuse a path that holds something, unless it may be overwritten, and one around
    the source, which would go with it. An empty folder is free."""
    is_empty_folder = target.is_dir() and not any(target.iterdir())
    if os.path.lexists(target) and not is_empty_folder and not overwrite:
        raise CheckpointError(
            f"{target} exists already; choose another path or pass overwrite=True (--overwrite)"
        )
    if not is_address(source):
        inside = Path(local_path(source)).resolve()
        if target.resolve() in (inside, *inside.parents):
            raise CheckpointError(
                f"{target} is or holds the checkpoint that is read, {os.fspath(source)}, which would be lost; choose "
                "another path"
            )
    # The folder is replaced as a whole, with all that is in it.
    if target.is_dir() and not is_empty_folder and not _is_one_checkpoint(target):
        raise CheckpointError(
            f"{target} is a folder with more in it than one checkpoint or exported model, which "
            "overwrite=True (--overwrite) would remove: choose a path inside it, or remove it yourself"
        )


def _is_one_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of ours, or what an export makes without
    folders of anything else."""
    if is_checkpoint(folder):
        return True
    names, folders = [], []
    for entry in folder.iterdir():
        names.append(entry.name)
        if entry.is_dir():
            folders.append(entry.name)
            names += [f"{entry.name}/{inner.name}" for inner in entry.iterdir()]
    # By kind, how the names of its folders begin.
    exports = {
        "huggingface": (),
        "dcp": (),
        "lightning": (),
        "accelerate": ("pytorch_model_fsdp_", "optimizer_"),
    }
    begin = exports.get(foreign_kind(str(folder), names) or "")
    return begin is not None and all(name.startswith(begin) for name in folders)


def _format(output_format: str, target: Path) -> str:
    by_ending = {".ckpt": "ckpt", ".pt": "pt", ".pth": "pt", ".bin": "pt"}
    chosen = (
        by_ending.get(target.suffix, "safetensors")
        if output_format == "auto"
        else output_format
    )
    if chosen not in ("safetensors", "ckpt", "pt"):
        raise CheckpointError(
            f"format={output_format!r} is not known; allowed: auto, safetensors, ckpt, pt"
        )
    return chosen


def lazy_tensor(
    opened: OpenCheckpoint, name: str, cast: torch.dtype | None = None
) -> LazyTensor:
    """Return a tensor of a checkpoint that is read when it is needed; tied tensors have
    one tie."""
    record = opened.index.record(name)
    # Integers (positions, codes) and booleans have no other precision.
    dtype = (
        cast if cast is not None and record.dtype.is_floating_point else record.dtype
    )

    def load() -> torch.Tensor:
        with TensorFiles(opened) as files:
            return files.unsharded(name).to(dtype)

    return LazyTensor(
        record.shape, dtype, load, tie=opened.index.aliases.get(name, name)
    )


def _model_tensors(
    opened: OpenCheckpoint, options: ExportOptions, strip_prefix: str | None
) -> dict[str, LazyTensor]:
    """Return all model tensors by their names in the export, tied ones under all their
    names, to be cast."""
    names = export_names(opened, strip_prefix)
    model = {
        outside: lazy_tensor(opened, name, options.cast)
        for outside, name in names.model.items()
    }
    # Tied names share the tensor, and so its tie: torch.save then writes it once.
    return model | {dropped: model[kept] for dropped, kept in names.ties.items()}


def _plain_content(
    opened: OpenCheckpoint, options: ExportOptions, strip_prefix: str | None
) -> dict[str, Any]:
    model: dict[str, Any] = dict(_model_tensors(opened, options, strip_prefix))
    if not options.optimizer:
        return model
    keys = export_names(opened, "").optimizer_keys
    if not keys:
        raise CheckpointError(
            f"{opened.address} holds no optimizer states; leave optimizer (--optimizer) out"
        )
    everything = decode_state(opened, lambda name: lazy_tensor(opened, name), False)
    states = {key: everything[key] for key in keys}
    return {"model": model, "optimizer": states[keys[0]] if len(keys) == 1 else states}


def _lightning_content(
    opened: OpenCheckpoint,
    options: ExportOptions,
    strip_prefix: str | None,
    allow_pickle: bool,
) -> dict[str, Any]:
    content: dict[str, Any] = decode_state(
        # Optimizer states are named in the checkpoint; a Lightning file numbers them.
        opened,
        lambda name: lazy_tensor(opened, name),
        allow_pickle,
    )
    if not options.optimizer:
        for name in _TRAINING_KEYS:
            content.pop(name, None)
    if isinstance(content.get("optimizer_states"), list):
        content["optimizer_states"] = [
            numbered_optimizer_state(state) for state in content["optimizer_states"]
        ]
    # The model's tensors come back under "state_dict" with their names in the export.
    key = export_names(opened, "").model_key
    if key is not None:
        content.pop(key, None)
    refuse_second_model(opened, key, content)
    return {
        "state_dict": _model_tensors(opened, options, strip_prefix or ""),
        **content,
    }


def refuse_second_model(
    opened: OpenCheckpoint, key: str | None, others: Mapping[str, Any]
) -> None:
    """Refuse a state with something else under "state_dict", where a Lightning file has
    the model."""
    if "state_dict" in others and key != "state_dict":
        where = "at its top" if key is None else f"under {key!r}"
        raise CheckpointError(
            f"{opened.address} has its model {where} and something else under 'state_dict', where a "
            "Lightning checkpoint has the model; export it as safetensors, pt or dcp"
        )


def numbered_optimizer_state(state: dict[str, Any]) -> dict[str, Any]:
    """Turn an optimizer state keyed by parameter name into that of
    ``torch.optim.Optimizer.state_dict`` (0, 1, ...).

    Args:
        state: ``{"state": {name: {...}}, "param_groups": [{"params": [names], ...}]}``;
            returned as it is when its parameters are numbered already.
    """
    if "param_groups" not in state:
        return state
    names = [name for group in state["param_groups"] for name in group["params"]]
    # Numbered already: written by a program that numbers.
    if not all(isinstance(name, str) for name in names):
        return state
    return numbered(state)


def _write_torch_file(
    path: Path, content: dict[str, Any], options: ExportOptions
) -> None:
    """Stream a state with lazy tensors into one ``torch.save`` file."""
    # The total is known before, so progress can be shown in bytes.
    total = sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for _, leaf in iterate_tensors(content)
    )
    with (
        options.progress(total)
        if options.progress
        else contextlib.nullcontext(lambda _: None) as advance
    ):
        stream_torch_save(
            path,
            content,
            # Each tensor is read when its turn comes and freed when it is written.
            lambda leaf: leaf.load() if isinstance(leaf, LazyTensor) else leaf,
            advance,
        )


def put_in_place(temporary: Path, target: Path) -> None:
    """Move a finished file or folder to its place; a folder that was there before gets
    the temporary's name."""
    # A file replaces a file in one step; everything else is exchanged, or moved where
    # the file system cannot.
    if temporary.is_file() and not target.is_dir():
        os.replace(temporary, target)
    elif os.path.lexists(target) and not rename_exchange(str(temporary), str(target)):
        _replace_without_exchange(temporary, target)
    if temporary.exists() and not os.path.lexists(target):
        rename_new(str(temporary), str(target))
    fsync_directory(target.parent)


def _replace_without_exchange(temporary: Path, target: Path) -> None:
    """Replace what is at the target where names cannot be exchanged: it is moved aside,
    and removed when the new one is in its place."""
    # A name that no sweep removes: after a kill in between it is the only one.
    aside = target.parent / f".replaced-{target.name}-{new_save_id()}"
    os.rename(target, aside)
    try:
        rename_new(str(temporary), str(target))
    except BaseException:
        os.rename(aside, target)
        raise
    fsync_directory(target.parent)
    discard(aside)


def discard(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

"""The whole state dict: offline from a checkpoint (`consolidate`), or online from live ranks (`full_state_dict`).

Safetensors are streamed (see safetensors_export.py). One `.ckpt` or `.pt` file needs the whole dict in memory, because
torch.save takes it whole.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from smp_core.checkpoint.addresses import local_path
from smp_core.checkpoint.export_names import export_names
from smp_core.checkpoint.layout import CheckpointError, dtype_from_name
from smp_core.checkpoint.local_folder import fsync_directory, new_save_id, rename_exchange, rename_new
from smp_core.checkpoint.opening import OpenCheckpoint, open_checkpoint
from smp_core.checkpoint.reader import read_rest, read_tensors
from smp_core.checkpoint.safetensors_export import ExportOptions, Progress, parse_size, write_safetensors_folder
from smp_core.checkpoint.verify import check_files

logger = logging.getLogger("smp")

# Lightning restores optimizers and schedulers only together; without them the file is weights only.
_TRAINING_KEYS = ("optimizer_states", "optimizer", "lr_schedulers")


def consolidate(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
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
    """Bring a sharded checkpoint back as whole tensors.

    Args:
        path: checkpoint folder or address.
        out: the folder (safetensors) or file (``.ckpt``, ``.pt``) to make.
        dtype: cast floating-point model tensors to this, e.g. ``"bf16"``; None keeps each tensor's own.
        output_format: ``"safetensors"``: ``model*.safetensors`` with index, as Transformers reads it, and the files
            stored along (``config.json``, ...); ``"ckpt"``: an ordinary Lightning checkpoint; ``"pt"``: a plain state
            dict; ``"auto"``: by the ending of ``out``.
        optimizer: also the optimizer states (``optimizer*.safetensors`` and ``optimizer.json``, or inside the file).
        workers: threads, each making one safetensors file at a time; memory above start-up is, per worker, at most two
            of the largest tensors plus 200 MB. The other formats hold everything at once.
        max_shard_size: bytes per safetensors file, or text such as ``"5GB"``; a larger tensor has a file of its own.
        strip_prefix: taken off tensor names; None: ``metadata["module_prefix"]`` when given, but nothing for ``ckpt``.
        verify: check of the checkpoint before: ``"digests"``, ``"sizes"`` or None.
        overwrite: replace what is at ``out``.
        allow_pickle: for a checkpoint saved with ``allow_pickle=True``. Runs code from the file.
        progress: called with the total in bytes, gives a context manager over a function that takes bytes done.

    Returns:
        the files made, relative to ``out`` (its own name for a single file).

    Raises:
        CheckpointError: the checkpoint is broken, ``out`` exists, or an argument is out of range.
    """
    target = Path(local_path(out)).absolute()
    chosen = _format(output_format, target)
    if workers < 1:
        raise CheckpointError(f"workers={workers} must be 1 or more")
    cast = dtype_from_name(dtype) if isinstance(dtype, str) else dtype
    options = ExportOptions(cast, optimizer, workers, parse_size(max_shard_size), progress)
    taken = os.path.lexists(target) and (not target.is_dir() or any(target.iterdir()))
    if taken and not overwrite:
        raise CheckpointError(f"{target} exists already; choose another path or pass overwrite=True (--overwrite)")
    opened = open_checkpoint(path)
    check_files(opened, verify)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".tmp-{target.name}-{new_save_id()}"
    try:
        if chosen == "safetensors":
            made = write_safetensors_folder(opened, temporary, export_names(opened, strip_prefix), options)
        else:
            content = (
                _lightning_content(opened, options, strip_prefix, allow_pickle)
                if chosen == "ckpt"
                else _plain_content(opened, options, strip_prefix)
            )
            _torch_save(content, temporary)
            made = [target.name]
        put_in_place(temporary, target)
    finally:
        discard(temporary)
    return made


def _format(output_format: str, target: Path) -> str:
    by_ending = {".ckpt": "ckpt", ".pt": "pt", ".pth": "pt", ".bin": "pt"}
    chosen = by_ending.get(target.suffix, "safetensors") if output_format == "auto" else output_format
    if chosen not in ("safetensors", "ckpt", "pt"):
        raise CheckpointError(f"format={output_format!r} is not known; allowed: auto, safetensors, ckpt, pt")
    return chosen


def _model_tensors(opened: OpenCheckpoint, options: ExportOptions, strip_prefix: str | None) -> dict[str, torch.Tensor]:
    """All model tensors by outside name, tied ones as one tensor under several names, cast."""
    names = export_names(opened, strip_prefix)
    stored = read_tensors(opened.address, names.model.values())
    model = {outside: _cast(stored.pop(name), options.cast) for outside, name in names.model.items()}
    return model | {dropped: model[kept] for dropped, kept in names.ties.items()}


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _plain_content(opened: OpenCheckpoint, options: ExportOptions, strip_prefix: str | None) -> dict[str, Any]:
    model: dict[str, Any] = dict(_model_tensors(opened, options, strip_prefix))
    if not options.optimizer:
        return model
    keys = export_names(opened, "").optimizer_keys
    if not keys:
        raise CheckpointError(f"{opened.address} holds no optimizer states; leave optimizer (--optimizer) out")
    states = {key: read_rest(opened.address, key, tensors=[f"{key}.*"]) for key in keys}
    return {"model": model, "optimizer": states[keys[0]] if len(keys) == 1 else states}


def _lightning_content(
    opened: OpenCheckpoint, options: ExportOptions, strip_prefix: str | None, allow_pickle: bool
) -> dict[str, Any]:
    key = export_names(opened, "").model_key
    hidden = [] if options.optimizer else list(_TRAINING_KEYS)
    globs = [f"{name}.*" for name in (key, *hidden) if name is not None]
    content: dict[str, Any] = read_rest(opened.address, tensors=["*"], exclude=globs, allow_pickle=allow_pickle)
    for name in hidden:
        content.pop(name, None)
    if options.optimizer and isinstance(content.get("optimizer_states"), list):
        content["optimizer_states"] = [numbered_optimizer_state(state) for state in content["optimizer_states"]]
    if key is not None:
        content.pop(key, None)
    return {"state_dict": _model_tensors(opened, options, strip_prefix or ""), **content}


def numbered_optimizer_state(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer state keyed by parameter name -> the form of ``torch.optim.Optimizer.state_dict`` (keyed 0, 1, ...).

    Args:
        state: ``{"state": {name: {...}}, "param_groups": [{"params": [names], ...}]}``; returned as it is when its
            parameters are numbered already.
    """
    if "param_groups" not in state:
        return state
    names = [name for group in state["param_groups"] for name in group["params"]]
    if not all(isinstance(name, str) for name in names):
        return state
    number = {name: position for position, name in enumerate(names)}
    groups = [{**group, "params": [number[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {number[name]: value for name, value in state["state"].items()}, "param_groups": groups}


def _torch_save(content: dict[str, Any], path: Path) -> None:
    with open(path, "xb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def put_in_place(temporary: Path, target: Path) -> None:
    """Move what was made to its place; what was there before is left under the temporary's name."""
    if os.path.lexists(target) and not rename_exchange(str(temporary), str(target)):
        discard(target)
    if temporary.exists() and not os.path.lexists(target):
        rename_new(str(temporary), str(target))
    fsync_directory(target.parent)


def discard(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def full_state_dict(model_or_state: nn.Module | Mapping[str, Any], rank0_only: bool = True) -> dict[str, Any]:
    """The whole state dict of live ranks, on the CPU, gathered one tensor at a time. Collective.

    Args:
        model_or_state: a module (its parameters and persistent buffers, by their own names) or a flat or nested state
            with DTensors over any mesh; what is no tensor stays as it is.
        rank0_only: the other ranks take part but get an empty dict; False gives every rank everything.

    Returns:
        names -> whole CPU tensors; tied tensors stay one tensor.
    """
    if isinstance(model_or_state, nn.Module):
        state: Mapping[str, Any] = get_model_state_dict(model_or_state)
    else:
        state = model_or_state
    keep = not rank0_only or not dist.is_initialized() or dist.get_rank() == 0
    seen: dict[Any, torch.Tensor] = {}

    def whole(tensor: torch.Tensor) -> torch.Tensor | None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        key = (local.data_ptr(), tuple(tensor.shape), local.stride(), local.dtype)
        tied = bool(local.numel()) and key in seen
        # Every rank takes part in the gather even where it sees a tie: a rank with an empty slice does not see it.
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not keep:
            return None
        if tied:
            return seen[key]
        host = full.detach().to("cpu", copy=True).contiguous()
        seen[key] = host
        return host

    def walk(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            return whole(node)
        if isinstance(node, dict):
            return {key: walk(value) for key, value in node.items()}
        if isinstance(node, (list, tuple)):
            return type(node)(walk(value) for value in node)
        return node

    result = walk(dict(state))
    return result if keep else {}

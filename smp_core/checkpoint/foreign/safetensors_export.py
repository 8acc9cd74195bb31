"""The safetensors folders as Transformers reads them, streamed from a checkpoint.

The header of each output file is known from the index; then one tensor at a time is
read from its slices (any layout), cast and written, so that a worker holds at most one
tensor and its cast copy. Tied tensors are written once, under the first name; the
others stand in the header's metadata (``dropped: kept``), as Transformers writes them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from smp_core.checkpoint.dtypes import dtype_name, safetensors_dtype
from smp_core.checkpoint.folders.file_system import fsync_directory
from smp_core.checkpoint.folders.storage import Sink
from smp_core.checkpoint.foreign.export_names import ExportNames
from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.opening import OpenCheckpoint
from smp_core.checkpoint.tensor_file import Entry, write_tensor_file
from smp_core.checkpoint.tensor_files import TensorFiles
from smp_core.checkpoint.tree import subtree

Advance = Callable[[int], None]
Progress = Callable[[int], contextlib.AbstractContextManager[Advance]]

_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
}


@dataclass(frozen=True)
class ExportOptions:
    """The options of an export as safetensors.

    Attributes:
        cast: dtype of floating-point model tensors, None: as saved.
        optimizer: also optimizer states.
        workers: threads, each making one file at a time.
        shard_bytes: largest size of a file, unless a single tensor is larger.
        progress: called with the total in bytes, gives a context manager over a
            function that takes bytes done.
    """

    cast: torch.dtype | None = None
    optimizer: bool = False
    workers: int = 1
    shard_bytes: int = 5 * 10**9
    progress: Progress | None = None


@dataclass(frozen=True)
class _OutputFile:
    name: str
    entries: list[Entry]
    sources: list[str]
    metadata: dict[str, str]


def parse_size(size: int | str) -> int:
    """Parse ``"5GB"``, ``"200MiB"`` or a number to bytes.

    Raises:
        CheckpointError: not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?)?B?", str(size).strip().upper())
    if match is None or float(match[1]) <= 0:
        raise CheckpointError(
            f"max_shard_size={size!r} is not a size; write e.g. 5GB or 200MB"
        )
    return int(float(match[1]) * _UNITS[match[2] or ""])


def write_safetensors_folder(
    opened: OpenCheckpoint, folder: Path, names: ExportNames, options: ExportOptions
) -> list[str]:
    """Write a new folder.

    Args:
        opened: the checkpoint.
        folder: made here; must not exist.
        names: the tensors to write, and their names in the export.
        options: the options of the export.

    Returns:
        names of the files made.

    Raises:
        CheckpointError: optimizer states are asked for and there are none; a dtype that
            safetensors has no name for; a damaged checkpoint.
    """
    folder.mkdir()
    # Which tensors go into which file; the index needs no values and comes first.
    files = _plan(
        opened, "model", names.model, options.cast, options.shard_bytes, names.ties
    )
    _write_index(folder, "model", files)
    if options.optimizer:
        # Everything of the optimizers that is not a tensor: groups, steps, names. One
        # that keeps no tensors (SGD without momentum) has it all the same.
        tree = {
            key: subtree(opened.tree, ("state", key)) for key in names.optimizer_keys
        }
        if not any(tree.values()):
            raise CheckpointError(
                f"{opened.address} holds no optimizer states; leave optimizer (--optimizer) out"
            )
        # Optimizer states keep their names and dtypes.
        states = _plan(
            opened,
            "optimizer",
            {n: n for n in names.optimizer},
            None,
            options.shard_bytes,
            {},
        )
        _write_index(folder, "optimizer", states)
        (folder / "optimizer.json").write_text(json.dumps(tree, indent=1))
        files = files + (states if names.optimizer else [])
    total = sum(entry.bytes for file in files for entry in file.entries)
    # The files, side by side.
    with (
        options.progress(total)
        if options.progress
        else contextlib.nullcontext(lambda _: None) as advance
    ):
        with ThreadPoolExecutor(options.workers) as pool:
            futures = [
                pool.submit(_write_file, opened, folder, file, advance)
                for file in files
            ]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                # Files that were not begun are given up; those in progress end first.
                pool.shutdown(cancel_futures=True)
                raise
    # Files that the checkpoint keeps along.
    for name, stored in opened.manifest.extra.items():
        if os.path.lexists(folder / name):
            raise CheckpointError(
                f"{opened.address} keeps a file {name} along, which is also made here: not exported"
            )
        (folder / name).write_bytes(opened.checked(stored))
    fsync_directory(folder)
    return sorted(os.listdir(folder))


def _plan(
    opened: OpenCheckpoint,
    stem: str,
    names: dict[str, str],
    cast: torch.dtype | None,
    shard_bytes: int,
    ties: dict[str, str],
) -> list[_OutputFile]:
    """Divide a list of tensors into files of at most ``shard_bytes``, in order."""
    # The header of a file has the first for itself, and the second beside ties.
    for word, taken in (("__metadata__", {*names, *ties}), ("format", {*ties})):
        if word in taken:
            raise CheckpointError(
                f"a tensor is called {word!r}, which safetensors files keep for themselves; rename it, or write a "
                ".ckpt or .pt file"
            )
    groups: list[list[tuple[Entry, str]]] = [[]]
    filled = 0
    for outside, name in names.items():
        record = opened.index.record(name)
        dtype = (
            cast
            if cast is not None and record.dtype.is_floating_point
            else record.dtype
        )
        if safetensors_dtype(dtype) is None:
            raise CheckpointError(
                f"{outside} is {dtype_name(dtype)}, which safetensors files have no name for: others would read its "
                "bytes as integers; give another dtype (--dtype), or write a .ckpt or .pt file"
            )
        entry = Entry(outside, record.shape, dtype)
        # In the order of the names, as Transformers divides a model; a file has one
        # tensor at least.
        if groups[-1] and filled + entry.bytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append((entry, name))
        filled += entry.bytes
    files = []
    for number, group in enumerate(groups, 1):
        file = (
            f"{stem}.safetensors"
            if len(groups) == 1
            else f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors"
        )
        # Keeps every entry aligned.
        group = sorted(group, key=lambda pair: -pair[0].dtype.itemsize)
        here = {entry.key for entry, _ in group}
        # A tied name is mentioned in the file that has its tensor.
        tied = {dropped: kept for dropped, kept in ties.items() if kept in here}
        of_file = [entry for entry, _ in group]
        sources = [name for _, name in group]
        files.append(_OutputFile(file, of_file, sources, {"format": "pt", **tied}))
    return files


def _write_file(
    opened: OpenCheckpoint, folder: Path, file: _OutputFile, advance: Advance
) -> None:
    def values() -> Iterator[torch.Tensor]:
        with TensorFiles(opened) as source:
            for entry, name in zip(file.entries, file.sources, strict=True):
                yield source.unsharded(name).to(entry.dtype)
                advance(entry.bytes)

    # "x": a name that is there already is an error, not overwritten.
    with open(folder / file.name, "xb", buffering=0) as raw:
        write_tensor_file(
            Sink(raw, file.name, "xxh3"), file.entries, values(), file.metadata
        )


def _write_index(folder: Path, stem: str, files: list[_OutputFile]) -> None:
    """Write ``<stem>.safetensors.index.json``; like Transformers, only when there is
    more than one file."""
    if len(files) == 1:
        return
    weights = {entry.key: file.name for file in files for entry in file.entries}
    total = sum(entry.bytes for file in files for entry in file.entries)
    content = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(weights.items())),
    }
    (folder / f"{stem}.safetensors.index.json").write_text(
        json.dumps(content, indent=2) + "\n"
    )

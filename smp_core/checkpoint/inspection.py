"""The content of a checkpoint, or of a folder of checkpoints, as rich tables and as a
plot."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

from rich.table import Table
from rich.text import Text

from smp_core.checkpoint.dtypes import dtype_name
from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.opening import OpenCheckpoint, open_checkpoint
from smp_core.checkpoint.root import find_checkpoints, join, read_latest
from smp_core.checkpoint.untrusted import only_checkpoint_errors
from smp_core.checkpoint.verify import verify_checkpoint
from smp_core.outside import StrPath, how_to_install

_LARGEST = 20
_WRITER = re.compile(r"tensors-(\d{5,9})-of-")


def _text(value: object) -> Text:
    """Return a fact from a checkpoint without markup or control characters for the
    terminal."""
    return Text(
        "".join(
            c if c.isprintable() else c.encode("unicode_escape").decode()
            for c in str(value)
        )
    )


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def checkpoint_tables(path: StrPath, all_tensors: bool = False) -> list[Table]:
    """Make tables of the manifest's facts, of the files, and of the tensors (the
    largest ones, or all).

    Raises:
        CheckpointError: not a readable checkpoint.
    """
    opened = open_checkpoint(path)
    with only_checkpoint_errors(opened.address):
        return [_facts(opened), _files(opened), _tensors(opened, all_tensors)]


def _state(address: str) -> Text:
    """Return whether a checkpoint is whole, by sizes and headers of every file: a table
    should not read all bytes."""
    problems = verify_checkpoint(address)
    if problems:
        return Text("broken: ", style="red") + _text(problems[0])
    return Text("whole")


def _facts(opened: OpenCheckpoint) -> Table:
    manifest, index = opened.manifest, opened.index
    # Every text that comes from the file goes through _text: it may be a stranger's.
    table = Table("fact", "value", title=opened.address, title_justify="left")
    table.add_row("state", _state(opened.address))
    table.add_row("step", "-" if manifest.step is None else str(manifest.step))
    table.add_row("created", _text(manifest.created))
    table.add_row("saved by", f"{manifest.world_size} ranks")
    for mesh in manifest.meshes:
        axes, shape = mesh.get("axes") or [], mesh.get("shape") or []
        named = ", ".join(
            f"{axis}={size}" for axis, size in zip(axes, shape, strict=False)
        )
        table.add_row(
            "mesh of rank 0", _text(f"{named or shape} over ranks {mesh.get('ranks')}")
        )
    table.add_row(
        "versions",
        _text(
            ", ".join(
                f"{name} {version}" for name, version in manifest.versions.items()
            )
        ),
    )
    table.add_row(
        "tensors",
        f"{len(index.tensors)}, {sum(record.numel for record in index.tensors.values()):,} elements",
    )
    dtypes = Counter(dtype_name(record.dtype) for record in index.tensors.values())
    table.add_row(
        "dtypes", ", ".join(f"{name}: {count}" for name, count in dtypes.most_common())
    )
    if index.aliases:
        table.add_row(
            "tied",
            _text(
                ", ".join(
                    f"{name} = {target}" for name, target in index.aliases.items()
                )
            ),
        )
    table.add_row("bytes", _size(manifest.total_bytes))
    for key, value in manifest.metadata.items():
        table.add_row(_text(f"metadata.{key}"), _text(value))
    if manifest.pickled:
        table.add_row("needs allow_pickle", _text(", ".join(manifest.pickled)))
    return table


def _files(opened: OpenCheckpoint) -> Table:
    table = Table(
        "file", "bytes", opened.manifest.algorithm, title="files", title_justify="left"
    )
    for name, record in sorted(opened.manifest.files.items()):
        table.add_row(_text(name), _size(record.bytes), _text(record.digest))
    return table


def _tensors(opened: OpenCheckpoint, all_tensors: bool) -> Table:
    records = list(opened.index.tensors.items())
    # A large model has thousands of tensors; the largest tell most.
    if not all_tensors and len(records) > _LARGEST:
        records = sorted(records, key=lambda item: -item[1].bytes)[:_LARGEST]
        title = f"the {_LARGEST} largest of {len(opened.index.tensors)} tensors (--all lists every one)"
    else:
        title = "tensors"
    table = Table(
        "tensor", "shape", "dtype", "bytes", "slices", title=title, title_justify="left"
    )
    for name, record in records:
        table.add_row(
            _text(name),
            _text(list(record.shape)),
            dtype_name(record.dtype),
            _size(record.bytes),
            str(len(record.chunks)),
        )
    return table


def list_table(root: StrPath) -> Table:
    """Make a table of the checkpoints in a folder, oldest first: step, time, ranks,
    size, whether it is complete.

    Raises:
        CheckpointError: no such folder.
    """
    latest = read_latest(root)
    table = Table(
        "checkpoint",
        "step",
        "created",
        "ranks",
        "bytes",
        "state",
        title=str(root),
        title_justify="left",
    )
    for name in find_checkpoints(root, broken_too=True):
        address = join(root, name)
        state = _state(address)
        state += " (LATEST)" if name == latest else ""
        try:
            # A broken manifest gives no more than its problem.
            manifest = open_checkpoint(address).manifest
        except CheckpointError:
            table.add_row(_text(name), "", "", "", "", state)
            continue
        step = "-" if manifest.step is None else str(manifest.step)
        created = _text(manifest.created[:19])
        table.add_row(
            _text(name),
            step,
            created,
            str(manifest.world_size),
            _size(manifest.total_bytes),
            state,
        )
    return table


def plot_bytes(path: StrPath, out: Path) -> None:
    """Draw a bar chart of the bytes that each rank wrote, as PNG.

    Raises:
        CheckpointError: matplotlib is not installed, or not a readable checkpoint.
    """
    opened = open_checkpoint(path)
    try:
        # An optional package, imported where it is used.
        from matplotlib.figure import Figure
    except ImportError:
        raise CheckpointError(
            f"--plot needs matplotlib, which is not installed; {how_to_install('matplotlib')}"
        ) from None
    # A rank that had nothing to write has no file, and a bar of 0.
    written = {
        int(match[1]): record.bytes
        for name, record in opened.manifest.files.items()
        if (match := _WRITER.match(name)) is not None
    }
    ranks = range(opened.manifest.world_size)
    figure = Figure(figsize=(max(5.0, 0.3 * len(ranks)), 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(list(ranks), [written.get(rank, 0) / 1e6 for rank in ranks])
    axes.set_xlabel("rank")
    axes.set_ylabel("MB written")
    axes.set_title(f"{os.path.basename(opened.address)}: bytes by rank")
    figure.savefig(out)

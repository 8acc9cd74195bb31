"""The folders of torch.distributed.checkpoint, read without running code from them and
written for other programs.

DCP keeps its metadata as a pickle, which is read with stand-ins for every class
(dcp_metadata.py); values that are not tensors are read with weights_only=True. Tensors
are read and written one by one.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from smp_core.checkpoint.foreign.dcp_metadata import read_dcp_metadata
from smp_core.checkpoint.foreign.torch_file import check_torch_content
from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.ranks import failures_in_words
from smp_core.checkpoint.save_plan import LazyTensor
from smp_core.checkpoint.tree import map_tensors
from smp_core.outside import StrPath


class _SafeReader(FileSystemReader):
    """A reader of DCP that never unpickles the metadata; it parses them once for many
    reads."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._metadata = read_dcp_metadata(path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _SafeLoadPlanner(DefaultLoadPlanner):
    """A load planner that reads values other than tensors with
    ``weights_only=True``."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        # Sizes that the archive asks for are checked before torch allocates them.
        check_torch_content(value, name)
        value.seek(0)
        try:
            self.original_state_dict[name] = torch.load(
                value, map_location="cpu", weights_only=True
            )
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{name} can only be read by unrestricted unpickling: not read ({error})"
            ) from error


def read_dcp_folder(path: StrPath) -> dict[str, Any]:
    """Read the nested state of a DCP folder; tensors as :class:`LazyTensor`.

    Raises:
        CheckpointError: not readable, or only by running code from it.
    """
    reader = _SafeReader(os.fspath(path))
    metadata = reader.read_metadata()
    flat: dict[str, Any] = {}
    for name, stored in metadata.state_dict_metadata.items():
        # Tensors stay on the disk until they are written.
        if isinstance(stored, TensorStorageMetadata):
            flat[name] = LazyTensor(
                tuple(stored.size),
                stored.properties.dtype,
                _loader(reader, name, stored),
            )
        elif isinstance(stored, BytesStorageMetadata):
            flat[name] = None
    # All other values are read now: they are small, and the nest needs them.
    values = {
        name: None for name, value in flat.items() if not isinstance(value, LazyTensor)
    }
    _load(values, reader)
    flat.update(values)
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    # Flat names back to the nest that they were flattened from.
    root: dict[Any, Any] = {}
    for name, value in flat.items():
        _put(root, tuple(paths.get(name, (name,))), value)
    return root


def _loader(reader: _SafeReader, name: str, stored: TensorStorageMetadata) -> Any:
    def load() -> torch.Tensor:
        # DCP loads into tensors that are given to it.
        target = {name: torch.empty(stored.size, dtype=stored.properties.dtype)}
        _load(target, reader)
        return target[name]

    return load


def _load(target: dict[str, Any], reader: _SafeReader) -> None:
    if target:
        with _alone(reader.path):
            dcp.load(
                target, storage_reader=reader, planner=_SafeLoadPlanner(), no_dist=True
            )


@contextlib.contextmanager
def _alone(path: StrPath) -> Iterator[None]:
    """Let DCP work in one process without its warning about that; errors become
    CheckpointErrors with the path."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        (text,) = failures_in_words(error).values()  # of one process
        raise CheckpointError(f"{path}: {text}") from error


def _put(root: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set a value at a path, making dicts for string keys and lists for integers, as
    DCP flattens them."""
    node = root
    # The next key decides whether a list or a dict belongs here.
    for key, following in zip(path, (*path[1:], None), strict=True):
        fresh: Any = value
        if following is not None:
            fresh = [] if isinstance(following, int) else {}
        if isinstance(node, list):
            # Places of a list may come in any order.
            node.extend([None] * (key + 1 - len(node)))
            if following is None or node[key] is None:
                node[key] = fresh
        elif following is None or key not in node:
            node[key] = fresh
        node = node[key]


class _LazySavePlanner(DefaultSavePlanner):
    """A save planner that reads a lazy tensor when it is written."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        held = self.state_dict[index.fqn]
        return (
            held.load()
            if isinstance(held, LazyTensor)
            else super().lookup_object(index)
        )


def write_dcp_folder(path: StrPath, state: dict[str, Any]) -> None:
    """Write a state as a DCP folder, from one process, one tensor at a time.

    Args:
        path: made here; must not exist.
        state: nested dicts and lists with :class:`LazyTensor` or tensors.
    """
    os.mkdir(path)
    # One file, as one process writes it.
    writer = FileSystemWriter(path, single_file_per_rank=True, thread_count=1)
    with _alone(path):
        dcp.save(
            _as_dcp_looks(state),
            storage_writer=writer,
            planner=_LazySavePlanner(),
            no_dist=True,
        )


def _as_dcp_looks(state: Any) -> Any:
    """Return a state whose lazy tensors are read where DCP pickles a value as one: in
    tuples, and in lists, which it looks into for tensors and dicts only."""
    if isinstance(state, dict):
        return {key: _as_dcp_looks(value) for key, value in state.items()}
    if isinstance(state, list):
        return [
            _as_dcp_looks(item) if isinstance(item, (dict, list)) else loaded(item)
            for item in state
        ]
    return loaded(state) if isinstance(state, tuple) else state


def loaded(state: Any) -> Any:
    """Return a state with all lazy tensors read."""
    return map_tensors(
        state, lambda leaf: leaf.load() if isinstance(leaf, LazyTensor) else leaf
    )

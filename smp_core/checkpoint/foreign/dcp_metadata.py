"""The metadata of a torch.distributed.checkpoint folder, made from its pickle's facts
and checked against its files.

The pickle is read with stand-ins (inert_pickle.py). Torch's data classes are made here,
from values whose types were looked at, so nothing of the file reaches a class of torch
or Python.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

# _StorageInfo: FileSystemReader wants no other.
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from smp_core.checkpoint.coverage import tiles
from smp_core.checkpoint.folders.local_folder import LocalFolder
from smp_core.checkpoint.foreign.inert_pickle import Global, Made, read_inert
from smp_core.checkpoint.untrusted import (
    CheckpointError,
    is_plain,
    only_checkpoint_errors,
)

_METADATA_BYTES = 1 << 30
_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"


def read_dcp_metadata(folder: str | os.PathLike[str]) -> Metadata:
    """Read and check ``.metadata``.

    Raises:
        CheckpointError: damaged, of other classes than DCP's, or it leads out of the
            folder or its files.
    """
    where = os.path.join(folder, ".metadata")
    with only_checkpoint_errors(where):
        facts = read_inert(
            LocalFolder(os.fspath(folder)).read(".metadata", _METADATA_BYTES), where
        )
        return _Reader(Path(folder), where).metadata(facts)


class _Reader:
    """The way from stand-ins to torch's data classes.

    Args:
        folder: the DCP folder.
        where: its metadata's path, for messages.
    """

    def __init__(self, folder: Path, where: str) -> None:
        self.folder = folder
        self.where = where
        self.sizes: dict[str, int] = {}

    def metadata(self, facts: Any) -> Metadata:
        top = self.state(facts, f"{_MODULE}.Metadata")
        entries = self.a(dict, top.get("state_dict_metadata"))
        # Where the bytes are: (name, offset) -> file and range, each checked against
        # the file.
        stored = {
            self.index(key): self.storage(value)
            for key, value in self.a(dict, top.get("storage_data")).items()
        }
        result: dict[str, Any] = {}
        for name, entry in entries.items():
            # Values other than tensors; their bytes are looked up when they are read.
            if self.is_made(entry, f"{_MODULE}.BytesStorageMetadata"):
                result[self.a(str, name)] = BytesStorageMetadata()
            else:
                result[self.a(str, name)] = self.tensor(name, entry, stored)
        # DCP's path of each flattened name, for the nest.
        paths = top.get("planner_data")
        known = {
            name: self.path(paths[name], len(entries))
            for name in result
            if paths and name in paths
        }
        return Metadata(result, known, stored)

    def tensor(
        self, name: str, entry: Any, stored: dict[MetadataIndex, Any]
    ) -> TensorStorageMetadata:
        state = self.state(entry, f"{_MODULE}.TensorStorageMetadata")
        dtype = self.dtype(
            self.state(state["properties"], f"{_MODULE}.TensorProperties", tuple)[0]
        )
        shape = self.shape(state["size"])
        chunks = []
        for chunk in self.a(list, state["chunks"]):
            facts = self.state(chunk, f"{_MODULE}.ChunkStorageMetadata")
            chunks.append(
                ChunkStorageMetadata(
                    self.shape(facts["offsets"]), self.shape(facts["sizes"])
                )
            )
        # Otherwise parts would keep what memory held before.
        if math.prod(shape) and not tiles(
            [(c.offsets, c.sizes) for c in chunks if math.prod(c.sizes)], shape
        ):
            raise CheckpointError(
                f"{self.where}: the slices of {name} do not cover it, or overlap"
            )
        # A slice's bytes have to be there in full; DCP would read what follows them.
        for chunk in chunks:
            info = stored.get(MetadataIndex(name, chunk.offsets))
            if info is None or math.prod(chunk.sizes) * dtype.itemsize > info.length:
                raise CheckpointError(
                    f"{self.where}: a slice of {name} has no bytes, or too few"
                )
        return TensorStorageMetadata(TensorProperties(dtype=dtype), shape, chunks)

    def index(self, fact: Any) -> MetadataIndex:
        state = self.state(fact, f"{_MODULE}.MetadataIndex")
        offset, number = state.get("offset"), state.get("index")
        return MetadataIndex(
            self.a(str, state["fqn"]),
            None if offset is None else self.shape(offset),
            None if number is None else self.a(int, number),
        )

    def storage(self, fact: Any) -> _StorageInfo:
        state = self.state(fact, _STORAGE_INFO)
        name = state["relative_path"]
        offset = self.a(int, state["offset"])
        length = self.a(int, state["length"])
        # A name with a separator could lead to any file of the machine.
        if not is_plain(name):
            raise CheckpointError(
                f"{self.where} names the file {name!r}, which is not in the folder: not trusted"
            )
        if state.get("transform_descriptors"):
            raise CheckpointError(
                f"{self.where}: {name} was written through an extension of DCP: not read"
            )
        if name not in self.sizes:
            self.sizes[name] = self.size(name)
        if not 0 <= offset <= offset + length <= self.sizes[name]:
            raise CheckpointError(
                f"{self.where}: an entry lies outside of {name}; is that file cut short?"
            )
        # Only plain numbers and a plain name reach torch's class.
        return _StorageInfo(name, offset, length)

    def size(self, name: str) -> int:
        file = self.folder / name
        # A link could lead out of the folder.
        if file.is_symlink() or not file.is_file():
            raise CheckpointError(f"{file} is missing, or no regular file: not read")
        return file.stat().st_size

    def path(self, fact: Any, entries: int) -> tuple[Any, ...]:
        """Return where a value stands in the state: keys, and places in lists, which
        are not longer than all values."""
        path = self.a(tuple, fact)
        # Numbers are places in lists, which would be made as long as they say.
        fits = all(
            type(key) is str or (type(key) is int and 0 <= key < entries)
            for key in path
        )
        if not path or len(path) > 64 or not fits:
            raise CheckpointError(
                f"{self.where}: a value has no place in the state: {path[:5]!r}"
            )
        return path

    def dtype(self, fact: Any) -> torch.dtype:
        dtype = (
            getattr(torch, fact.name, None)
            if isinstance(fact, Global) and fact.module == "torch"
            else None
        )
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(
                f"{self.where} refers to {fact}, which is no dtype: not read"
            )
        return dtype

    def shape(self, fact: Any) -> torch.Size:
        values = fact.arguments[0] if self.is_made(fact, "torch.Size") else fact
        sizes = list(self.numbers(values))
        if len(sizes) > 64 or any(not 0 <= size < 1 << 62 for size in sizes):
            raise CheckpointError(f"{self.where}: a shape out of range")
        return torch.Size(sizes)

    def numbers(self, fact: Any) -> Iterator[int]:
        return (self.a(int, value) for value in self.a(tuple, tuple(fact)))

    def a(self, kind: type, fact: Any) -> Any:
        """Return a value of this very type."""
        if type(fact) is not kind:
            raise CheckpointError(
                f"{self.where} is damaged: {type(fact).__name__} instead of {kind.__name__}"
            )
        return fact

    def is_made(self, fact: Any, name: str) -> bool:
        return isinstance(fact, Made) and str(fact.by) == name

    def state(self, fact: Any, name: str, kind: type = dict) -> Any:
        """Return the state of an object of DCP's class ``name``."""
        if not self.is_made(fact, name):
            found = str(fact.by) if isinstance(fact, Made) else str(fact)[:80]
            raise CheckpointError(
                f"{self.where} refers to {found}, not to DCP's {name}: not read"
            )
        return self.a(kind, {} if fact.state is None else fact.state)

"""The record of a state in shared memory: what a rank's file of tensors holds, and of which save it is.

A record is the commit of one rank. It is renamed into place when the tensors, their layout and the rest have been
written; before a file of tensors is written anew its record is removed. So tensors of a process that was killed while
it wrote have no record. Its name ends with its digest, and it has the digests of the tensors, so that a file that was
changed or cut is not used either. What it says passes the gate of checkpoints on disk (untrusted.py, coverage.py).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from smp_core.checkpoint.coverage import check_index
from smp_core.checkpoint.layout import (
    CheckpointError,
    Chunk,
    FileRecord,
    Index,
    Manifest,
    TensorRecord,
    digest_of,
)
from smp_core.checkpoint.local_folder import LocalFolder
from smp_core.checkpoint.opening import OpenCheckpoint
from smp_core.checkpoint.storage import BLOCK_BYTES, Folder
from smp_core.checkpoint.tensor_file import bytes_view
from smp_core.checkpoint.untrusted import Fields, file_name, only_checkpoint_errors, read_json

FORMAT = "torch-smp-memory"
_VERSION = 1
RECORD_BYTES = 64 << 20
_TENSORS = "tensors"  # in layouts, which are the same for both files of a rank
_ALGORITHM = "xxh3"


@dataclass(frozen=True)
class Record:
    """The record of one rank's part of a state.

    Attributes:
        save: identity of the save, the same on all ranks.
        step, sequence: of the save, as in :class:`smp_core.checkpoint.layout.Manifest`.
        rank, world: whose part it is, and of how many.
        metadata, meshes: for the manifest.
        layouts: digest of each rank's layout; ranks of equal layouts hold equal tensors.
        file: the file of tensors, its size and the digests of its blocks.
        rest: name -> size and digest of the files with what is no tensor.
    """

    save: str
    step: int
    sequence: int
    rank: int
    world: int
    metadata: dict[str, Any]
    meshes: list[dict[str, Any]]
    layouts: list[str]
    file: str
    size: int
    blocks: str
    rest: dict[str, tuple[int, str]]

    @property
    def layout(self) -> str:
        """The digest of this rank's layout."""
        return self.layouts[self.rank]

    @property
    def age(self) -> tuple[int, int, str]:
        """The order of saves."""
        return self.sequence, self.step, self.save

    def to_bytes(self) -> bytes:
        """Return the content of the record's file."""
        return json.dumps({"format": FORMAT, "version": _VERSION, **dataclasses.asdict(self)}).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Record:
        """Parse and check the content of a record's file.

        Raises:
            CheckpointError: it is no record, or damaged.
        """
        content = Fields(read_json(data, where, RECORD_BYTES), where)
        if (content.content.get("format"), content.content.get("version")) != (FORMAT, _VERSION):
            raise CheckpointError(f"{where} is not a record of this version of torch-smp")
        world = content.ranks("world")
        layouts = content.texts("layouts")
        if len(layouts) != world:
            raise CheckpointError(f"{where} is damaged: {len(layouts)} layouts of {world} ranks")
        rest = {
            file_name(name, where): (Fields({"size": size}, where).count("size", most=1 << 40), str(digest))
            for name, (size, digest) in content.get("rest", dict).items()
        }
        return cls(
            save=content.text("save"),
            step=content.count("step", most=1 << 62),
            sequence=content.count("sequence", most=1 << 62),
            rank=content.count("rank", most=world - 1),
            world=world,
            metadata=content.get("metadata", dict),
            meshes=content.get("meshes", list),
            layouts=layouts,
            file=file_name(content.text("file"), where),
            size=content.count("size", most=1 << 62),
            blocks=content.text("blocks"),
            rest=rest,
        )


def record_name(record: Record, data: bytes) -> str:
    """Return the name of a record's file."""
    return f"rank-{record.rank:05d}-step-{record.step:08d}-{digest_of(data, _ALGORITHM)}.record"


def read_record(folder: Folder, name: str) -> Record:
    """Read a record and check its digest.

    Raises:
        CheckpointError: missing, damaged, or no record.
    """
    where = f"{folder.address}/{name}"
    with only_checkpoint_errors(where):
        data = folder.read(name, RECORD_BYTES)
        record = Record.from_bytes(data, where)
        if record_name(record, data) != name:
            raise CheckpointError(f"{where} is damaged: its content does not fit its name")
    return record


def digests_of_blocks(memory: torch.Tensor) -> str:
    """Return the digests of all blocks of a file of tensors (its bytes, uint8), one behind the other."""
    data = bytes_view(memory)
    digests = []
    for begin in range(0, len(data), BLOCK_BYTES):
        digests.append(xxhash.xxh3_64_hexdigest(data[begin : begin + BLOCK_BYTES]))
    return "".join(digests)


def layout_bytes(tensors: Mapping[str, TensorRecord]) -> bytes:
    """Return the content of a layout's file, an index (docs/checkpoint-format.md) of the tensors of one rank."""
    return json.dumps(Index(dict(tensors)).to_json()).encode()


def layout_name(digest: str) -> str:
    """Return the name of a layout's file."""
    return f"layout-{digest}.json"


def in_layout(offset: tuple[int, ...], shape: tuple[int, ...], begin: int, end: int) -> Chunk:
    """Make the entry of a slice for :func:`layout_bytes`."""
    return Chunk(_TENSORS, _TENSORS, offset, shape, begin, end)


@dataclass(frozen=True)
class Part:
    """A part of a state as this rank sees it.

    Attributes:
        layout: the layout's content.
        file: its file of tensors in this node's folder; another name where it is in another node's memory.
        record: the record of it, of this rank or of one of equal layout.
    """

    layout: bytes
    file: str
    record: Record


class MemoryCheckpoint(OpenCheckpoint):
    """A state in the memory of this node and others, to be read like a checkpoint on disk.

    Slices in other nodes' memory have a place in the index, but cannot be read here: no rank needs those of others.
    Digests were compared when ranks agreed on the state (memory_search.py).

    Args:
        folder: this node's.
        parts: one for each layout; where slices are in several, the first one counts.
    """

    def __init__(self, folder: LocalFolder, parts: list[Part]) -> None:
        record = parts[0].record
        files = {part.file: FileRecord(part.record.size, "", 0, digest_of(b"", _ALGORITHM)) for part in parts} | {
            name: FileRecord(size, digest) for name, (size, digest) in record.rest.items()
        }
        layouts = [layout_name(digest) for digest in dict.fromkeys(record.layouts)]
        manifest = Manifest(
            id=record.save,
            created="",
            step=record.step,
            world_size=record.world,
            meshes=record.meshes,
            versions={},
            metadata=record.metadata,
            algorithm=_ALGORITHM,
            files=files | {layouts[0]: FileRecord(len(parts[0].layout), "")},
            index=layouts[0],
            rest=next(name for name in record.rest if name.endswith(".json")),
            rest_pt=next((name for name in record.rest if name.endswith(".pt")), None),
            sequence=record.sequence,
        )
        where = f"{folder.path} (step {record.step} in memory)"
        super().__init__(folder, Manifest.from_bytes(manifest.to_bytes(), where), check_bytes=False)
        self.agreed = True
        self._parts = parts

    @property
    def address(self) -> str:
        return f"{self.folder.address} (step {self.manifest.step} in memory)"

    def same_save(self) -> None:
        """Do nothing: a state that ranks agreed on is not written over while it is read."""

    @functools.cached_property
    def index(self) -> Index:
        with only_checkpoint_errors(self.address):
            index = _merged(self._parts, self.address)
            check_index(index, self.manifest, self.address)
        return index


def _merged(parts: list[Part], where: str) -> Index:
    """Make one index of the layouts of several ranks; names over the same bytes become aliases."""
    tensors: dict[str, TensorRecord] = {}
    chunks: dict[str, dict[tuple[int, ...], Chunk]] = {}
    for part in parts:
        for name, tensor in Index.from_json(read_json(part.layout, where), where).tensors.items():
            tensors.setdefault(name, tensor)
            for chunk in tensor.chunks:
                if math.prod(chunk.shape) or not tensor.numel:
                    place = chunks.setdefault(name, {})
                    place.setdefault(chunk.offset, dataclasses.replace(chunk, file=part.file))

    first: dict[Any, str] = {}
    index = Index({}, blocks={part.file: part.record.blocks for part in parts}, block_bytes=BLOCK_BYTES)
    for name, tensor in tensors.items():
        held = tuple(sorted(chunks.get(name, {}).values(), key=lambda chunk: chunk.offset))
        key = (tensor.shape, tensor.dtype, held) if tensor.numel else name
        target = first.setdefault(key, name)
        if target == name:
            index.tensors[name] = dataclasses.replace(tensor, chunks=held)
        else:
            index.aliases[name], index.alias_paths[name] = target, tensor.path
    return index

"""The layout of a checkpoint folder: file names, the manifest, the tensor index,
digests and dtype names.

One folder per checkpoint (see docs/checkpoint-format.md):

    manifest.json                          written last; a folder without it is not a checkpoint
    index.json                             every tensor: global shape, dtype, and which file holds which slice
    rest.json                              everything that is not a tensor, types kept by tags
    rest.pt                                what JSON cannot hold, read with torch.load(weights_only=True)
    tensors-00000-of-00004.safetensors     one per writing rank
    extra/...                              files stored along (model config, tokenizer)

The manifest lists the size and digest of every other file and carries a digest of
itself, so that a lost, cut, swapped or edited file is noticed before any number from it
is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

import torch
import xxhash

from smp_core.checkpoint.dtypes import dtype_from_name, dtype_name
from smp_core.checkpoint.untrusted import (
    EXTRA,
    HEADER_BYTES,
    MANIFEST_BYTES,
    CheckpointError as CheckpointError,
    Fields,
    file_name,
    is_plain,
    only_checkpoint_errors,
    read_json,
)

FORMAT = "torch-smp-checkpoint"
VERSION = 2
"""Of the format: it goes up when an older torch-smp would read a checkpoint wrongly.
Manifests are made in writer.py and in memory/save.py."""
MANIFEST = "manifest.json"
TEMPORARY_PREFIX = ".tmp-"
DIGESTS = ("xxh3", "sha256")


class Digest(Protocol):
    """The part of a hashlib object that is used here."""

    def update(self, data: Any, /) -> None: ...
    def hexdigest(self) -> str: ...


def new_digest(algorithm: str) -> Digest:
    """Make a running digest: ``xxh3`` (XXH3-128, more than 5 GB/s on one core) or
    ``sha256`` (slower, cryptographic).

    Raises:
        CheckpointError: another name.
    """
    # XXH3 finds accidents only: an edit on purpose can come with a new digest.
    if algorithm == "xxh3":
        return xxhash.xxh3_128()
    if algorithm == "sha256":
        return hashlib.sha256()
    raise CheckpointError(
        f"digest={algorithm!r} is not known; allowed: {', '.join(DIGESTS)}"
    )


def digest_of(data: bytes, algorithm: str) -> str:
    """Compute the hexadecimal digest of a byte string."""
    digest = new_digest(algorithm)
    digest.update(data)
    return digest.hexdigest()


@dataclass(frozen=True)
class FileRecord:
    """The record of a file of a checkpoint: its size in bytes and its digest; for
    tensor files also those of its header.
    """

    bytes: int
    digest: str
    header_bytes: int = 0
    header_digest: str = ""

    def size_problem(self, where: str, size: int | None) -> str | None:
        """Describe how a file's size (None: it is missing) differs from the recorded
        one; None where it does not."""
        if size is None:
            return f"{where} is missing"
        if size == self.bytes:
            return None
        return (
            f"{where} has {size} bytes, the manifest says {self.bytes}: it is damaged"
        )


@dataclass(frozen=True)
class Chunk:
    """The record of a slice of a tensor: its place in the tensor (offset, shape) and
    in a file (the entry's name in the safetensors header, the range of bytes)."""

    file: str
    entry: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class TensorRecord:
    """The record of a tensor of a checkpoint: global shape, dtype, its path in the
    saved state, its slices."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    path: tuple[Any, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        """The number of elements of the unsharded tensor."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The size of the unsharded tensor in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Index:
    """The index of all tensors of a checkpoint by name.

    Attributes:
        tensors: name -> record.
        aliases: name -> name of the tensor that shares its storage.
        alias_paths: name of an alias -> its path in the saved state.
        blocks: tensor file -> digests of its blocks, one behind the other; empty for a
            state in memory.
        block_bytes: bytes of a block.
    """

    tensors: dict[str, TensorRecord]
    aliases: dict[str, str] = field(default_factory=dict)
    alias_paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    blocks: dict[str, str] = field(default_factory=dict)
    block_bytes: int = 1

    def record(self, name: str) -> TensorRecord:
        """Return the record of a tensor, or of the tensor that an alias stands for."""
        return self.tensors[self.aliases.get(name, name)]

    def names(self) -> list[str]:
        """List every name, aliases included, in saved order."""
        return [*self.tensors, *self.aliases]

    def names_in(self, file: str, begin: int, end: int) -> list[str]:
        """List the tensors that have bytes in a range of a file."""
        # A range that failed its check may touch several tensors: all are named.
        found = []
        for name, record in self.tensors.items():
            if any(
                chunk.file == file and chunk.begin < end and begin < chunk.end
                for chunk in record.chunks
            ):
                found.append(name)
        return found

    def by_path(self) -> dict[tuple[Any, ...], str]:
        """Map each path in the saved state to its name."""
        names = {record.path: name for name, record in self.tensors.items()}
        # The same tensor can be saved at several paths; each of them finds it.
        aliases = {path: name for name, path in self.alias_paths.items()}
        return names | aliases

    def to_json(self) -> dict[str, Any]:
        """Return the content of index.json: slices and places, no values."""
        tensors = {}
        for name, record in self.tensors.items():
            tensors[name] = {
                "dtype": dtype_name(record.dtype),
                "shape": list(record.shape),
                "path": path_to_json(record.path),
                **optimizer_part(record.path),
                "chunks": [_chunk_to_json(chunk) for chunk in record.chunks],
            }
        # Tied tensors have no bytes of their own; each keeps its own path, so that a
        # template with either name is filled.
        aliases = {
            name: {"tensor": target, "path": path_to_json(self.alias_paths[name])}
            for name, target in self.aliases.items()
        }
        blocks = {"bytes": self.block_bytes, "files": self.blocks}
        return {
            "format": FORMAT,
            "version": VERSION,
            "tensors": tensors,
            "aliases": aliases,
            "blocks": blocks,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str) -> Index:
        """Parse the content of index.json. Whether it fits the files is checked by
        smp_core.checkpoint.coverage.

        Raises:
            CheckpointError: a field is missing or of another type; an alias of nothing.
        """
        # Everything here comes from a file that may be damaged or hostile: Fields
        # raises where a value has another type than expected.
        top = Fields(data, where)
        tensors = {
            name: _tensor_record(Fields(entry, f"{where}: {name}"))
            for name, entry in top.get("tensors", dict).items()
        }
        aliases, paths = {}, {}
        for name, entry in top.get("aliases", dict).items():
            alias = Fields(entry, f"{where}: {name}")
            aliases[name] = alias.text("tensor")
            paths[name] = path_from_json(alias.get("path", list))
            if aliases[name] not in tensors or name in tensors:
                raise CheckpointError(
                    f"{where} is damaged: {name} shares memory with {aliases[name]}, which is none"
                )
        # The most that is accepted bounds the memory that checking one block takes.
        blocks = Fields(top.get("blocks", dict), where)
        return cls(
            tensors,
            aliases,
            paths,
            blocks.text_map("files"),
            blocks.count("bytes", most=1 << 28, least=1),
        )


def _chunk_to_json(chunk: Chunk) -> dict[str, Any]:
    return {
        "file": chunk.file,
        "entry": chunk.entry,
        "offset": list(chunk.offset),
        "shape": list(chunk.shape),
        "bytes": [chunk.begin, chunk.end],
    }


def _tensor_record(entry: Fields) -> TensorRecord:
    chunks = []
    for content in entry.get("chunks", list):
        chunk = Fields(content, entry.where)
        # Too few numbers become zeros, which smp_core.checkpoint.coverage refuses.
        begin, end = (*chunk.sizes("bytes"), 0, 0)[:2]
        # A name of a file must not lead out of the folder.
        name = file_name(chunk.text("file"), entry.where)
        chunks.append(
            Chunk(
                name,
                chunk.text("entry"),
                chunk.sizes("offset"),
                chunk.sizes("shape"),
                begin,
                end,
            )
        )
    dtype = dtype_from_name(entry.text("dtype"))
    return TensorRecord(
        entry.sizes("shape"),
        dtype,
        path_from_json(entry.get("path", list)),
        tuple(chunks),
    )


def optimizer_part(path: tuple[Any, ...]) -> dict[str, Any]:
    """Describe the optimizer state at a path ``(..., "state", parameter, name)``; empty
    for other paths.

    The result is ``{"optimizer_state": {"parameter": ..., "name": ...}}``.
    """
    if len(path) >= 4 and path[-3] == "state":
        return {"optimizer_state": {"parameter": path[-2], "name": path[-1]}}
    return {}


def path_to_json(path: tuple[Any, ...]) -> list[Any]:
    """Return the keys of a path as JSON: strings and integers as they are, a tuple key
    as ``{"tuple": [...]}``."""
    return [
        {"tuple": path_to_json(key)} if isinstance(key, tuple) else key for key in path
    ]


def path_from_json(path: list[Any]) -> tuple[Any, ...]:
    """Parse a path from JSON: the inverse of :func:`path_to_json`.

    Raises:
        CheckpointError: a key that is no string, number or tuple.
    """
    keys = []
    # JSON has no tuples, so a tuple key is marked as one; a dict key of another kind
    # cannot have been written.
    for key in path:
        nested = isinstance(key, dict) and isinstance(key.get("tuple"), list)
        if not nested and not isinstance(key, (str, int, float, type(None))):
            raise CheckpointError(
                f"a path is damaged: {key!r} is no key of a dict or list"
            )
        keys.append(path_from_json(key["tuple"]) if nested else key)
    return tuple(keys)


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json: facts about the save, and the size and digest of
    every file.

    Attributes:
        id: random identity of this save; also in the header of every tensor file.
        created: UTC time, ISO 8601.
        step: the optimizer step, when the caller gave ``metadata["step"]``.
        world_size: ranks that saved.
        meshes: device meshes of the DTensors saved by rank 0 (axis names, shape,
            ranks).
        versions: torch, python, torch-smp, ...
        metadata: the caller's own dictionary.
        algorithm: digest algorithm of all files.
        files: every other file of the folder.
        index, rest, rest_pt, rest_pickle: names of these files (the last two may be
            absent).
        pickled: where in the state the values in ``rest_pickle`` stand; only saved with
            ``allow_pickle=True``.
        extra: name -> file of the files stored along.
        sequence: higher than those of the checkpoints that lay beside it when it was
            saved.
    """

    id: str
    created: str
    step: int | None
    world_size: int
    meshes: list[dict[str, Any]]
    versions: dict[str, str]
    metadata: dict[str, Any]
    algorithm: str
    files: dict[str, FileRecord]
    index: str
    rest: str
    rest_pt: str | None = None
    rest_pickle: str | None = None
    pickled: list[str] = field(default_factory=list)
    extra: dict[str, str] = field(default_factory=dict)
    sequence: int = 0

    @property
    def age(self) -> tuple[int, int, str]:
        """The order of checkpoints in a folder, by what does not depend on clocks where
        there is anything else."""
        return self.sequence, self.step or 0, self.created

    @property
    def total_bytes(self) -> int:
        """The size of all files but the manifest, in bytes."""
        return sum(record.bytes for record in self.files.values())

    def to_bytes(self) -> bytes:
        """Return the file's content, with the digest of the other entries as its last
        entry."""
        # The digest is computed over the sorted compact form, so indentation and the
        # order of keys do not matter to it.
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        content["manifest_digest"] = digest_of(_canonical(content), "xxh3")
        return json.dumps(content, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Parse and check the file's content.

        Raises:
            CheckpointError: not JSON, not of this format and version, or changed since
                it was written.
        """
        content = read_json(data, where, MANIFEST_BYTES)
        # Another program's file and another version have messages of their own, before
        # the digest is compared.
        if content.get("format") != FORMAT:
            raise CheckpointError(f"{where} is not the manifest of a {FORMAT} folder")
        if content.get("version") != VERSION:
            raise CheckpointError(
                f"{where} has format version {content.get('version')!r}; this torch-smp reads version {VERSION}: "
                "install the version that wrote it (see 'versions' in the file)"
            )
        expected = content.pop("manifest_digest", None)
        if expected != digest_of(_canonical(content), "xxh3"):
            raise CheckpointError(
                f"{where} is damaged or was edited: its content does not fit its own digest"
            )
        # Fields that this version does not know are left out: a newer minor release may
        # add some without a new VERSION.
        with only_checkpoint_errors(where):
            known = {each.name for each in fields(cls)}
            content["files"] = _file_records(
                Fields(content, where).get("files", dict), where
            )
            _check_facts(Fields(content, where))
            return cls(**{key: value for key, value in content.items() if key in known})


def _file_records(files: dict[str, Any], where: str) -> dict[str, FileRecord]:
    records = {}
    for name, content in files.items():
        record = Fields(content, f"{where}: {file_name(name, where)}")
        size = record.count("bytes", most=1 << 62)
        # A header is parsed as JSON, so its size is bounded before it is read.
        header = record.count("header_bytes", most=min(size, HEADER_BYTES))
        records[name] = FileRecord(
            size, record.text("digest"), header, record.text("header_digest")
        )
    if MANIFEST in records:
        raise CheckpointError(f"{where} is damaged: it lists itself")
    return records


def _check_facts(manifest: Fields) -> None:
    """Check the types of a manifest's other fields, and that the files which it names
    are listed in it."""
    # Facts about the save.
    content = manifest.content
    new_digest(manifest.text("algorithm"))
    if not re.fullmatch(r"[0-9A-Za-z-]{1,80}", manifest.text("id")):
        raise CheckpointError(f"{manifest.where} is damaged: id {content['id']!r}")
    (
        manifest.text("created"),
        manifest.ranks("world_size"),
        manifest.text_map("versions"),
    )
    manifest.count("sequence", most=1 << 62)
    # Facts for loaders.
    metadata = manifest.get("metadata", dict)
    wrong = [
        key
        for key in ("module_prefix", "model_key")
        if not isinstance(metadata.get(key, ""), (str, type(None)))
    ]
    if wrong or not isinstance(content.get("step"), (int, type(None))):
        raise CheckpointError(
            f"{manifest.where} is damaged: {', '.join(wrong) or 'step'} is of another type"
        )
    # Only that they are dicts: meshes are printed, nothing is computed from them.
    for mesh in manifest.get("meshes", list):
        Fields(mesh, f"{manifest.where}: meshes")
    manifest.texts("pickled") if "pickled" in content else None
    # Files that are named have to be listed.
    extra = manifest.text_map("extra") if "extra" in content else {}
    for name, stored in extra.items():
        if not is_plain(name) or not stored.startswith(EXTRA):
            raise CheckpointError(
                f"{manifest.where} names the extra file {name!r} in {stored!r}; not trusted"
            )
    parts = [
        manifest.text("index"),
        manifest.text("rest"),
        content.get("rest_pt"),
        content.get("rest_pickle"),
    ]
    for part in [*(part for part in parts if part is not None), *extra.values()]:
        if part not in content["files"]:
            raise CheckpointError(
                f"{manifest.where} is damaged: {part!r} is not among its files"
            )


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()

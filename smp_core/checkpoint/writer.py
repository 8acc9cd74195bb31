"""Saving: torch's DCP planner decides who writes which slice (replicas share the work), our storage writer streams the
slices into one safetensors file per rank, and rank 0 commits the whole with one rename.

Order of a save: (1) every rank names its tensors; (2) rank 0 encodes the rest, so that a value that cannot be saved is
refused before anything is written; (3) rank 0 makes the temporary folder; (4) plan, write, fsync on all ranks;
(5) rank 0 writes index, rest and manifest and commits. An error at any point is raised on all ranks and leaves the
previous checkpoint as it was.
"""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
import logging
import os
import platform
import warnings
from collections.abc import Iterator, Mapping
from importlib import metadata as package_metadata
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from smp_core.checkpoint.layout import (
    FORMAT,
    CheckpointError,
    Chunk,
    FileRecord,
    Index,
    Manifest,
    TensorRecord,
    new_digest,
)
from smp_core.checkpoint.local_folder import new_save_id
from smp_core.checkpoint.ranks import Ranks
from smp_core.checkpoint.save_plan import SmpSavePlanner
from smp_core.checkpoint.storage import Transaction, open_transaction
from smp_core.checkpoint.tensor_file import Entry, write_tensor_file
from smp_core.checkpoint.tree import EncodedRest, Path, encode_rest, name_tensors

logger = logging.getLogger("smp")

Named = dict[Path, tuple[str, torch.Tensor]]


def save_checkpoint(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra_files: Mapping[str, bytes | str] | None = None,
    per_rank: Any = None,
    overwrite: bool = True,
    digest: str = "xxh3",
    allow_pickle: bool = False,
) -> None:
    """Save a nested state as one checkpoint folder. Collective over all ranks of the group.

    Args:
        path: the folder to make: a local path or an fsspec address (``s3://...``).
        state: nested dicts, lists and tuples. Tensors may be DTensors (sharded over any mesh, replicas included), or
            plain tensors that are the same on every rank; the rest may be anything that
            ``torch.load(weights_only=True)`` would read, and is taken from rank 0.
        process_group: the ranks that save together; None: all. It needs a CPU or CUDA backend.
        metadata: JSON-able facts for the manifest; ``step`` (int) and ``module_prefix`` (str) are understood.
        extra_files: name -> content of small files to keep along (``config.json``, tokenizer files).
        per_rank: something that differs on each rank (random states); comes back as a list by rank from
            :func:`smp_core.checkpoint.read_per_rank`.
        overwrite: replace a checkpoint that is at ``path``; at every instant a whole one stays there.
        digest: ``"xxh3"`` or ``"sha256"``.
        allow_pickle: also save values that only unrestricted unpickling can read back; loading needs the same word.

    Raises:
        CheckpointError: on every rank when any rank failed; what was at ``path`` before is untouched.
    """
    ranks = Ranks(process_group)
    what = f"checkpoint {os.fspath(path)} was not saved"
    named = ranks.together(what, lambda: _named_tensors(state, digest))
    everyone = ranks.gather(per_rank)
    transaction = open_transaction(path)

    rest: EncodedRest | None = None

    def prepare() -> str:
        # On rank 0 only; the other ranks learn the identity of the save.
        nonlocal rest
        rest = _encode(state, named, everyone, allow_pickle)
        _check_metadata(metadata)
        save_id = new_save_id()
        transaction.begin(save_id, overwrite)
        return save_id

    try:
        save_id = ranks.on_first(what, prepare)
        ranks.together(what, lambda: None if ranks.rank == 0 else transaction.join(save_id))
        facts = _Facts(save_id, dict(metadata or {}), dict(extra_files or {}), rest, digest, ranks.size, _meshes(named))
        writer = SmpStorageWriter(transaction, facts, ranks.rank, {name: path for path, (name, _) in named.items()})
        _run_dcp_save(dict(named.values()), writer, ranks)
    except BaseException as error:
        if ranks.rank == 0:
            transaction.abort()
        if isinstance(error, CheckpointException):
            raise CheckpointError(f"{what}: {_failures(error)}") from error
        if isinstance(error, Exception) and not isinstance(error, CheckpointError):
            raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error
        raise
    if ranks.rank == 0:
        logger.debug("checkpoint %s saved", os.fspath(path))


def _run_dcp_save(tensors: dict[str, torch.Tensor], writer: SmpStorageWriter, ranks: Ranks) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            tensors,
            storage_writer=writer,
            planner=SmpSavePlanner(),
            process_group=ranks.group,
            no_dist=not ranks.distributed,
        )


def _failures(error: CheckpointException) -> str:
    parts = []
    for rank, wrapped in sorted(error.failures.items()):
        cause = wrapped[0] if isinstance(wrapped, tuple) else wrapped
        text = str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"
        parts.append(f"rank {rank}: {text}")
    return "; ".join(parts[:4])


def _named_tensors(state: Mapping[str, Any], digest: str) -> Named:
    new_digest(digest)  # refuses an unknown name
    if not isinstance(state, Mapping):
        raise CheckpointError(f"state must be a dict, not {type(state).__name__}")
    named = name_tensors(dict(state))
    for name, tensor in named.values():
        if isinstance(tensor, DTensor):
            if any(placement.is_partial() for placement in tensor.placements):
                raise CheckpointError(f"{name} is a partial sum over its mesh; reduce it first (redistribute)")
            tensor = tensor.to_local()
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise CheckpointError(f"{name} is {tensor.layout}; only dense tensors can be saved: call .to_dense()")
        if tensor.is_meta:
            raise CheckpointError(f"{name} is on the meta device: it has no values to save")
    return named


def _encode(state: Mapping[str, Any], named: Named, per_rank: list[Any], allow_pickle: bool) -> EncodedRest:
    names = {("state", *path): name for path, (name, _) in named.items()}
    whole = {"state": dict(state), "per_rank": per_rank}
    return encode_rest(whole, names, allow_pickle)


def _check_metadata(metadata: Mapping[str, Any] | None) -> None:
    for key, value in (metadata or {}).items():
        try:
            same = json.loads(json.dumps({key: value})) == {key: value}
        except (TypeError, ValueError):
            same = False
        if not same:
            raise CheckpointError(f"metadata[{key!r}] must be plain JSON (str keys, lists, no tuples); got {value!r}")


def _meshes(named: Named) -> list[dict[str, Any]]:
    meshes = {}
    for _, tensor in named.values():
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            ranks = mesh.mesh.flatten().tolist()
            described = {"axes": list(mesh.mesh_dim_names or []), "shape": list(mesh.mesh.shape), "ranks": ranks}
            meshes[json.dumps(described)] = described
    return list(meshes.values())


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What the manifest says beyond the tensors; ``rest`` is None on ranks other than 0."""

    save_id: str
    metadata: dict[str, Any]
    extra_files: dict[str, bytes | str]
    rest: EncodedRest | None
    algorithm: str
    world_size: int
    meshes: list[dict[str, Any]]


class SmpStorageWriter(StorageWriter):
    """DCP storage that writes one safetensors file per rank and commits on the coordinator.

    Args:
        transaction: the save, already begun or joined.
        facts: what goes into the manifest.
        rank: this rank in the saving group.
        paths: tensor name -> path in the state.
    """

    def __init__(self, transaction: Transaction, facts: _Facts, rank: int, paths: dict[str, Path]) -> None:
        self.transaction = transaction
        self.facts = facts
        self.rank = rank
        self.paths = paths

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: one writer serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the transaction is open."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # Wide items first keeps every entry aligned to its item size.
        items = sorted(plan.items, key=lambda item: -_entry(item, "").dtype.itemsize)
        results: list[WriteResult] = []
        if items:
            name = self.transaction.file_name(f"tensors-{self.rank:05d}-of-{self.facts.world_size:05d}", ".safetensors")
            entries = _entries(items)
            header = {"format": "pt", FORMAT: self.facts.save_id, "file": name}
            sink = self.transaction.create(name, self.facts.algorithm)

            def values() -> Iterator[torch.Tensor]:
                for item in items:
                    value = planner.resolve_data(item)
                    assert isinstance(value, torch.Tensor)
                    yield value

            record, ranges = write_tensor_file(sink, entries, values(), header)
            for item, entry, (begin, end) in zip(items, entries, ranges, strict=True):
                offset = tuple(item.index.offset or ())
                chunk = Chunk(name, entry.key, offset, entry.shape, begin, end)
                results.append(WriteResult(item.index, entry.bytes, (chunk, record)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[str, FileRecord] = {}
        chunks: dict[str, list[Chunk]] = {}
        for result in (result for rank in results for result in rank):
            chunk, record = result.storage_data
            files[chunk.file] = record
            chunks.setdefault(result.index.fqn, []).append(chunk)
        index = _index(metadata, chunks, self.paths)
        _finish(self.transaction, self.facts, index, files)


def _entry(item: WriteItem, key: str) -> Entry:
    assert item.tensor_data is not None and item.tensor_data.chunk is not None
    return Entry(key, tuple(item.tensor_data.chunk.sizes), item.tensor_data.properties.dtype)


def _entries(items: list[WriteItem]) -> list[Entry]:
    entries, taken = [], {"__metadata__"}
    for item in items:
        assert item.tensor_data is not None
        entry = _entry(item, item.index.fqn)
        if entry.shape != tuple(item.tensor_data.size) or entry.key in taken:
            entry = dataclasses.replace(entry, key=f"{item.index.fqn}@{','.join(map(str, item.index.offset or ()))}")
        while entry.key in taken:
            entry = dataclasses.replace(entry, key=entry.key + "'")
        taken.add(entry.key)
        entries.append(entry)
    return entries


def _index(metadata: Metadata, chunks: dict[str, list[Chunk]], paths: dict[str, Path]) -> Index:
    tensors = {}
    for name, record in metadata.state_dict_metadata.items():
        assert isinstance(record, TensorStorageMetadata)
        ordered = tuple(sorted(chunks[name], key=lambda chunk: chunk.offset))
        path = paths.get(name, (name,))
        tensors[name] = TensorRecord(tuple(record.size), record.properties.dtype, path, ordered)
    aliases: dict[str, str] = metadata.planner_data
    return Index(tensors, aliases, {name: paths.get(name, (name,)) for name in aliases})


def _finish(transaction: Transaction, facts: _Facts, index: Index, files: dict[str, FileRecord]) -> None:
    """Write everything but the tensors, then commit. Rank 0 only."""
    assert facts.rest is not None

    def write(stem: str, suffix: str, data: bytes) -> str:
        name = transaction.file_name(stem, suffix)
        sink = transaction.create(name, facts.algorithm)
        try:
            sink.write(data)
            files[name] = sink.close()
        except BaseException:
            sink.abandon()
            raise
        return name

    def torch_file(stem: str, content: dict[str, Any]) -> str | None:
        if not content:
            return None
        buffer = io.BytesIO()
        torch.save(content, buffer)
        return write(stem, ".pt", buffer.getvalue())

    extra = {}
    for name, content in facts.extra_files.items():
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise CheckpointError(f"extra_files[{name!r}]: only plain file names, no directories")
        stem, suffix = os.path.splitext(name)
        data = content.encode() if isinstance(content, str) else content
        extra[name] = write(f"extra/{stem}", suffix, data)
    step = facts.metadata.get("step")
    manifest = Manifest(
        id=facts.save_id,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        step=step if isinstance(step, int) else None,
        world_size=facts.world_size,
        meshes=facts.meshes,
        versions=_versions(),
        metadata=facts.metadata,
        algorithm=facts.algorithm,
        index=write("index", ".json", json.dumps(index.to_json()).encode()),
        rest=write("rest", ".json", json.dumps({"format": FORMAT, "tree": facts.rest.tree}).encode()),
        rest_pt=torch_file("rest", facts.rest.plain),
        rest_pickle=torch_file("rest-pickle", facts.rest.pickle),
        pickled=facts.rest.pickled_paths,
        extra=extra,
        files=files,
    )
    transaction.commit(manifest.to_bytes())


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("torch-smp", "safetensors"):
        try:
            versions[package] = package_metadata.version(package)
        except package_metadata.PackageNotFoundError:
            continue
    return versions

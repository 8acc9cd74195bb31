"""The writer of checkpoints: torch's DCP planner gives each slice to one rank (replicas
share the work), our storage writer streams the slices into one safetensors file per
rank, and rank 0 commits all with one rename.

Order of a save:

1. Every rank names its tensors.
2. Rank 0 encodes the rest, so that a value that cannot be saved is refused before
   anything is written.
3. Rank 0 makes the temporary folder.
4. All ranks plan, write and fsync.
5. Rank 0 writes index, rest and manifest, and commits.

An error at any point is raised on all ranks and leaves the previous checkpoint as it
was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import json
import logging
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata as package_metadata
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from smp_core.checkpoint.coverage import is_covered
from smp_core.checkpoint.folders.addresses import open_transaction
from smp_core.checkpoint.folders.file_system import new_save_id
from smp_core.checkpoint.folders.storage import BLOCK_BYTES, Transaction
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
from smp_core.checkpoint.ranks import Ranks, failures_in_words
from smp_core.checkpoint.save_plan import SmpSavePlanner
from smp_core.checkpoint.sequence import next_sequence
from smp_core.checkpoint.staging import Staged, stage
from smp_core.checkpoint.tensor_file import Entry, place_in_file, write_tensor_file
from smp_core.checkpoint.tree import EncodedRest, Path, merge_rest
from smp_core.checkpoint.untrusted import is_plain
from smp_core.checkpoint.verify import check_written
from smp_core.outside import StrPath, long_wait
from smp_core.run_log import note

logger = logging.getLogger("smp")


def save_checkpoint(
    path: StrPath,
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
    """Save a nested state as one checkpoint folder. Collective over all ranks of the
    group.

    Args:
        path: the folder to make: a local path or an fsspec address (``s3://...``).
        state: nested dicts, lists and tuples. Tensors may be DTensors (sharded over any
            mesh, replicas included), or plain tensors that are the same on every rank
            (where they differ, they are rank 0's, but for large weights and optimizer
            states, which are the same); the rest may be anything that
            ``torch.load(weights_only=True)`` would read, and is taken from rank 0.
        process_group: the ranks that save together; None: all. It needs a CPU or CUDA
            backend.
        metadata: JSON-able facts for the manifest; ``step`` (int) and ``module_prefix``
            (str) are understood.
        extra_files: name -> content of small files to keep along (``config.json``,
            tokenizer files).
        per_rank: something that differs on each rank (random states); comes back as a
            list by rank from :func:`smp_core.checkpoint.read_per_rank`.
        overwrite: replace a checkpoint that is at ``path``; at every instant a complete
            one stays there.
        digest: ``"xxh3"`` or ``"sha256"``.
        allow_pickle: also save values that only unrestricted unpickling can read back;
            loading needs the same word.

    Raises:
        CheckpointError: on every rank when any rank failed; a checkpoint at ``path`` is
            then untouched.
    """
    begin = time.perf_counter()
    ranks = Ranks(process_group)
    options = SaveOptions(
        dict(metadata or {}), dict(extra_files or {}), overwrite, digest
    )
    with long_wait(f"saving {os.fspath(path)}", here=ranks.rank == 0):
        write_staged(
            path,
            lambda: stage(state, per_rank, ranks.rank, allow_pickle),
            options,
            ranks,
        )
    # A blocking save stalls training for all of its time.
    note(
        "checkpoint",
        path=os.fspath(path),
        stall_seconds=time.perf_counter() - begin,
        behind=False,
    )


def config_files(model: torch.nn.Module) -> dict[str, str]:
    """Return ``config.json`` and ``generation_config.json`` of a Transformers model, to
    keep along with its weights so that an export is complete."""
    files = {}
    config: Any = getattr(model, "config", None)
    if callable(getattr(config, "to_json_string", None)):
        files["config.json"] = config.to_json_string(use_diff=False)
    generation: Any = getattr(model, "generation_config", None)
    if callable(getattr(generation, "to_json_string", None)):
        files["generation_config.json"] = generation.to_json_string()
    return files


@dataclasses.dataclass(frozen=True)
class SaveOptions:
    """The arguments of :func:`save_checkpoint` that concern the writing."""

    metadata: dict[str, Any]
    extra_files: dict[str, bytes | str]
    overwrite: bool
    digest: str


def not_saved(path: StrPath) -> str:
    """Return the beginning of messages about a failed save."""
    return f"checkpoint {os.fspath(path)} was not saved"


def write_staged(
    path: StrPath,
    make_staged: Callable[[], Staged],
    options: SaveOptions,
    ranks: Ranks,
) -> None:
    """Write and commit the parts that all ranks have staged. Collective.

    Args:
        path: the checkpoint folder.
        make_staged: returns this rank's part, or raises an error that is to be raised
            on all ranks.
        options: the options of the save.
        ranks: the ranks that save together.

    Raises:
        CheckpointError: as :func:`save_checkpoint`.
    """
    what = not_saved(path)
    # Staging may fail on one rank only: the exchange raises its error on all of them.
    # What differs by rank comes to rank 0 by the same exchange.
    (transaction, staged), own = ranks.together(
        what, lambda: (open_transaction(path), make_staged()), lambda mine: mine[1].own
    )

    def prepare() -> tuple[str, str]:
        # Options are checked, and the folder is made, by rank 0 alone; its error is
        # raised on all ranks.
        _check_options(options)
        save_id = new_save_id()
        transaction.begin(save_id, options.overwrite)
        return save_id, transaction.mark

    try:
        # The other ranks join the folder by its identity, in
        # SmpStorageWriter.write_data.
        save_id, mark = ranks.on_first(what, prepare)
        rest = None if staged.rest is None else merge_rest(staged.rest, own)
        writer = SmpStorageWriter(
            transaction, (save_id, mark), staged, rest, options, ranks
        )
        _run_dcp_save(staged.tensors, writer, ranks)
    except BaseException as error:
        # DCP has gathered the failures of all ranks, so none is still writing.
        if ranks.rank == 0:
            transaction.abort()
        if isinstance(error, CheckpointException):
            # Ctrl-C and exit keep their types; everything else becomes a
            # CheckpointError.
            failures = [
                f"rank {rank}: {text}"
                for rank, text in failures_in_words(error).items()
            ]
            raise CheckpointError(f"{what}: {'; '.join(failures[:4])}") from error
        if isinstance(error, Exception) and not isinstance(error, CheckpointError):
            raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error
        raise
    if ranks.rank == 0:
        logger.debug("checkpoint %s saved", os.fspath(path))


def _run_dcp_save(
    tensors: dict[str, Any], writer: SmpStorageWriter, ranks: Ranks
) -> None:
    with contextlib.ExitStack() as quiet:
        # Only then does DCP warn; filters are global, so they are left alone otherwise.
        if not ranks.distributed:
            quiet.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            tensors,
            storage_writer=writer,
            planner=SmpSavePlanner(),
            process_group=ranks.group,
            no_dist=not ranks.distributed,
        )


def _check_options(options: SaveOptions) -> None:
    new_digest(options.digest)  # refuses an unknown name
    for name in options.extra_files:
        if not is_plain(name):
            raise CheckpointError(
                f"extra_files[{name!r}]: only plain file names, no directories"
            )
    for key, value in options.metadata.items():
        try:
            # A tuple would come back as a list, so what JSON changes is refused.
            same = json.loads(json.dumps({key: value})) == {key: value}
        except (TypeError, ValueError):
            same = False
        if not same:
            raise CheckpointError(
                f"metadata[{key!r}] must be plain JSON (str keys, lists, no tuples); got {value!r}"
            )


class SmpStorageWriter(StorageWriter):
    """A storage of DCP that writes one safetensors file per rank and commits on the
    coordinator.

    Args:
        transaction: the save, already begun or joined.
        identity: of the save, and its mark in names of files.
        staged: this rank's tensors and where they stand in the state.
        rest: the rest of the state and of all ranks; None on ranks other than 0.
        options: the options of the save.
        ranks: the ranks that save together.
    """

    # Rank 0 made the folder, the others find it here. All ranks call write_data, those
    # with nothing to write too.
    def __init__(
        self,
        transaction: Transaction,
        identity: tuple[str, str],
        staged: Staged,
        rest: EncodedRest | None,
        options: SaveOptions,
        ranks: Ranks,
    ) -> None:
        self.transaction = transaction
        self.save_id, self.mark = identity
        self.staged = staged
        self.rest = rest
        self.options = options
        self.ranks = ranks

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Do nothing: one writer serves one save."""

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the transaction is open."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        return True

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Future[list[WriteResult]]:
        if self.ranks.rank > 0:
            self.transaction.join(self.save_id, self.mark)
        # All items of a rank lie in one file, in an order that is kept by all saves.
        items = sorted(
            plan.items, key=lambda item: place_in_file(_entry(item, "").bytes)
        )
        results: list[WriteResult] = []
        if items:
            name = self.transaction.file_name(
                f"tensors-{self.ranks.rank:05d}-of-{self.ranks.size:05d}",
                ".safetensors",
            )
            entries = _entries(items)
            header = {"format": "pt", FORMAT: self.save_id, "file": name}
            sink = self.transaction.create(name, self.options.digest)

            def values() -> Iterator[Tensor]:
                for item in items:
                    value = planner.resolve_data(item)
                    assert isinstance(value, Tensor)
                    yield value

            record, ranges = write_tensor_file(sink, entries, values(), header)
            for item, entry, (begin, end) in zip(items, entries, ranges, strict=True):
                offset = tuple(item.index.offset or ())
                chunk = Chunk(name, entry.key, offset, entry.shape, begin, end)
                results.append(
                    WriteResult(item.index, entry.bytes, (chunk, record, sink.blocks))
                )
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[str, FileRecord] = {}
        blocks: dict[str, str] = {}
        chunks: dict[str, list[Chunk]] = {}
        for result in (result for rank in results for result in rank):
            chunk, record, digests = result.storage_data
            files[chunk.file], blocks[chunk.file] = record, digests
            chunks.setdefault(result.index.fqn, []).append(chunk)
        index = _index(metadata, chunks, self.staged.paths)
        for name, record in index.tensors.items():
            if not is_covered(record):
                raise CheckpointError(
                    f"{name} of shape {list(record.shape)} is not all on the ranks that save it: save over all ranks "
                    "of its mesh (process_group=None), and bring it on each of them"
                )
        self._commit(
            dataclasses.replace(index, blocks=blocks, block_bytes=BLOCK_BYTES), files
        )

    def _commit(self, index: Index, files: dict[str, FileRecord]) -> None:
        """Write everything but the tensors, then commit."""
        assert self.rest is not None, "only rank 0 commits"

        def write(stem: str, suffix: str, data: bytes) -> str:
            name = self.transaction.file_name(stem, suffix)
            sink = self.transaction.create(name, self.options.digest)
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

        # Files that are kept along, then the manifest with the digests of all files.
        extra = {}
        for name, content in self.options.extra_files.items():
            stem, suffix = os.path.splitext(name)
            extra[name] = write(
                f"extra/{stem}",
                suffix,
                content.encode() if isinstance(content, str) else content,
            )
        step = self.options.metadata.get("step")
        manifest = Manifest(
            id=self.save_id,
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(
                timespec="microseconds"
            ),
            step=step if isinstance(step, int) else None,
            world_size=self.ranks.size,
            meshes=self.staged.meshes,
            versions=_versions(),
            metadata=self.options.metadata,
            algorithm=self.options.digest,
            index=write("index", ".json", json.dumps(index.to_json()).encode()),
            rest=write(
                "rest",
                ".json",
                json.dumps({"format": FORMAT, "tree": self.rest.tree}).encode(),
            ),
            rest_pt=torch_file("rest", self.rest.plain),
            rest_pickle=torch_file("rest-pickle", self.rest.pickle),
            pickled=self.rest.pickled_paths,
            extra=extra,
            files=files,
            sequence=next_sequence(self.transaction.address),
        )
        check_written(self.transaction.written(), manifest)
        self.transaction.commit(manifest.to_bytes())


def _entry(item: WriteItem, key: str) -> Entry:
    assert item.tensor_data is not None and item.tensor_data.chunk is not None
    return Entry(
        key, tuple(item.tensor_data.chunk.sizes), item.tensor_data.properties.dtype
    )


def _entries(items: list[WriteItem]) -> list[Entry]:
    entries, taken = [], {"__metadata__"}
    for item in items:
        assert item.tensor_data is not None
        entry = _entry(item, item.index.fqn)
        if entry.shape != tuple(item.tensor_data.size) or entry.key in taken:
            entry = dataclasses.replace(
                entry,
                key=f"{item.index.fqn}@{','.join(map(str, item.index.offset or ()))}",
            )
        while entry.key in taken:
            entry = dataclasses.replace(entry, key=entry.key + "'")
        taken.add(entry.key)
        entries.append(entry)
    return entries


def _index(
    metadata: Metadata, chunks: dict[str, list[Chunk]], paths: dict[str, Path]
) -> Index:
    tensors = {}
    for name, record in metadata.state_dict_metadata.items():
        assert isinstance(record, TensorStorageMetadata)
        ordered = tuple(sorted(chunks[name], key=lambda chunk: chunk.offset))
        path = paths.get(name, (name,))
        tensors[name] = TensorRecord(
            tuple(record.size), record.properties.dtype, path, ordered
        )
    aliases: dict[str, str] = metadata.planner_data
    return Index(tensors, aliases, {name: paths.get(name, (name,)) for name in aliases})


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("torch-smp", "safetensors"):
        try:
            versions[package] = package_metadata.version(package)
        except package_metadata.PackageNotFoundError:
            continue
    return versions

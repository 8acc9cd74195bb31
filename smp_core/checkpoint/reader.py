"""The reader of checkpoints: torch's DCP load planner computes which stored slices
overlap which local shards; our storage reader fetches them from the safetensors files,
straight into the tensors of the template.

Nothing is unpickled but rest.pt (weights_only=True) and, when asked for by name,
rest-pickle.pt. Sizes of all files and the headers of the files in use are always
checked, the bytes of tensors while they are read; all digests before when asked, or
when something beside the folder shows that a save was interrupted.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from smp_core.checkpoint.layout import (
    CheckpointError,
    Chunk,
    Index,
    Manifest,
    TensorRecord,
)
from smp_core.checkpoint.opening import OpenCheckpoint, open_checkpoint
from smp_core.checkpoint.ranks import Ranks, failures_in_words
from smp_core.checkpoint.tensor_files import TensorFiles
from smp_core.checkpoint.tree import (
    DROP,
    Path,
    decode_rest,
    holds_tensor,
    iterate_tensors,
    path_text,
    subtree,
)
from smp_core.checkpoint.untrusted import only_checkpoint_errors
from smp_core.checkpoint.verify import open_checked
from smp_core.outside import StrPath, long_wait
from smp_core.torch_facts import CodedTensor, local_part

logger = logging.getLogger("smp")

_SHOWN = 5
_DECODED_BYTES = 1 << 30


def load_checkpoint(
    path: StrPath,
    state: dict[str, Any],
    *,
    strict: bool = True,
    only: Iterable[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    verify: str | None = "auto",
    allow_dtype_cast: bool = False,
    allow_pickle: bool = False,
) -> None:
    """Load a checkpoint in place into a nested state. Collective over all ranks of the
    group.

    Tensors of ``state`` (DTensors over any mesh, plain tensors, any world size) are
    filled in place. Parts of ``state`` that hold no tensor (``param_groups``, counters)
    are replaced by the saved values. Only the top-level keys that ``state`` has are
    loaded: ``{"state_dict": ...}`` loads the weights alone.

    Args:
        path: checkpoint folder or fsspec address.
        state: the template.
        strict: tensors missing in the checkpoint, or in the template (under its
            top-level keys), are errors; otherwise they keep their values and are
            logged.
        only: globs over tensor names (``["state_dict.encoder.*"]``): other tensors and
            values keep what they have.
        process_group: the ranks that load together; None: all.
        verify: ``"sizes"``, ``"digests"``, None, or ``"auto"``: sizes, and each byte of
            a tensor while it is read; all digests before, when an interrupted save lies
            alongside the folder.
        allow_dtype_cast: convert where the saved dtype differs, instead of refusing.
        allow_pickle: read values that were saved with ``allow_pickle=True``. This runs
            code from the file.

    Raises:
        CheckpointError: on every rank when any rank failed: missing, half, damaged or
            foreign folder, tensors that do not fit; the message names the first few.
    """
    # Every step below is collective; a rank that fails alone raises its error on all.
    ranks = Ranks(process_group)
    what = f"checkpoint {os.fspath(path)} was not loaded"
    globs = None if only is None else list(only)
    with long_wait(f"loading {os.fspath(path)}", here=ranks.rank == 0):
        opened = open_checked(path, verify, ranks, what)
        # Pairing compares names and shapes only, so a checkpoint that does not fit
        # changes no tensor.
        (tensors, replacements), _ = ranks.together(
            what,
            lambda: _match(
                opened, state, strict, globs, allow_dtype_cast, allow_pickle
            ),
        )
        try:
            for part in _in_parts(tensors):
                _fill(opened, part, ranks)
        except CheckpointException as error:
            # Usually all ranks fail alike; each text is shown once.
            texts = dict.fromkeys(failures_in_words(error).values())
            raise CheckpointError(f"{what}: {'; '.join(list(texts)[:3])}") from error
    # Values are replaced after all tensors have arrived: a failed load leaves them.
    for container, key, value in replacements:
        container[key] = tuple(value) if isinstance(value, _Items) else value


class _Items(list[Any]):
    """The items of a tuple, which take their saved values before they are one again."""


def _in_parts(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Divide tensors into those that are filled in place, all together, and groups of
    those that are stored as codes, which are filled decoded: of about a gigabyte whole,
    which all ranks share."""
    parts: list[dict[str, Tensor]] = [{}]
    room = 0
    for name, tensor in tensors.items():
        if not _is_coded(tensor):
            # Names and sizes of whole tensors are the same on every rank, so all ranks
            # make the same groups and call DCP equally often.
            parts[0][name] = tensor
            continue
        if room <= 0:
            parts.append({})
            room = _DECODED_BYTES
        parts[-1][name] = tensor
        room -= tensor.numel() * tensor.itemsize
    return parts


def _is_coded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and isinstance(tensor.to_local(), CodedTensor)


@torch.no_grad()
def _fill(opened: OpenCheckpoint, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Read tensors in place, those that are stored as codes by way of decoded ones.
    Collective."""
    # Codes cannot be read in place: values are read into a decoded copy and encoded
    # again by copy_ below.
    decoded = {
        name: torch.empty_like(tensor)
        for name, tensor in tensors.items()
        if _is_coded(tensor)
    }
    read = {**tensors, **decoded}
    with warnings.catch_warnings():
        # DCP warns of every load in one process.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(
            read,
            storage_reader=SmpStorageReader(opened, read),
            planner=DefaultLoadPlanner(
                flatten_state_dict=False, flatten_sharded_tensors=False
            ),
            process_group=ranks.group,
            no_dist=not ranks.distributed,
        )
    for name, tensor in tensors.items():
        if read[name] is not tensor:
            tensor.copy_(read[name])


def _match(
    opened: OpenCheckpoint,
    state: dict[str, Any],
    strict: bool,
    only: list[str] | None,
    allow_dtype_cast: bool,
    allow_pickle: bool,
) -> tuple[dict[str, Tensor], list[tuple[Any, Any, Any]]]:
    """Pair the template's tensors with the checkpoint's; also list the values that
    replace tensor-free parts."""
    index = opened.index
    by_path = index.by_path()
    wanted = dict(iterate_tensors(state))
    if only is not None:
        chosen = set(_select(index, only))
        # Other tensors of the template, and of the checkpoint, are then as if absent.
        wanted = {
            path: tensor
            for path, tensor in wanted.items()
            if by_path.get(path) in chosen
        }
        by_path = {path: name for path, name in by_path.items() if name in chosen}
    # How the two differ: names, shapes, dtypes.
    missing = [path_text(path) for path in wanted if path not in by_path]
    # Only top-level keys of the template count: a template of weights alone does not
    # miss the optimizer.
    unexpected = [
        name
        for path, name in by_path.items()
        if path and path[0] in state and path not in wanted
    ]
    found = {
        by_path[path]: tensor for path, tensor in wanted.items() if path in by_path
    }
    shapes = [
        f"{name}: checkpoint {list(index.record(name).shape)}, model {list(tensor.shape)}"
        for name, tensor in found.items()
        if tuple(tensor.shape) != index.record(name).shape
    ]
    dtypes = [
        f"{name}: checkpoint {index.record(name).dtype}, model {tensor.dtype}"
        for name, tensor in found.items()
        if tensor.dtype != index.record(name).dtype
    ]
    # DCP would load into memory of its own in their place.
    without_memory = [
        name for name, tensor in found.items() if local_part(tensor).is_meta
    ]
    # Which of that is an error.
    problems = []
    if without_memory:
        problems.append(
            _listing("on the meta device (call to_empty first)", without_memory)
        )
    if strict and missing:
        problems.append(_listing("not in the checkpoint", missing))
    if strict and unexpected:
        problems.append(_listing("in the checkpoint but not in the model", unexpected))
    if shapes:
        problems.append(_listing("of another shape (another architecture?)", shapes))
    if dtypes and not allow_dtype_cast:
        problems.append(
            _listing("of another dtype (pass allow_dtype_cast=True to convert)", dtypes)
        )
    if problems:
        hint = (
            "; strict=False loads what fits by name"
            if strict and (missing or unexpected)
            else ""
        )
        raise CheckpointError("; ".join(problems) + hint)
    # Under strict=False nothing is left out in silence.
    for text, names in (
        ("missing in the checkpoint, kept", missing),
        ("in the checkpoint only, not used", unexpected),
    ):
        if names:
            logger.warning("%s: %s", opened.address, _listing(text, names))
    replacements: list[tuple[Any, Any, Any]] = []
    # A load of chosen tensors leaves all other values.
    if only is None:
        _collect_rest(opened, state, (), replacements, allow_pickle)
    return found, replacements


def _listing(what: str, names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} tensors {what}: {', '.join(names[:_SHOWN])}{more}"


def _collect_rest(
    opened: OpenCheckpoint,
    node: Any,
    path: Path,
    replacements: list[tuple[Any, Any, Any]],
    allow_pickle: bool,
) -> None:
    """Collect (container, key, saved value) for every value of the template that is no
    tensor."""
    # Positions are the keys of lists and tuples.
    entries = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in entries:
        here = (*path, key)
        if isinstance(value, Tensor):
            continue
        if isinstance(value, (dict, list, tuple)) and holds_tensor(value):
            inner = _Items(value) if isinstance(value, tuple) else value
            _collect_rest(opened, inner, here, replacements, allow_pickle)
            if inner is not value:
                replacements.append((node, key, inner))
            continue
        try:
            # A value that older versions did not save is no reason to refuse the
            # weights.
            saved = subtree(opened.tree, ("state", *here))
        except KeyError:
            logger.warning(
                "%s has no %s: the value at hand is kept",
                opened.address,
                path_text(here),
            )
            continue
        decoded = _decode(opened, saved, lambda name: DROP, allow_pickle)
        if decoded is not DROP:  # a tensor, which _match has listed
            replacements.append((node, key, decoded))


def decode_state(
    opened: OpenCheckpoint, tensor: Callable[[str], Any], allow_pickle: bool
) -> Any:
    """Decode the complete saved state, with ``tensor(name)`` in the place of each
    tensor."""
    state = _decode(opened, subtree(opened.tree, ("state",)), tensor, allow_pickle)
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{opened.address} is damaged: its state is a {type(state).__name__}, not a dict"
        )
    return state


def _decode(opened: OpenCheckpoint, tree: Any, tensor: Any, allow_pickle: bool) -> Any:
    def pickled(key: str) -> Any:
        # Opening the pickle runs code, so it happens only with the caller's word for
        # it.
        if not allow_pickle:
            raise CheckpointError(
                f"{opened.address} holds values that only unrestricted unpickling can read "
                f"({', '.join(opened.manifest.pickled[:_SHOWN])}); pass allow_pickle=True if you trust its origin"
            )
        return opened.pickle_entries()[key]

    def known(name: str) -> Any:
        # A KeyError for a tensor that the index does not have.
        opened.index.record(name)
        return tensor(name)

    # The tree is a file's content: whatever goes wrong in it is a damaged file.
    with only_checkpoint_errors(f"{opened.address}/{opened.manifest.rest}"):
        return decode_rest(tree, known, opened.plain_entries, pickled)


def read_manifest(path: StrPath) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: the folder is missing, half, damaged or foreign; the message
            says which.
    """
    return open_checkpoint(path).manifest


def read_index(path: StrPath) -> Index:
    """Read the tensor index of a checkpoint: names, shapes, dtypes, files, slices.

    Raises:
        CheckpointError: as in :func:`read_manifest`.
    """
    return open_checkpoint(path).index


def read_rest(
    path: StrPath,
    prefix: str | Path | None = None,
    *,
    tensors: Iterable[str] = (),
    exclude: Iterable[str] = (),
    allow_pickle: bool = False,
) -> Any:
    """Read the saved state without its tensors, in the structure it had. Not
    collective.

    Args:
        path: checkpoint folder or address.
        prefix: only this part: ``"hyper_parameters"`` or a path such as ``("loops",
            "fit_loop")``.
        tensors: globs over tensor names; those are filled in (unsharded, on the CPU).
            Other tensors are left out of their dicts; in lists and tuples a
            ``TensorReference`` stands for them.
        exclude: globs over tensor names taken back out of ``tensors``.
        allow_pickle: read values saved with ``allow_pickle=True``. This runs code from
            the file.

    Raises:
        CheckpointError: as in :func:`read_manifest`, or there is no such part.
    """
    opened = open_checkpoint(path)
    # Steps of the path behind "state", the root of the saved tree.
    steps: tuple[Any, ...] = ()
    if prefix is not None:
        steps = (prefix,) if isinstance(prefix, str) else tuple(prefix)
    try:
        tree = subtree(opened.tree, ("state", *steps))
    except KeyError:
        known = list(subtree(opened.tree, ("state",)))
        raise CheckpointError(
            f"{opened.address} has no {path_text(steps)!r}; at the top it has {known}"
        ) from None
    # Tensors are read one by one while the tree is decoded.
    names = set(_select(opened.index, tensors)) - set(
        _select(opened.index, exclude, must_match=False)
    )
    with TensorFiles(opened) as files:
        return _decode(
            opened,
            tree,
            lambda name: files.unsharded(name) if name in names else DROP,
            allow_pickle,
        )


def read_template(
    path: StrPath,
    prefix: Path,
    tensor: Callable[[Path, str, TensorRecord], Tensor],
) -> Any:
    """Read the state saved under a path, in the structure it had, with tensors to be
    loaded into. Not collective.

    Args:
        tensor: makes one, from the path it was saved at, its name and its record.

    Raises:
        CheckpointError: as in :func:`read_rest`.
    """
    opened = open_checkpoint(path)
    # An index maps paths to names; here the place of a name is needed.
    places = {name: place for place, name in opened.index.by_path().items()}
    try:
        tree = subtree(opened.tree, ("state", *prefix))
    except KeyError:
        raise CheckpointError(
            f"{opened.address} has no {path_text(prefix)!r}"
        ) from None
    return _decode(
        opened,
        tree,
        lambda name: tensor(places[name], name, opened.index.record(name)),
        False,
    )


def read_per_rank(path: StrPath) -> list[Any]:
    """Read the ``per_rank`` value of each rank of the saving run.

    Raises:
        CheckpointError: as in :func:`read_manifest`.
    """
    opened = open_checkpoint(path)
    return _decode(
        opened, subtree(opened.tree, ("per_rank",)), lambda name: DROP, False
    )


def read_tensors(path: StrPath, names: str | Iterable[str] = "*") -> dict[str, Tensor]:
    """Read unsharded tensors to the CPU, by name. Not collective.

    Args:
        path: checkpoint folder or address.
        names: names or globs (``"state_dict.*"``).

    Raises:
        CheckpointError: as in :func:`read_manifest`, or a name or glob that matches
            nothing.
    """
    opened = open_checkpoint(path)
    patterns = [names] if isinstance(names, str) else list(names)
    with TensorFiles(opened) as files:
        return {name: files.unsharded(name) for name in _select(opened.index, patterns)}


def _select(
    index: Index, patterns: Iterable[str], must_match: bool = True
) -> list[str]:
    """List the names that fit the patterns."""
    names = index.names()
    known = set(names)
    selected: dict[str, None] = {}
    for pattern in patterns:
        # A name may contain characters that globs use, so it is first taken as it is.
        matches = [pattern]
        if pattern not in known:
            matches = fnmatch.filter(names, pattern)
        # "*" fits a checkpoint without tensors, too.
        if not matches and must_match and pattern != "*":
            raise CheckpointError(
                f"no tensor fits {pattern!r}; the checkpoint has e.g. {', '.join(names[:_SHOWN])}"
            )
        selected.update(dict.fromkeys(matches))
    return list(selected)


class SmpStorageReader(StorageReader):
    """A storage of DCP over the files of one checkpoint.

    Args:
        opened: the checkpoint.
        names: the tensors that will be asked for.
    """

    def __init__(self, opened: OpenCheckpoint, names: Iterable[str]) -> None:
        self.opened = opened
        self.records: dict[str, TensorRecord] = {
            name: opened.index.record(name) for name in names
        }

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Do nothing: one reader serves one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        for name, record in self.records.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.shape))
                for c in record.chunks
            ]
            properties = TensorProperties(dtype=record.dtype)
            tensors[name] = TensorStorageMetadata(
                properties, torch.Size(record.shape), chunks
            )
        return Metadata(tensors)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the folder is open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        chunks = _chunks_by_place(self.records)
        jobs = [(chunks[item.storage_index], item) for item in plan.items]
        with TensorFiles(self.opened) as files, torch.no_grad():
            for chunk, item in sorted(
                jobs, key=lambda job: (job[0].file, job[0].begin)
            ):
                target = planner.resolve_tensor(item).detach()
                dtype = self.records[item.storage_index.fqn].dtype
                files.get(chunk.file).read(
                    chunk, dtype, item.storage_offsets, item.lengths, target
                )
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _chunks_by_place(records: Mapping[str, TensorRecord]) -> dict[MetadataIndex, Chunk]:
    return {
        MetadataIndex(name, chunk.offset): chunk
        for name, record in records.items()
        for chunk in record.chunks
    }

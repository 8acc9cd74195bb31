"""The opening of a checkpoint folder, and the recognition of other programs'
folders."""

from __future__ import annotations

import functools
import io
import os
import re
from dataclasses import dataclass
from typing import Any

import torch

from smp_core.checkpoint.coverage import check_index
from smp_core.checkpoint.folders.addresses import is_address, open_folder
from smp_core.checkpoint.folders.storage import Folder, missing
from smp_core.checkpoint.foreign.torch_file import check_torch_content
from smp_core.checkpoint.layout import (
    FORMAT,
    MANIFEST,
    TEMPORARY_PREFIX,
    CheckpointError,
    Index,
    Manifest,
    digest_of,
)
from smp_core.checkpoint.untrusted import (
    MANIFEST_BYTES,
    only_checkpoint_errors,
    read_json,
)
from smp_core.outside import StrPath


@dataclass(eq=False)
class OpenCheckpoint:
    """A checkpoint whose manifest, index and rest have been read and checked against
    their digests.

    Everything that takes the path of a checkpoint also takes one that is open: all
    parts of a load are then of one save. If its path is overwritten meanwhile, that is
    an error that says so.

    Attributes:
        folder: where it lies.
        manifest: what it is.
        check_bytes: compare tensors with their digests while they are read.
        agreed: all ranks have opened the same save and checked its files; this is not
            done again.
    """

    folder: Folder
    manifest: Manifest
    check_bytes: bool = True
    agreed: bool = False

    def __fspath__(self) -> str:
        return self.address

    def same_save(self) -> None:
        """Raise the reason for an error that was met while reading, if it is that the
        path holds another save now.

        Raises:
            CheckpointError: another save, or none, is at the path.
        """
        try:
            # The manifest's id is new for each save.
            now = Manifest.from_bytes(
                self.folder.read(MANIFEST, MANIFEST_BYTES), self.address
            ).id
        except (CheckpointError, FileNotFoundError):
            now = None
        if now != self.manifest.id:
            what = (
                "was removed"
                if now is None
                else f"was overwritten by another save ({now})"
            )
            raise CheckpointError(
                f"{self.address} {what} while it was read; load again, or from a path that stays"
            )

    @property
    def address(self) -> str:
        """The folder as the user named it."""
        return self.folder.address

    @functools.cached_property
    def index(self) -> Index:
        """The tensor index."""
        where = f"{self.address}/{self.manifest.index}"
        # Read once, and checked against manifest and sizes before anything uses it.
        with only_checkpoint_errors(where):
            index = Index.from_json(self._json(self.manifest.index), where)
            check_index(index, self.manifest, where)
        return index

    @functools.cached_property
    def tree(self) -> Any:
        """The JSON tree of everything that is not a tensor."""
        content = self._json(self.manifest.rest)
        tree = content.get("tree")
        # The writer always makes these two.
        if (
            not isinstance(tree, dict)
            or not isinstance(tree.get("state"), dict)
            or "per_rank" not in tree
        ):
            raise CheckpointError(
                f"{self.address}/{self.manifest.rest} is damaged: it has no state"
            )
        return tree

    @functools.cached_property
    def plain_entries(self) -> dict[str, Any]:
        """The entries of rest.pt."""
        if self.manifest.rest_pt is None:
            return {}
        data = self.checked(self.manifest.rest_pt)
        where = f"{self.address}/{self.manifest.rest_pt}"
        # Sizes that the archive asks for are checked before torch allocates them.
        check_torch_content(io.BytesIO(data), where)
        try:
            content = torch.load(
                io.BytesIO(data), map_location="cpu", weights_only=True
            )
        except Exception as error:
            raise CheckpointError(
                f"{where} cannot be read with weights_only=True: {error}"
            ) from error
        if not isinstance(content, dict):
            raise CheckpointError(
                f"{where} is damaged: it holds a {type(content).__name__}, not a dict"
            )
        return content

    def pickle_entries(self) -> dict[str, Any]:
        """Return the entries of the pickle file. Runs code from the file: only for
        ``allow_pickle=True``."""
        if self.manifest.rest_pickle is None:
            return {}
        return torch.load(
            io.BytesIO(self.checked(self.manifest.rest_pickle)),
            map_location="cpu",
            weights_only=False,
        )

    def checked(self, name: str) -> bytes:
        """Read a small file and check its digest.

        Raises:
            CheckpointError: missing or damaged.
        """
        where = f"{self.address}/{name}"
        record = self.manifest.files.get(name)
        if record is None:
            raise CheckpointError(f"{where} is not listed in the manifest")
        try:
            size = self.folder.size(name)
            # Of another size it is damaged already, and is not read.
            data = self.folder.read(name, record.bytes) if size == record.bytes else b""
        # Another save may have taken the path; its message is the better one.
        except FileNotFoundError:
            self.same_save()
            raise CheckpointError(f"{where} is missing") from None
        problem = record.size_problem(where, size)
        if problem is not None:
            self.same_save()
            raise CheckpointError(problem)
        if digest_of(data, self.manifest.algorithm) != record.digest:
            self.same_save()
            raise CheckpointError(
                f"{where} is damaged: its {self.manifest.algorithm} digest does not fit the manifest"
            )
        return data

    def _json(self, name: str) -> Any:
        content = read_json(self.checked(name), f"{self.address}/{name}")
        if content.get("format") != FORMAT:
            raise CheckpointError(f"{self.address}/{name} is not part of a {FORMAT}")
        return content


def open_checkpoint(path: StrPath) -> OpenCheckpoint:
    """Open a checkpoint folder; one that is open already is returned as it is.

    Raises:
        CheckpointError: missing, half (no manifest), damaged, or of another program;
            the message says which and what to do.
    """
    if isinstance(path, OpenCheckpoint):
        return path
    folder = open_folder(path)
    try:
        data = folder.read(MANIFEST, MANIFEST_BYTES)
    except FileNotFoundError:
        raise _refusal(folder, os.fspath(path)) from None
    return OpenCheckpoint(
        folder, Manifest.from_bytes(data, f"{folder.address}/{MANIFEST}")
    )


def is_checkpoint(path: StrPath) -> bool:
    """Return whether a torch-smp checkpoint with a readable manifest is at the path."""
    try:
        open_checkpoint(path)
    except CheckpointError:
        return False
    return True


def _refusal(folder: Folder, path: str) -> CheckpointError:
    """Make the error for a folder without a manifest, which names what the folder is
    instead."""
    if not folder.exists():
        return missing(path)
    # The nearest explanation first: another program's folder, then half of ours, then
    # anything else.
    names = folder.names()
    text = _foreign_text(path, names)
    if text is not None:
        return CheckpointError(f"{path} is not a torch-smp checkpoint but {text}")
    own = [name for name in names if name.startswith(("tensors-", "index", "rest"))]
    if own or os.path.basename(path).startswith(TEMPORARY_PREFIX):
        return CheckpointError(
            f"{path} is half a checkpoint: {MANIFEST} is missing, so the save did not finish or the file was lost. "
            "Use an earlier checkpoint (`smp checkpoint list` shows those that are whole)"
        )
    if not names:
        return CheckpointError(f"{path} is an empty folder, not a checkpoint")
    return CheckpointError(
        f"{path} is not a torch-smp checkpoint: no {MANIFEST}; it holds {', '.join(names[:5])}"
    )


_KINDS = {
    "lightning": "a sharded checkpoint of Lightning (ModelParallel or FSDP)",
    "dcp": "a torch.distributed.checkpoint folder",
    "accelerate": "a folder of Accelerate (FSDP)",
    "accelerate-files": "a folder of Accelerate with one file per rank (use_dcp=False)",
    "sagemaker": "a partial checkpoint of SageMaker SMP",
    "huggingface": "a Hugging Face safetensors folder",
    "lightning-file": "a single file, as Lightning's or torch.save's checkpoints are",
}


def foreign_kind(path: str, names: list[str]) -> str | None:
    """Recognise another program's checkpoint: return its kind, or None.

    Args:
        path: the file or folder.
        names: the files in the folder, relative to it.
    """
    if not is_address(path) and os.path.isfile(path):
        return "lightning-file"

    def any_is(pattern: str) -> bool:
        return any(re.search(pattern, name) for name in names)

    # The more specific kind stands before the more general one.
    tests = {
        "lightning": ".metadata" in names and "meta.pt" in names,
        "dcp": ".metadata" in names,
        "accelerate": any_is(r"\Apytorch_model_fsdp_\d+/\.metadata\Z"),
        "accelerate-files": any_is(r"\Apytorch_model_fsdp_\d+_rank\d+\.bin"),
        "sagemaker": any_is(r"(_partial|smp_rank_\d+)"),
        "huggingface": "model.safetensors.index.json" in names
        or "model.safetensors" in names,
    }
    return next((kind for kind, fits in tests.items() if fits), None)


def _foreign_text(path: str, names: list[str]) -> str | None:
    kind = foreign_kind(path, names)
    if kind is not None:
        return f"{_KINDS[kind]}; convert it with `smp checkpoint import {path} OUT`"
    # A folder of checkpoints was given in the place of one of them.
    end = f"/{MANIFEST}"
    checkpoints = sorted(name.removesuffix(end) for name in names if name.endswith(end))
    if checkpoints:
        return (
            f"a folder of checkpoints; give one of them: {', '.join(checkpoints[-3:])}"
        )
    return None

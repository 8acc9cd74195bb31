"""The sequence number of a save: one more than that of every checkpoint beside it, so
that "newest" needs no clock.

Clocks of nodes differ and are set back; a step alone is not enough, because a run that
was set back to an earlier step is newer with a smaller step.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from smp_core.checkpoint.folders.addresses import is_address, local_path, open_folder
from smp_core.checkpoint.layout import MANIFEST, CheckpointError, Manifest
from smp_core.checkpoint.untrusted import MANIFEST_BYTES, NoSuchFolder, StoreError
from smp_core.outside import StrPath

# (path, inode, change of its manifest in ns) -> sequence.
_read: dict[tuple[str, int, int], int] = {}
# Parent address -> the last number given here: stores are asked once for a process.
_given: dict[str, int] = {}


def next_sequence(path: StrPath) -> int:
    """Return the sequence number for a save to a path: above those of its siblings, and
    of its namesakes in the siblings of its parent (``checkpoint-*/smp_state``).
    """
    text = os.fspath(path).rstrip("/")
    if is_address(text):
        # Listing a store is slow, and this process numbers its own saves.
        parent = text.rpartition("/")[0]
        if parent not in _given:
            _given[parent] = max(_numbers_in_store(parent), default=0)
        _given[parent] += 1
        return _given[parent]
    return 1 + max(_numbers_beside(os.path.abspath(local_path(text))), default=0)


def manifests_in(folder: StrPath, inside: str = "") -> dict[str, list[int]] | None:
    """Return what identifies the manifest of each checkpoint in a folder (inode, change
    in ns), without opening one; None for an address.

    Args:
        inside: the name of the checkpoint in each folder there (``smp_state`` in
            ``checkpoint-*``); "": the folders are checkpoints themselves.
    """
    if is_address(folder):
        return None
    found = {}
    for path in _folders(os.path.abspath(local_path(folder))):
        # Not every folder has a manifest, and one may be removed meanwhile.
        with contextlib.suppress(OSError):
            status = os.stat(os.path.join(path, inside, MANIFEST))
            found[os.path.basename(path)] = [status.st_ino, status.st_mtime_ns]
    return found


def _numbers_beside(path: str) -> Iterator[int]:
    # Siblings (step-00000001), then namesakes in the folders around
    # (checkpoint-1/smp_state).
    parent, name = os.path.split(path)
    yield from (_number_of(entry) for entry in _folders(parent))
    yield from (
        _number_of(os.path.join(entry, name))
        for entry in _folders(os.path.dirname(parent))
    )


def _folders(parent: str) -> list[str]:
    try:
        with os.scandir(parent) as entries:
            return [entry.path for entry in entries if entry.is_dir()]
    except OSError:
        return []


def _number_of(path: str) -> int:
    """Return the sequence number of a checkpoint; 0 for anything else."""
    try:
        status = os.stat(os.path.join(path, MANIFEST))
    except OSError:
        return 0
    # A manifest is replaced as a whole, so inode and time show whether it was read
    # before.
    key = (path, status.st_ino, status.st_mtime_ns)
    if key not in _read:
        _read[key] = _read_number(path)
    return _read[key]


def _read_number(path: str) -> int:
    try:
        data = open_folder(path).read(MANIFEST, MANIFEST_BYTES)
        return Manifest.from_bytes(data, path).sequence
    except StoreError:
        # A save without a number above the others' would never be the newest.
        raise
    except (CheckpointError, FileNotFoundError):
        return 0


def _numbers_in_store(parent: str) -> Iterator[int]:
    from smp_core.checkpoint.folders.object_folder import list_objects

    with contextlib.suppress(NoSuchFolder):
        for name in list_objects(parent):
            yield _read_number(f"{parent}/{name}")

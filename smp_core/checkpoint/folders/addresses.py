"""The choice between a local folder and an fsspec address for a checkpoint's path.

fsspec is imported only for an address.
"""

from __future__ import annotations

import os

from smp_core.checkpoint.folders.local_folder import (
    LocalFolder,
    LocalTransaction,
    remove_local,
)
from smp_core.checkpoint.folders.storage import Folder, Transaction
from smp_core.outside import StrPath

# fsspec's names of local folders, which have a rename and need no store.
_LOCAL = ("file://", "local://")


def is_address(path: StrPath) -> bool:
    """Return whether a path is an fsspec address such as ``s3://bucket/run`` rather
    than a local path."""
    # A drive or a plain path has no "://".
    text = os.fspath(path)
    return "://" in text and not text.startswith(_LOCAL)


def local_path(path: StrPath) -> str:
    """Return a local path without ``file://`` or ``local://`` and without a trailing
    slash."""
    text = os.fspath(path)
    for prefix in _LOCAL:
        text = text.removeprefix(prefix)
    return text.rstrip("/") or "/"


def lasting(path: StrPath) -> str:
    """Return a path that a change of the working directory does not change."""
    return os.fspath(path) if is_address(path) else os.path.abspath(local_path(path))


def open_folder(path: StrPath) -> Folder:
    """Open the folder at a local path or fsspec address, for reading."""
    if is_address(path):
        from smp_core.checkpoint.folders.object_folder import ObjectFolder

        return ObjectFolder(os.fspath(path))
    return LocalFolder(local_path(path))


def open_transaction(path: StrPath) -> Transaction:
    """Return a transaction for a save to a local path or fsspec address."""
    if is_address(path):
        from smp_core.checkpoint.folders.object_folder import ObjectTransaction

        return ObjectTransaction(os.fspath(path))
    return LocalTransaction(local_path(path))


def remove_checkpoint(path: StrPath) -> None:
    """Remove a checkpoint folder so that a kill in between leaves no half one behind.

    Raises:
        CheckpointError: the folder is not a checkpoint.
    """
    if is_address(path):
        from smp_core.checkpoint.folders.object_folder import remove_objects

        remove_objects(os.fspath(path))
        return
    remove_local(local_path(path))

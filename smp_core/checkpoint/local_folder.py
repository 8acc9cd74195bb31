"""Checkpoint folders on a local or shared POSIX file system.

A save goes to a fresh sibling ``.tmp-<name>-<host>-<random>``; its files and directories are fsynced, the manifest is
written last, and one rename is the commit. Over an existing checkpoint the rename is an exchange (Linux renameat2), so
that at every instant the path holds a whole checkpoint; where the file system cannot exchange, the old one is moved to
``.prev-<name>-...`` first and readers accept that one while the path is empty.

The temporary directory is locked (flock) for as long as its save lives, so that a later save can tell what a crash
left behind from what another job is writing at the moment.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import sys
import time
from pathlib import Path

from smp_core.checkpoint.layout import (
    MANIFEST,
    PREVIOUS_PREFIX,
    TEMPORARY_PREFIX,
    CheckpointError,
)
from smp_core.checkpoint.storage import Folder, RangeFile, Sink, Transaction

logger = logging.getLogger("smp")

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
# An unlocked temporary of another host may belong to a live save where locks do not cross the network.
_STALE_SECONDS = 3600.0
_SEEN_SECONDS = 30.0
_UNNAMED_PREFIX = ".new-"  # for the microseconds before a temporary is locked
_OWN_FILE = re.compile(r"(tensors-\d{5,}-of-\d{5,}\.safetensors|index\.json|rest\.json|rest\.pt|rest-pickle\.pt|extra)")
_OWN_ENTRY = re.compile(r"\.(tmp|prev)-.+-[0-9a-f]{8}-[0-9a-f]{12}")


def rename_exchange(first: str, second: str) -> bool:
    """Swap two paths in one step. False where the system or the file system cannot."""
    return _renameat2(first, second, _RENAME_EXCHANGE)


def rename_new(source: str, target: str) -> None:
    """Rename a directory to a path where nothing may be.

    Raises:
        FileExistsError: something is there.
    """
    if not _renameat2(source, target, _RENAME_NOREPLACE):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "already exists", target)
        os.rename(source, target)


def _renameat2(source: str, target: str, flags: int) -> bool:
    if sys.platform != "linux":
        return False
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), source, None, target)


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Make the entries of a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _host_id() -> str:
    try:
        identity = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        identity = os.uname().nodename
    return hashlib.sha256(identity.encode()).hexdigest()[:8]


def _try_lock(path: str) -> int | None:
    """A descriptor that holds the lock of a directory; None when another process holds it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        pass  # no locks on this file system: age decides
    return descriptor


class _LocalRangeFile(RangeFile):
    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)

    def read_into(self, begin: int, target: memoryview) -> None:
        while len(target):
            count = os.preadv(self.descriptor, [target[: 1 << 30]], begin)
            if count == 0:
                raise CheckpointError(f"{self.path} is cut short: it ends at byte {begin}, more was expected")
            target = target[count:]
            begin += count

    def close(self) -> None:
        os.close(self.descriptor)


class LocalFolder(Folder):
    """A checkpoint directory; reads the ``.prev-*`` beside it when a crash fell between two renames."""

    def __init__(self, path: str) -> None:
        self.address = path
        self.path = path
        if not os.path.lexists(path):
            previous = previous_of(path)
            if previous is not None:
                logger.warning("%s is missing; reading %s, which an interrupted overwrite left", path, previous)
                self.path = previous

    def exists(self) -> bool:
        return os.path.exists(self.path)

    def names(self) -> list[str]:
        if not os.path.isdir(self.path):
            return []
        return sorted(
            os.path.relpath(os.path.join(where, name), self.path)
            for where, _, names in os.walk(self.path)
            for name in names
        )

    def size(self, name: str) -> int:
        return os.stat(os.path.join(self.path, name)).st_size

    def read(self, name: str) -> bytes:
        return Path(self.path, name).read_bytes()

    def open(self, name: str) -> RangeFile:
        return _LocalRangeFile(os.path.join(self.path, name))

    def signs_of_crash(self) -> bool:
        return bool(_siblings(self.path, TEMPORARY_PREFIX) or _siblings(self.path, PREVIOUS_PREFIX))


class LocalTransaction(Transaction):
    """A save into a temporary sibling directory, committed by one rename."""

    def __init__(self, path: str) -> None:
        self.address = path
        self.path = path
        self.temporary = ""
        self._lock: int | None = None

    def begin(self, save_id: str, overwrite: bool) -> None:
        parent = os.path.dirname(os.path.abspath(self.path))
        os.makedirs(parent, exist_ok=True)
        sweep(self.path)
        self._check_target(overwrite)
        # Locked before it has the name by which another job's sweep would find it.
        unnamed = os.path.join(parent, f"{_UNNAMED_PREFIX}{save_id}")
        os.mkdir(unnamed)
        self._lock = _try_lock(unnamed)
        self.temporary = self._temporary(save_id)
        os.rename(unnamed, self.temporary)

    def join(self, save_id: str) -> None:
        self.temporary = self._temporary(save_id)
        deadline = time.monotonic() + _SEEN_SECONDS  # network file systems may show a new directory late
        while not os.path.isdir(self.temporary):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"this rank (host {os.uname().nodename}) does not see {self.temporary}, which rank 0 made; save to "
                    "a path on a file system that all nodes share"
                )
            time.sleep(0.05)

    def _temporary(self, save_id: str) -> str:
        return os.path.join(os.path.dirname(self.path), f"{TEMPORARY_PREFIX}{os.path.basename(self.path)}-{save_id}")

    def _check_target(self, overwrite: bool) -> None:
        if not os.path.lexists(self.path):
            return
        if not overwrite:
            raise CheckpointError(f"{self.path} exists already; choose another path or pass overwrite=True")
        if os.path.isdir(self.path) and not os.path.exists(f"{self.path}/{MANIFEST}") and not _is_half(self.path):
            raise CheckpointError(
                f"{self.path} holds something that is not a torch-smp checkpoint; it is not overwritten. Choose "
                "another path, or remove that directory first"
            )

    def file_name(self, stem: str, suffix: str) -> str:
        return f"{stem}{suffix}"

    def create(self, name: str, algorithm: str) -> Sink:
        path = os.path.join(self.temporary, name)
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        return Sink(open(path, "xb", buffering=0), name, algorithm)

    def commit(self, manifest: bytes) -> None:
        sink = self.create(MANIFEST, "xxh3")
        sink.write(manifest)
        sink.close()
        for where, _, _ in os.walk(self.temporary):
            fsync_directory(where)
        parent = os.path.dirname(os.path.abspath(self.path))
        replaced = self._rename_into_place()
        fsync_directory(parent)
        self._unlock()
        if replaced:
            _remove_tree(replaced)

    def _rename_into_place(self) -> str | None:
        """Put the new checkpoint at its path; the path of what was there before, to be removed."""
        while True:
            try:
                rename_new(self.temporary, self.path)
                return None
            except FileExistsError:
                pass
            try:
                if rename_exchange(self.temporary, self.path):
                    return self.temporary
            except FileNotFoundError:
                continue  # another job removed the target in between
            previous = self.temporary.replace(TEMPORARY_PREFIX, PREVIOUS_PREFIX, 1)
            os.rename(self.path, previous)
            os.rename(self.temporary, self.path)
            return previous

    def abort(self) -> None:
        if self.temporary:
            _remove_tree(self.temporary)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _is_half(path: str) -> bool:
    """Whether everything in a folder is part of a checkpoint, so that nobody misses it when a whole one replaces it."""
    return all(_OWN_FILE.fullmatch(name) for name in os.listdir(path))


def new_save_id() -> str:
    """A random identity, beginning with an identity of this host's current boot."""
    return f"{_host_id()}-{secrets.token_hex(6)}"


def previous_of(path: str) -> str | None:
    """The newest whole ``.prev-*`` of a path."""
    found = [entry for entry in _siblings(path, PREVIOUS_PREFIX) if os.path.exists(os.path.join(entry, MANIFEST))]
    return max(found, key=os.path.getmtime, default=None)


def own_name(entry: str) -> str:
    """The name of the checkpoint that a temporary or previous directory belongs to."""
    return entry.removeprefix(TEMPORARY_PREFIX).removeprefix(PREVIOUS_PREFIX)[:-22]


def _siblings(path: str, prefix: str) -> list[str]:
    parent = os.path.dirname(os.path.abspath(path))
    start = f"{prefix}{os.path.basename(path)}-"
    try:
        names = os.listdir(parent)
    except OSError:
        return []
    # What follows is "<8 hex>-<12 hex>": "a-b" must not claim the temporaries of "a-b-c".
    return [os.path.join(parent, name) for name in names if name.startswith(start) and len(name) == len(start) + 21]


def sweep(path: str) -> list[str]:
    """Remove what dead saves left beside this path, under whatever name; never what a live save still writes.

    Returns:
        the removed directories.
    """
    removed = []
    if not os.path.lexists(path):
        previous = previous_of(path)
        if previous is not None:
            rename_new(previous, path)
            logger.warning("%s restored from %s, which an interrupted overwrite left", path, previous)
    for entry in _left_behind(os.path.dirname(os.path.abspath(path))):
        try:
            lock = _try_lock(entry)
        except OSError:
            continue  # gone, or not a directory
        if lock is None:
            continue
        try:
            same_host = f"-{_host_id()}-" in os.path.basename(entry)
            if same_host or time.time() - _newest_change(entry) > _STALE_SECONDS:
                _remove_tree(entry)
                removed.append(entry)
        finally:
            os.close(lock)
    if removed:
        logger.warning("removed what interrupted saves left: %s", ", ".join(removed))
    return removed


def _left_behind(parent: str) -> list[str]:
    """Temporaries in a directory, and moved checkpoints whose own path holds one again."""
    try:
        names = [name for name in os.listdir(parent) if _OWN_ENTRY.fullmatch(name)]
    except OSError:
        return []
    return [
        os.path.join(parent, name)
        for name in names
        if name.startswith(TEMPORARY_PREFIX) or os.path.lexists(os.path.join(parent, own_name(name)))
    ]


def scratch_path(target: Path) -> Path:
    """Where something other than a checkpoint is made before it is renamed to its path; never swept."""
    return target.parent / f".partial-{target.name}-{new_save_id()}"


def _newest_change(directory: str) -> float:
    times = [os.path.getmtime(directory)]
    for where, _, names in os.walk(directory):
        for name in names:
            try:
                times.append(os.path.getmtime(os.path.join(where, name)))
            except OSError:
                continue
    return max(times)


def _remove_tree(path: str) -> None:
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
        return
    shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        logger.warning("%s could not be removed entirely", path)


def remove_local(path: str) -> None:
    """Remove a checkpoint directory: renamed away first, so that no half of it is ever found under its name.

    A link to a checkpoint is removed as a link.

    Raises:
        CheckpointError: a directory that is not a checkpoint.
    """
    if os.path.islink(path):
        os.unlink(path)
        return
    if not os.path.lexists(path):
        return
    if not os.path.exists(os.path.join(path, MANIFEST)):
        raise CheckpointError(f"{path} is not a torch-smp checkpoint and is not removed")
    away = os.path.join(
        os.path.dirname(os.path.abspath(path)), f"{TEMPORARY_PREFIX}{os.path.basename(path)}-{new_save_id()}"
    )
    os.rename(path, away)
    fsync_directory(os.path.dirname(away))
    _remove_tree(away)

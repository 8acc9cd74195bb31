"""The atomic operations of a POSIX file system: renames, locks, directories made
durable."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import sys
from pathlib import Path

logger = logging.getLogger("smp")

UNNAMED_PREFIX = ".new-"
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2


def rename_exchange(first: str, second: str) -> bool:
    """Swap two paths in one step; return False where the system or the file system
    cannot."""
    return _renameat2(first, second, _RENAME_EXCHANGE)


def can_exchange(parent: str) -> bool:
    """Return whether :func:`rename_exchange` works in a directory, by trying it on two
    empty ones."""
    # Names that a sweep removes, should this end in between.
    names = [os.path.join(parent, f"{UNNAMED_PREFIX}{new_save_id()}") for _ in range(2)]
    try:
        for name in names:
            os.mkdir(name)
        return rename_exchange(*names)
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                os.rmdir(name)


def rename_new(source: str, target: str) -> None:
    """Rename a directory to a path at which nothing may exist.

    Raises:
        FileExistsError: something is there.
    """
    if not _renameat2(source, target, _RENAME_NOREPLACE):
        # Not atomic, but no other save makes this path: see the callers.
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "already exists", target)
        os.rename(source, target)


def _renameat2(source: str, target: str, flags: int) -> bool:
    if sys.platform != "linux":
        return False
    # Neither Python nor every libc has the call by name.
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if (
        function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags)
        == 0
    ):
        return True
    code = ctypes.get_errno()
    # Old kernels and network file systems refuse the flags.
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), source, None, target)


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Make the entries of a directory durable, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot, and make entries durable by themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def host_id() -> str:
    """Return an identity of this host's current boot: 8 hexadecimal digits."""
    try:
        # The boot: after a restart no process of before holds a lock any more.
        identity = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        identity = os.uname().nodename
    return hashlib.sha256(identity.encode()).hexdigest()[:8]


def try_lock(path: str) -> int | None:
    """Lock a directory and return the descriptor that holds the lock; None when another
    process holds it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        pass  # no locks on this file system: age decides
    return descriptor


def release(lock: int) -> None:
    """Give back what :func:`try_lock` returned. A process that was forked meanwhile (a
    worker of a data loader) has the descriptor too, and would hold the lock for as long
    as it lives."""
    with contextlib.suppress(OSError):  # no locks on this file system
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def remove_tree(path: str) -> bool:
    """Remove a file or directory; return whether all of it is gone, and log where
    not."""
    # What can be removed is removed; what stays, of another user's for example, is
    # reported.
    if os.path.islink(path) or os.path.isfile(path):
        with contextlib.suppress(OSError):
            os.unlink(path)
    else:
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        logger.warning("%s could not be removed entirely", path)
        return False
    return True


def new_save_id() -> str:
    """Make a random identity, beginning with an identity of this host's current
    boot."""
    return f"{host_id()}-{secrets.token_hex(6)}"

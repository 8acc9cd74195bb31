"""A node's folder of one run in shared host memory: where it lies, whose it is, and how files come into it.

    $SMP_MEMORY_FOLDER (default /dev/shm)
        torch-smp-<uid>/                             mode 0700
            <run>/                                   of one run; locked by the ranks that train
                rank-00003-0.tensors                 the slices of one rank; two files by turns, in place
                rank-00003-step-00000120-<digest>.record   what lies in a tensor file (memory_records.py)
                layout-<digest>.json                 names, shapes and places of slices; the same from save to save
                rest-<save>.json, .pt                what is no tensor, of all ranks
                progress-00003                       how far the rank has come (progress.py)

Anybody may write to /dev/shm, so that a folder or file there is used only if it belongs to this user and nobody else
may touch it; links are not followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import re
import stat
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch

from smp_core.checkpoint.addresses import is_address
from smp_core.checkpoint.file_system import host_id, new_save_id, remove_tree
from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.local_folder import LocalFolder, open_regular

logger = logging.getLogger("smp")

VARIABLE = "SMP_MEMORY_FOLDER"
_DEFAULT = "/dev/shm"
_TEMPORARY = ".tmp-"
_OWN_NAME = re.compile(r"rank-\d{5,}-(\d\.tensors|step-\d{8,}-[0-9a-f]{32}\.record)|(layout|rest)-[\w-]+\.(json|pt)")


def run_name(root: str, by: str) -> str:
    """Return the name of the run that saves to a folder on disk: a new process goes on with the same run there.

    Args:
        root: the folder.
        by: what trains.
    """
    path = root if is_address(root) else os.path.abspath(root)
    name = re.sub(r"[^A-Za-z0-9]+", "-", os.path.basename(path))[:40]
    return "-".join(filter(None, (name, by, hashlib.sha256(path.encode()).hexdigest()[:12])))


def _base() -> str:
    return os.environ.get(VARIABLE) or _DEFAULT


def _private(path: str) -> str:
    """Make a directory that only this user may use, or check that the one at the path is such a directory.

    Raises:
        CheckpointError: it is somebody else's, a link, or open to others; or cannot be made.
    """
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.lstat(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be made: {error.strerror}; set {VARIABLE} to a folder in memory"
        ) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        what = (
            "no directory"
            if not stat.S_ISDIR(status.st_mode)
            else f"of user {status.st_uid}, {stat.filemode(status.st_mode)}"
        )
        raise CheckpointError(
            f"{path} is {what}, and states of training are kept only where nobody else can write: remove it, or set "
            f"{VARIABLE} to another folder in memory"
        )
    return path


class NodeMemory:
    """The folder of a run on this node.

    Args:
        run: :func:`run_name`; with the node's name behind it where ranks of one machine pose as several nodes.

    Attributes:
        path: the folder.

    Raises:
        CheckpointError: the folder cannot be made, or is not this user's alone.
    """

    def __init__(self, run: str) -> None:
        top = _private(os.path.join(_base(), f"torch-smp-{os.geteuid()}"))
        self.path = _private(os.path.join(top, run))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        with contextlib.suppress(OSError):  # not on every file system
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)

    @property
    def key(self) -> str:
        """The identity of the folder: equal for the ranks of a node."""
        status = os.fstat(self._lock)
        return f"{host_id()}-{status.st_dev}-{status.st_ino}"

    @property
    def free_bytes(self) -> int:
        """The free memory, as far as the file system tells."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def names(self) -> list[str]:
        """List the files that are ours by name, owner and mode; others are named in a warning and not looked at."""
        found: list[str] = []
        foreign: list[str] = []
        for name in sorted(os.listdir(self.path)):
            if not _OWN_NAME.fullmatch(name):
                continue
            status = os.lstat(os.path.join(self.path, name))
            ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
            (found if ours else foreign).append(name)
        if foreign:
            logger.warning("%s: not used, because they are not this user's alone: %s", self.path, ", ".join(foreign))
        return found

    def holds(self, name: str) -> bool:
        """Tell whether a file is there."""
        return os.path.lexists(os.path.join(self.path, name))

    def folder(self) -> LocalFolder:
        """Return the folder for reading; links in it are refused."""
        return LocalFolder(self.path)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file; it appears as a whole or not at all."""
        temporary = os.path.join(self.path, f"{_TEMPORARY}{new_save_id()}")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.write(data)
            os.rename(temporary, os.path.join(self.path, name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def allocate(self, name: str, size: int) -> torch.Tensor:
        """Make a file of ``size`` bytes, all of them reserved, and return it as a tensor of bytes in shared memory.

        Raises:
            CheckpointError: there is not enough memory; says what to type.
        """
        path = os.path.join(self.path, name)
        self.remove([name])
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            if size:  # reserved at once: to write to a page that cannot be had would end the process
                os.posix_fallocate(descriptor, 0, size)
            return _as_tensor(descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            self.remove([name])
            raise CheckpointError(
                f"{self.path}: no room for {_gib(size)} of this rank's state ({_gib(self.free_bytes)} are free, "
                f"{error.strerror}; two states of each rank are kept): give the container more shared memory (docker "
                f"run --shm-size=..., in Kubernetes an emptyDir with medium: Memory at {_DEFAULT}), set {VARIABLE} to "
                "a folder of a larger file system in memory, or leave checkpoint.memory_every_n_steps out"
            ) from None
        finally:
            os.close(descriptor)

    def map(self, name: str) -> torch.Tensor:
        """Return a file as a tensor of bytes, to be read only; links are refused."""
        descriptor = open_regular(self.path, name)
        try:
            return _as_tensor(descriptor, os.fstat(descriptor).st_size, mmap.PROT_READ)
        finally:
            os.close(descriptor)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, as far as they are there."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, name))

    def remove_all(self) -> None:
        """Remove the folder."""
        remove_tree(self.path)

    def size(self) -> int:
        """Return the bytes that the files of the folder take."""
        return _bytes_in(self.path)


def _as_tensor(descriptor: int, size: int, access: int) -> torch.Tensor:
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    mapped = mmap.mmap(descriptor, size, prot=access)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _bytes_in(path: str) -> int:
    total = 0
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_size
    return total


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"


def left_by_others(own: str) -> list[tuple[str, int]]:
    """List folders of runs that no process holds any more, with their bytes.

    Args:
        own: the path of this run's folder, which is left out.
    """
    found = []
    try:
        beside = sorted(Path(own).parent.iterdir())
    except OSError:
        return []
    for path in beside:
        if str(path) == own or path.is_symlink() or not path.is_dir():
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.append((str(path), _bytes_in(str(path))))
        except OSError:
            pass  # a run that lives
        finally:
            os.close(descriptor)
    return found

"""A node's folder of one run in shared host memory: where it lies, which job has it,
and how files come into it.

    $SMP_MEMORY_FOLDER (default /dev/shm)
        torch-smp-<uid>/             mode 0700
            <run>/                   of one run; locked by the ranks that train
                owner                the process that took the lock, for messages
                rank-00003-0/        a part: the slices of one rank, in a checkpoint's format; two, used alternately
                    tensors          written in place
                    index.json, rest.json, rest.pt
                    manifest.json    the commit: removed first, written last

Every user may write to /dev/shm, so that a folder or file there is used only if it
belongs to this user and is closed to others; links are not followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import re
import stat
import sys
import time
import warnings
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from smp_core.checkpoint.folders.addresses import is_address
from smp_core.checkpoint.folders.file_system import (
    host_id,
    release,
    remove_tree,
    try_lock,
)
from smp_core.checkpoint.folders.local_folder import open_regular
from smp_core.checkpoint.layout import MANIFEST, CheckpointError

logger = logging.getLogger("smp")

VARIABLE = "SMP_MEMORY_FOLDER"
TENSORS = "tensors"
_DEFAULT = "/dev/shm"
_OWNER = "owner"
_PART = re.compile(r"rank-\d{5,}-[01]")
_held: dict[str, int] = {}  # run folder -> descriptor that holds this process's lock


def run_name(root: str, by: str) -> str:
    """Return the name of the run that saves to a folder on disk: a new process goes on
    with the same run there.

    Args:
        root: the folder; or what else names the run.
        by: what trains.
    """
    # Base names are for people; two folders of one base name differ by the digest.
    path = root if is_address(root) else os.path.abspath(root)
    name = re.sub(r"[^A-Za-z0-9]+", "-", os.path.basename(path))[:40]
    return "-".join(
        filter(None, (name, by, hashlib.sha256(path.encode()).hexdigest()[:12]))
    )


def launcher_job() -> str | None:
    """Return what the launcher calls this job, the same after a restart of it; None
    where it has no name."""
    for variable in ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "TORCHELASTIC_RUN_ID"):
        name = os.environ.get(variable)
        if name and name != "none":  # torchrun's name for a job without one
            return f"{variable}-{name}"
    return None


def part_name(rank: int, number: int) -> str:
    """Return the name of the folder of a rank's part."""
    return f"rank-{rank:05d}-{number}"


def _top() -> str:
    return os.path.join(
        os.environ.get(VARIABLE) or _DEFAULT, f"torch-smp-{os.geteuid()}"
    )


def _is_ours(path: str, kind: int = stat.S_IFREG) -> bool:
    # lstat looks at a link itself, not at what it points to.
    status = os.lstat(path)
    return (
        stat.S_IFMT(status.st_mode) == kind
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o077
    )


def _private(path: str) -> str:
    """Make a directory that only this user may use, or check that the one at the path
    is such a directory.

    Raises:
        CheckpointError: it is another user's, a link, or open to others; or cannot be
            made.
    """
    try:
        # Permissions are set while the folder is made: there is no instant in which
        # others could open it.
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status, ours = os.lstat(path), _is_ours(path, stat.S_IFDIR)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and os.path.isdir(
            os.path.dirname(path)
        ):
            return _private(path)  # a run that ended has removed it at this instant
        why = f"{error.strerror}; set {VARIABLE} to a folder in memory"
        raise CheckpointError(f"{path} cannot be made: {why}") from None
    if not ours:
        raise CheckpointError(
            f"{path} is of user {status.st_uid}, {stat.filemode(status.st_mode)}, and states of training are kept only "
            f"in folders where nobody else can write: remove it, or set {VARIABLE} to another folder in memory"
        )
    return path


class NodeMemory:
    """The folder of a run on this node. A lock that this process still has of an
    earlier run of the name is given back.

    Args:
        run: :func:`run_name`; with the node's name behind it where ranks of one machine
            pose as several nodes.

    Attributes:
        path: the folder.

    Raises:
        CheckpointError: the folder cannot be made, is not this user's alone, or is
            named by a relative path.
    """

    def __init__(self, run: str) -> None:
        # A script may change its working directory, and a restart may begin in another.
        given = os.environ.get(VARIABLE)
        if given and not os.path.isabs(given):
            raise CheckpointError(
                f"{VARIABLE}={given} is a relative path, under which another working directory would not find what is "
                f"kept: write the whole path, e.g. {VARIABLE}={os.path.abspath(given)}"
            )
        self.path = os.path.join(_private(_top()), run)
        # A second run of this process must not be excluded by its own first one.
        self.give_back()
        _private(self.path)

    def take(self, first: bool, advice: str, patience: float = 0.0) -> None:
        """Lock the folder for this job: the first rank of a node alone, which it can
        only where no rank of another job has it, and after it the others together with
        it.

        Args:
            advice: what to type to train although another job has the name.
            patience: seconds for which ranks of a job whose first one is dead are
                waited for: they notice it, and end.

        Raises:
            CheckpointError: another job that runs has it.
        """
        deadline = time.monotonic() + patience
        # Exclusive succeeds only where no process of any job has the folder; shared
        # locks of one job's ranks go together.
        while not self._lock(fcntl.LOCK_EX if first else fcntl.LOCK_SH):
            # An owner of the same pid and start time is alive, and waiting for it is in
            # vain. Otherwise its ranks are about to notice its end.
            pid, started, command = self._owner()
            if (started and started == _started(pid)) or time.monotonic() > deadline:
                raise CheckpointError(
                    f"another job keeps its states in {self.path}: process {pid} on this machine ({command}). One job "
                    f"at a time can have a name: wait for its end, or {advice}"
                )
            time.sleep(0.2)
        # The owner's line is for messages; the lock decides.
        if first:
            owner = f"{os.getpid()} {_started(os.getpid())} {' '.join(sys.argv)[:200]}"
            _write(os.path.join(self.path, _OWNER), owner.encode())
            # Not atomic: for an instant another job may have it alone.
            fcntl.flock(_held[self.path], fcntl.LOCK_SH)
            if self._owner()[0] != str(os.getpid()):
                raise CheckpointError(
                    f"another job has taken {self.path} at this instant: start again"
                )

    def give_back(self) -> None:
        """Give the lock back, if this process has it."""
        if self.path in _held:
            release(_held.pop(self.path))

    def _lock(self, kind: int) -> bool:
        """Lock the folder that is at the path now; return False where another process's
        lock excludes it."""
        while True:
            try:
                descriptor = os.open(
                    _private(self.path), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                )
            except FileNotFoundError:
                continue  # of a run that has just ended, and removed its folder
            # The lock is the kernel's and ends with the process, however that ends.
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return False
            except OSError:
                pass  # no locks on this file system
            # The folder may have been removed and made anew between open and lock: then
            # the lock is on one that no path leads to.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.lstat(self.path)):
                    _held[self.path] = descriptor
                    return True
            os.close(descriptor)  # as above

    def _owner(self) -> list[str]:
        try:
            with open(os.path.join(self.path, _OWNER)) as file:
                return [*file.read(4096).split(" ", 2), "", "", ""][:3]
        except (OSError, ValueError):
            return ["?", "", "?"]

    @property
    def key(self) -> str:
        # Processes of one machine can have different /dev/shm (containers), and
        # machines can have equal inodes, so both are part of the key.
        """The identity of the folder: equal for the ranks of a node."""
        status = os.lstat(self.path)
        return f"{host_id()}-{status.st_dev}-{status.st_ino}"

    # What is in it

    def at(self, part: str, *name: str) -> str:
        """Return the path of a part, or of a file in it."""
        return os.path.join(self.path, part, *name)

    def is_committed(self, part: str) -> bool:
        """Return whether a part has a manifest."""
        return os.path.lexists(self.at(part, MANIFEST))

    def parts(self) -> list[str]:
        """List the parts; those that are not this user's alone are named in a warning
        and left out."""
        # Another user's file in a part could be exchanged while it is read.
        names = sorted(filter(_PART.fullmatch, os.listdir(self.path)))
        found = []
        for name in names:
            folder = self.at(name)
            if _is_ours(folder, stat.S_IFDIR) and all(
                _is_ours(self.at(name, each)) for each in os.listdir(folder)
            ):
                found.append(name)
            else:
                logger.warning("not used: %s, which is not this user's alone", folder)
        return found

    def uncommit(self, part: str) -> None:
        """Remove all of a part but its tensors, the manifest first."""
        # The manifest goes first, so that a part is never committed with files missing.
        names = os.listdir(self.at(part)) if os.path.isdir(self.at(part)) else []
        for name in sorted(names, key=lambda name: name != MANIFEST):
            if name != TENSORS:
                os.unlink(self.at(part, name))

    def write(self, part: str, name: str, data: bytes) -> None:
        # Written aside and renamed: a process that ends here leaves no half file.
        """Write a small file, which appears as a whole."""
        _private(self.at(part))
        temporary = self.at(part, f".{name}-{os.getpid()}")
        _write(temporary, data)
        os.rename(temporary, self.at(part, name))

    def allocate(self, part: str, size: int) -> Tensor:
        """Make a part's file of ``size`` bytes, all of them reserved, and return it as
        a tensor of bytes in shared memory. What jobs that have ended left is removed
        where there is too little, the oldest first.

        Raises:
            CheckpointError: there is not enough memory; says what to type.
        """
        # The old part is freed before the new one is reserved: memory is bounded by
        # two.
        self.remove([part])
        path = os.path.join(_private(self.at(part)), TENSORS)
        # Usually there is room; only a rank that lacks it takes a turn at removing.
        with contextlib.suppress(OSError):
            return _reserve(path, size)
        with _turn():  # one rank after another: what the one before has freed may do
            while True:
                try:
                    return _reserve(path, size)
                except OSError as error:
                    if error.errno == errno.ENOSPC and _free_the_oldest():
                        continue
                    status = os.statvfs(self.path)
                    free = in_words(status.f_bavail * status.f_frsize)
                    raise CheckpointError(
                        f"{self.path}: no room for {in_words(size)} of this rank's state ({free} are free, "
                        f"{error.strerror}; two states of each rank are kept): give the container more shared memory "
                        f"(docker run --shm-size=..., in Kubernetes an emptyDir with medium: Memory at {_DEFAULT}), "
                        f"set {VARIABLE} to a folder of a larger file system in memory, or leave "
                        "checkpoint.memory_every_n_steps out"
                    ) from None

    def map(self, part: str) -> Tensor:
        """Return a part's file of tensors as a tensor of bytes, to be read only; links
        are refused."""
        descriptor = open_regular(self.at(part), TENSORS)
        try:
            return _as_tensor(descriptor, os.fstat(descriptor).st_size, mmap.PROT_READ)
        finally:
            os.close(descriptor)

    def remove(self, parts: Collection[str]) -> None:
        """Remove parts, as far as they are there; their manifests first."""
        # All manifests before any large file: a removal that ends in between leaves
        # nothing that looks whole.
        for part in parts:
            self.uncommit(part)
        for part in parts:
            if os.path.lexists(self.at(part)):
                remove_tree(self.at(part))


def _write(path: str, data: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    # O_EXCL and O_NOFOLLOW: a file or link that another process puts here is not
    # written through.
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb"
    ) as file:
        file.write(data)


def _reserve(path: str, size: int) -> Tensor:
    descriptor = os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600
    )
    try:
        # Reserved at once: to write to a page that cannot be had would end the process.
        if size:
            os.posix_fallocate(descriptor, 0, size)
        return _as_tensor(descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def _as_tensor(descriptor: int, size: int, access: int) -> Tensor:
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    mapped = mmap.mmap(descriptor, size, prot=access)
    with warnings.catch_warnings():
        # torch warns of read-only memory; readers copy from it and never write.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _started(pid: int | str) -> str:
    """Return when a process started, in ticks of the kernel's clock; "" where it has
    ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The command's name may contain spaces and parentheses; what follows the
            # last ")" does not.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    # Zombies and dead processes hold nothing any more.
    return "" if fields[0] in "ZX" else fields[19]


def in_words(size: float) -> str:
    """Return a number of bytes in MiB or GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"


def size_of(path: str) -> str:
    """Return the bytes that a run's folder takes, in words."""
    total = 0
    for where, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return in_words(total)


# What jobs that have ended left


def _of_ended_jobs() -> Iterator[str]:
    """Yield the folders of runs that no process holds, the oldest first, each locked
    until the next is asked for."""
    top = _top()
    if not os.path.isdir(top) or not _is_ours(top, stat.S_IFDIR):
        return
    folders = [
        entry.path for entry in os.scandir(top) if entry.is_dir(follow_symlinks=False)
    ]
    for path in sorted(folders, key=_changed):
        lock = None
        with contextlib.suppress(FileNotFoundError):
            lock = try_lock(path)
        if lock is not None:
            try:
                yield path
            finally:
                release(lock)


def _changed(path: str) -> float:
    # A job that ends at this instant removes its folder.
    try:
        return os.path.getmtime(path)
    except FileNotFoundError:
        return 0.0


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    descriptor = os.open(_top(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # no locks on this file system
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        release(descriptor)


def left_by_ended_jobs() -> list[tuple[str, str]]:
    """List the folders of runs that no process holds any more, with their bytes in
    words; the oldest first."""
    return [(path, size_of(path)) for path in _of_ended_jobs()]


def _free_the_oldest() -> bool:
    """Remove the oldest folder that a job which has ended left; return False where
    there is none."""
    for path in _of_ended_jobs():
        logger.warning(
            "%s: its job has ended, and its %s of memory are needed: removed",
            path,
            size_of(path),
        )
        if remove_tree(path):
            return True
    return False


def _forget_locks() -> None:
    """Close the descriptors of locks in a process that was forked (a worker of a data
    loader), which would hold them for as long as it lives."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)

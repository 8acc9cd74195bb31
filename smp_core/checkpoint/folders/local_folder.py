"""The checkpoint folders on a local or shared POSIX file system.

A save goes to a fresh sibling ``.tmp-<name>-<host>-<random>``; its files and
directories are fsynced, the manifest is written last, and one rename is the commit.
Over an existing checkpoint the rename is an exchange (Linux renameat2), so that at
every instant the path holds a whole checkpoint. Where the file system cannot exchange
(NFS), the save's files carry its identity in their names, as on an object store: they
are moved into the checkpoint that is there, the manifest replaces the old one in one
rename, which is the commit, and the old files go. Only what is at the path and no whole
checkpoint of ours (a link, half of one) is moved away first, so that a crash may leave
the path empty. Files of other names in a replaced folder are the user's, and stay.

The temporary directory is locked (flock) for as long as its save lives, so that a later
save can tell what a crash left behind from what another job is writing at the moment.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import stat
import time
import zipfile
from collections.abc import Iterator

from smp_core.checkpoint.folders.file_system import (
    UNNAMED_PREFIX,
    can_exchange,
    fsync_directory,
    new_save_id,
    release,
    remove_tree,
    rename_exchange,
    rename_new,
    try_lock,
)
from smp_core.checkpoint.folders.leftovers import sweep, temporaries_of
from smp_core.checkpoint.folders.storage import (
    Folder,
    RangeFile,
    Sink,
    Transaction,
    is_own,
)
from smp_core.checkpoint.layout import (
    MANIFEST,
    TEMPORARY_PREFIX,
    CheckpointError,
    Manifest,
)
from smp_core.checkpoint.untrusted import FOLDER_NAMES, MANIFEST_BYTES

logger = logging.getLogger("smp")

_SEEN_SECONDS = 30.0
_OTHERS_SECONDS = 60.0  # for which another job's move into the same place is waited for
_NO_LINKS = "links in a checkpoint are not followed: copy what they point to (cp -rL)"


def open_regular(path: str, name: str) -> int:
    """Open a file of a folder for reading, and return its descriptor.

    Links and pipes are refused, not followed: a folder of a stranger could point with
    them to any file, or block. The folder itself may be a link (``last.ckpt``): the
    user gave its path.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is no regular file, or cannot be opened.
    """
    where = os.path.join(path, name)
    *folders, file = name.split("/")
    opened: list[int] = []
    try:
        # Folder by folder, each opened below the one before and not through a link; a
        # path opened at once would follow a link in its middle.
        try:
            opened.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
            for folder in folders:
                opened.append(
                    os.open(
                        folder,
                        os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW,
                        dir_fd=opened[-1],
                    )
                )
            # O_NONBLOCK: opening a pipe would wait for its writer.
            descriptor = os.open(
                file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=opened[-1]
            )
        finally:
            for folder_descriptor in opened:
                os.close(folder_descriptor)
    # A link in the middle looks like a missing directory to the system.
    except (FileNotFoundError, NotADirectoryError) as error:
        if folders and os.path.islink(os.path.join(path, *folders)):
            raise CheckpointError(
                f"{where}: {folders[-1]} is a link; {_NO_LINKS}"
            ) from None
        raise FileNotFoundError(error.errno, error.strerror, where) from None
    except OSError as error:
        reason = (
            f"is a link; {_NO_LINKS}"
            if error.errno == errno.ELOOP
            else f"cannot be read: {error}"
        )
        raise CheckpointError(f"{where} {reason}") from None
    # A descriptor that is already open cannot be exchanged for a link any more.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(
            f"{where} is no regular file but a folder, a pipe or a device: not read"
        )
    return descriptor


class _LocalRangeFile(RangeFile):
    def __init__(self, path: str, name: str) -> None:
        self.path = os.path.join(path, name)
        self.descriptor = open_regular(path, name)
        self.bytes = os.fstat(self.descriptor).st_size

    def read_into(self, begin: int, target: memoryview) -> None:
        while len(target):
            try:
                # preadv takes at most 2 GiB at a time.
                count = os.preadv(self.descriptor, [target[: 1 << 30]], begin)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error}") from error
            # Reading behind the end gives nothing; without this the loop would not end.
            if count == 0:
                raise CheckpointError(
                    f"{self.path} is cut short: it ends at byte {begin}, more was expected"
                )
            target = target[count:]
            begin += count

    def close(self) -> None:
        os.close(self.descriptor)


class LocalFolder(Folder):
    """A checkpoint directory."""

    def __init__(self, path: str) -> None:
        self.address = path
        self.path = path

    def exists(self) -> bool:
        return os.path.exists(self.path)

    def names(self) -> list[str]:
        if not os.path.isdir(self.path):
            return []
        try:
            # A stranger's folder may have any number of files: the list is bounded.
            return sorted(itertools.islice(_all_files(self.path), FOLDER_NAMES))
        except FileNotFoundError:
            return []  # removed meanwhile
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be listed: {error}") from error

    def size(self, name: str) -> int:
        descriptor = open_regular(self.path, name)
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def read(self, name: str, limit: int) -> bytes:
        file = _LocalRangeFile(self.path, name)
        try:
            # The limit comes before memory is taken for a file of any size.
            if file.bytes > limit:
                raise CheckpointError(
                    f"{file.path} has {file.bytes} bytes, at most {limit} are read"
                )
            data = bytearray(file.bytes)
            file.read_into(0, memoryview(data))
        finally:
            file.close()
        return bytes(data)

    def open(self, name: str) -> RangeFile:
        return _LocalRangeFile(self.path, name)

    def signs_of_crash(self) -> bool:
        # A temporary directory that lies alongside is what an interrupted save leaves.
        return bool(temporaries_of(self.path))


class LocalTransaction(Transaction):
    """A save into a temporary sibling directory, committed by one rename."""

    def __init__(self, path: str) -> None:
        self.address = path
        self.path = path
        self.temporary = ""
        self.mark = ""
        self._lock: int | None = None

    def begin(self, save_id: str, overwrite: bool) -> None:
        parent = os.path.dirname(os.path.abspath(self.path))
        # First what a crash left: it may be as large as the checkpoint to be written.
        os.makedirs(parent, exist_ok=True)
        sweep(self.path)
        self._check_target(overwrite)
        # Without an exchange, files are moved one by one into the folder of before,
        # where two saves' files must not have the same names.
        if os.path.isfile(os.path.join(self.path, MANIFEST)) and not os.path.islink(
            self.path
        ):
            self.mark = "" if can_exchange(parent) else save_id.rsplit("-", 1)[-1]
        # Locked before it has the name by which another job's sweep would find it.
        unnamed = os.path.join(parent, f"{UNNAMED_PREFIX}{save_id}")
        os.mkdir(unnamed)
        try:
            self._lock = try_lock(unnamed)
            os.rename(unnamed, _temporary(self.path, save_id))
        except BaseException:
            with contextlib.suppress(OSError):
                os.rmdir(unnamed)
            raise
        self.temporary = _temporary(self.path, save_id)

    # The other ranks write into the folder that rank 0 made and locked.
    def join(self, save_id: str, mark: str) -> None:
        self.mark = mark
        self.temporary = _temporary(self.path, save_id)
        # Network file systems may show a new directory late.
        deadline = time.monotonic() + _SEEN_SECONDS
        while not os.path.isdir(self.temporary):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"this rank (host {os.uname().nodename}) does not see {self.temporary}, which rank 0 made; save to "
                    "a path on a file system that all nodes share"
                )
            time.sleep(0.05)

    def _check_target(self, overwrite: bool) -> None:
        if not os.path.lexists(self.path):
            return
        if not overwrite:
            raise CheckpointError(
                f"{self.path} exists already; choose another path or pass overwrite=True"
            )
        # A single file of an earlier run (checkpoint="full") may be replaced; any other
        # file, like a folder of anything else, may be a mistyped path.
        is_file = not os.path.isdir(self.path) and not os.path.islink(self.path)
        if is_file and not _is_single_checkpoint(self.path):
            raise CheckpointError(
                f"{self.path} is a file that is no checkpoint; it is not overwritten. Choose another path, or remove "
                "that file first"
            )
        # A checkpoint, or half of one, may be replaced.
        if (
            os.path.isdir(self.path)
            and not os.path.exists(f"{self.path}/{MANIFEST}")
            and not _is_half(self.path)
        ):
            raise CheckpointError(
                f"{self.path} holds something that is not a torch-smp checkpoint; it is not overwritten. Choose "
                "another path, or remove that directory first"
            )

    def file_name(self, stem: str, suffix: str) -> str:
        return f"{stem}-{self.mark}{suffix}" if self.mark else f"{stem}{suffix}"

    def create(self, name: str, algorithm: str) -> Sink:
        path = os.path.join(self.temporary, name)
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        return Sink(open(path, "xb", buffering=0), name, algorithm)

    def written(self) -> Folder:
        return LocalFolder(self.temporary)

    def commit(self, manifest: bytes) -> None:
        # The manifest is written last: a folder with one is whole.
        sink = self.create(MANIFEST, "xxh3")
        sink.write(manifest)
        sink.close()
        # Names of new files are durable when their directories are; every directory
        # above a file counts.
        directories = {self.temporary}
        for name in _all_files(self.temporary):
            while name := os.path.dirname(name):
                directories.add(os.path.join(self.temporary, name))
        for where in sorted(directories):
            fsync_directory(where)
        # Names with a mark move file by file; otherwise the folder is renamed as one.
        if self.mark:
            replaced = self._move_into_place(manifest)
        else:
            replaced = self._rename_into_place()
            self._look_after_rename(manifest, replaced)
        self.temporary = ""  # the rename was the commit: from here on nothing is undone
        try:
            fsync_directory(os.path.dirname(os.path.abspath(self.path)))
        except OSError as error:
            # Whole and in its place for every reader; only what a power failure would
            # leave of the rename is not known.
            kept = f"; what it replaced is kept as {replaced}" if replaced else ""
            logger.error(
                "%s was saved, but its directory could not be made durable: %s%s",
                self.path,
                error,
                kept,
            )
            replaced = None
        self._unlock()
        if replaced:
            _keep_others_files(replaced, self.path)
            remove_tree(replaced)

    def _rename_into_place(self) -> str | None:
        """Put the new checkpoint at its path; return the path of the one it replaced,
        to be removed."""
        # Other jobs may create or remove the target between two steps; each step is
        # tried anew with what is then there.
        while True:
            try:
                rename_new(self.temporary, self.path)
                return None
            except FileExistsError:
                pass
            # One system call exchanges both folders, so that the path is never without
            # a checkpoint.
            try:
                if rename_exchange(self.temporary, self.path):
                    return self.temporary
            except FileNotFoundError:
                continue  # another job removed the target in between
            # No exchange here, and no whole checkpoint of ours at the path (see begin):
            # it is moved away first.
            away = _temporary(self.path, new_save_id())
            os.rename(self.path, away)
            os.rename(self.temporary, self.path)
            return away

    def _look_after_rename(self, manifest: bytes, replaced: str | None) -> None:
        """Look once more at what was renamed, and take it back if somebody has removed
        a file of it meanwhile.

        Raises:
            CheckpointError: a file is gone; the path holds what it held before.
        """
        # Cleaners of file systems remove old files of temporary directories; the check
        # of written files was before the rename.
        lost = _missing_of(self.path, manifest)
        # Another job has replaced this save meanwhile: its files are not ours.
        if not lost or self._is_another_save(manifest):
            return
        try:
            self._take_back(replaced)
        except OSError as error:
            self.temporary = ""  # what was replaced may lie there
            kept = f"; what it replaced is kept as {replaced}" if replaced else ""
            raise CheckpointError(
                f"{_gone(self.path, lost)}, and the rename cannot be undone: {error}{kept}"
            ) from None
        raise CheckpointError(
            f"{_gone(self.path, lost)}; the checkpoint of before stays"
        )

    def _is_another_save(self, manifest: bytes) -> bool:
        try:
            return LocalFolder(self.path).read(MANIFEST, MANIFEST_BYTES) != manifest
        except FileNotFoundError:
            return False
        except CheckpointError:
            return True  # a link, say: what lies there is not this save's

    def _take_back(self, replaced: str | None) -> None:
        """Put what was replaced back to the path; this save becomes the temporary
        again, which is removed."""
        is_there = os.path.lexists(self.path)
        # The exchange is undone by another one.
        if replaced == self.temporary and is_there:
            rename_exchange(self.temporary, self.path)
            return
        if is_there:
            os.rename(self.path, self.temporary)
        if replaced is not None:
            os.rename(replaced, self.path)

    def _move_into_place(self, manifest: bytes) -> str | None:
        """Move the files into the checkpoint at the path, its manifest last; return
        what is to be removed then."""
        if not os.path.isfile(os.path.join(self.path, MANIFEST)):
            # Another job removed the target in between.
            return self._rename_into_place()
        try:
            lock = _lock_against_others(self.path)
        except FileNotFoundError:
            return self._rename_into_place()  # as above
        try:
            # A link could lead anywhere on the file system.
            extra = os.path.join(self.path, "extra")
            if os.path.islink(extra):
                os.unlink(extra)  # nothing is written through it
            # The manifest stays behind until all other files are in place and durable.
            names = sorted(
                name for name in _all_files(self.temporary) if name != MANIFEST
            )
            for name in names:
                os.makedirs(
                    os.path.dirname(os.path.join(self.path, name)), exist_ok=True
                )
                os.rename(
                    os.path.join(self.temporary, name), os.path.join(self.path, name)
                )
            # Names of moved files before the manifest that lists them.
            for where in (extra, self.path):
                if os.path.isdir(where):
                    fsync_directory(where)
            replaced = LocalFolder(self.path).read(MANIFEST, MANIFEST_BYTES)
            # Before the manifest takes the place of one whose files are.
            if lost := _missing_of(self.path, manifest):
                raise CheckpointError(
                    f"{_gone(self.path, lost)}; the checkpoint of before stays"
                )
            os.rename(
                os.path.join(self.temporary, MANIFEST),
                os.path.join(self.path, MANIFEST),
            )
            # Looked at again, because a file may have gone while the manifest was
            # renamed; the old manifest and its files are all still there.
            if lost := _missing_of(self.path, manifest):
                with open(
                    os.path.join(self.temporary, MANIFEST), "xb", buffering=0
                ) as file:
                    file.write(replaced)
                os.rename(
                    os.path.join(self.temporary, MANIFEST),
                    os.path.join(self.path, MANIFEST),
                )
                raise CheckpointError(
                    f"{_gone(self.path, lost)}; the checkpoint of before stays"
                )
            fsync_directory(self.path)
            # From here on the old save's files are named by no manifest. Files of other
            # names are the user's and stay.
            for name in LocalFolder(self.path).names():
                if name not in (MANIFEST, *names) and is_own(name):
                    os.unlink(os.path.join(self.path, name))
        finally:
            release(lock)
        return self.temporary

    def abort(self) -> None:
        if self.temporary:
            remove_tree(self.temporary)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            release(self._lock)
            self._lock = None


def _temporary(path: str, save_id: str) -> str:
    return os.path.join(
        os.path.dirname(path), f"{TEMPORARY_PREFIX}{os.path.basename(path)}-{save_id}"
    )


def _lock_against_others(path: str) -> int:
    """Lock a folder, and return the descriptor that holds the lock.

    Raises:
        CheckpointError: another job holds it and does not go on.
    """
    began = time.monotonic()
    # The lock is given up when the process ends, however it ends.
    while (lock := try_lock(path)) is None:
        if time.monotonic() - began > _OTHERS_SECONDS:
            raise CheckpointError(
                f"another job has held the lock of {path} for {_OTHERS_SECONDS:.0f} s, in which it moves what it saved "
                "there; end it, or save elsewhere"
            )
        time.sleep(0.05)
    return lock


def _keep_others_files(replaced: str, path: str) -> None:
    """Move files that are no part of a checkpoint, such as notes, from the folder of a
    replaced one into the folder at its path. A replaced link leads to another folder,
    which keeps its files."""
    if os.path.islink(replaced) or not os.path.isdir(replaced):
        return
    for name in os.listdir(replaced):
        if name != MANIFEST and not is_own(name):
            try:
                os.rename(os.path.join(replaced, name), os.path.join(path, name))
            except OSError as error:
                logger.warning(
                    "%s/%s is lost with what was replaced: %s", path, name, error
                )


def _missing_of(path: str, manifest: bytes) -> list[str]:
    """List the files that a manifest names and a folder does not have; of what cannot
    be looked at nothing is said."""
    lost = []
    for name in (MANIFEST, *Manifest.from_bytes(manifest, path).files):
        try:
            os.lstat(os.path.join(path, name))
        except (FileNotFoundError, NotADirectoryError):
            lost.append(name)
        except OSError as error:
            logger.warning("%s/%s cannot be looked at: %s", path, name, error)
    return lost


def _gone(path: str, lost: list[str]) -> str:
    return f"{path}/{lost[0]} is gone: it was removed during the commit"


def _all_files(path: str) -> Iterator[str]:
    """Yield the files in a folder, relative to it; an error is raised, where
    ``os.walk`` would leave files out."""

    def failed(error: OSError) -> None:
        raise error

    for where, _, names in os.walk(path, onerror=failed):
        for name in names:
            yield os.path.relpath(os.path.join(where, name), path)


def _is_single_checkpoint(path: str) -> bool:
    """Return whether a file is one of torch.save (an archive), or empty."""
    if not os.path.isfile(path):
        return False
    return os.path.getsize(path) == 0 or zipfile.is_zipfile(path)


def _is_half(path: str) -> bool:
    """Return whether everything in a folder is part of a checkpoint, so that a save may
    replace the folder."""
    return all(is_own(name) for name in os.listdir(path))


def remove_local(path: str) -> None:
    """Remove a checkpoint directory; it is renamed first, so that no half of it is ever
    found under its name.

    A link to a checkpoint is removed as a link.

    Raises:
        CheckpointError: a directory that is not a checkpoint.
    """
    if os.path.islink(path):
        os.unlink(path)
        return
    if not os.path.lexists(path):
        return
    # A mistyped path must not cost anything else.
    if not os.path.exists(os.path.join(path, MANIFEST)):
        raise CheckpointError(
            f"{path} is not a torch-smp checkpoint and is not removed"
        )
    # The new name is one that the next save's sweep removes, should this end in
    # between.
    away = _temporary(os.path.abspath(path), new_save_id())
    os.rename(path, away)
    fsync_directory(os.path.dirname(away))
    remove_tree(away)

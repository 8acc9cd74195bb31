"""The checkpoint folders on object stores and other fsspec addresses (``s3://``,
``gs://``, ``memory://``).

There is no rename to commit with. Every file of a save carries the save's identity in
its name, so that nothing is written over; writing ``manifest.json``, one atomic put, is
the commit. Over an earlier checkpoint, its manifest is replaced by that put and its
files are removed afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import fsspec

from smp_core.checkpoint.folders.storage import (
    Folder,
    RangeFile,
    Sink,
    Transaction,
    is_own,
)
from smp_core.checkpoint.layout import MANIFEST, CheckpointError, Manifest
from smp_core.checkpoint.untrusted import MANIFEST_BYTES, NoSuchFolder, StoreError

logger = logging.getLogger("smp")

_STALE_SECONDS = 24 * 3600.0


def _open_fs(address: str) -> tuple[Any, str]:
    try:
        fs, path = fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{address} cannot be opened: {error}") from None
    # fsspec keeps listings in the process; another rank or job may have written since.
    fs.invalidate_cache()
    return fs, path.rstrip("/")


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turn what a store's own library raises into a StoreError, but for a file that is
    not there."""
    # Callers decide by these two errors: a missing file is an answer, a store that
    # fails is none. Libraries of stores raise whatever types they like.
    try:
        yield
    except (FileNotFoundError, CheckpointError):
        raise
    except (NotADirectoryError, IsADirectoryError) as error:
        raise FileNotFoundError(path) from error
    except Exception as error:
        raise StoreError(
            f"{path} cannot be read: {type(error).__name__}: {error}"
        ) from error


class _ObjectRangeFile(RangeFile):
    request_bytes = 64 << 20

    def __init__(self, fs: Any, path: str, size: int) -> None:
        self.fs = fs
        self.path = path
        self.bytes = size

    def read_into(self, begin: int, target: memoryview) -> None:
        with _reading(self.path):
            data = self.fs.cat_file(self.path, start=begin, end=begin + len(target))
        # A shorter object gives fewer bytes and no error.
        if len(data) != len(target):
            raise CheckpointError(
                f"{self.path} is cut short: it ends at byte {begin + len(data)}, more was expected"
            )
        target[:] = data

    def close(self) -> None:
        """Do nothing: no file is held open."""


class ObjectFolder(Folder):
    """A checkpoint under an fsspec address."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self.fs, self.path = _open_fs(address)

    def exists(self) -> bool:
        with _reading(self.path):
            return bool(self.fs.exists(self.path))

    def names(self) -> list[str]:
        try:
            with _reading(self.path):
                found = self.fs.find(self.path)
        # A prefix without objects does not exist on a store.
        except FileNotFoundError:
            return []
        return sorted(
            name[len(self.path) + 1 :]
            for name in found
            # Consoles of stores make folders as empty objects that end with a slash.
            if name.startswith(self.path + "/") and not name.endswith("/")
        )

    def listing(self) -> dict[str, int] | None:
        # The listing follows a write of this process.
        self.fs.invalidate_cache()
        with _reading(self.path):
            found = self.fs.find(self.path, detail=True)
        return {
            name[len(self.path) + 1 :]: int(entry["size"])
            for name, entry in found.items()
        }

    def size(self, name: str) -> int:
        path = f"{self.path}/{name}"
        with _reading(path):
            entry = self.fs.info(path)
            # A file system of fsspec over local folders has links and pipes too.
            if entry["type"] != "file" or entry.get("islink"):
                raise CheckpointError(f"{path} is no regular file: not read")
            return int(entry["size"])

    def read(self, name: str, limit: int) -> bytes:
        path, size = f"{self.path}/{name}", self.size(name)
        # The limit comes before the download.
        if size > limit:
            raise CheckpointError(f"{path} has {size} bytes, at most {limit} are read")
        with _reading(path):
            return bytes(self.fs.cat_file(path))

    def open(self, name: str) -> RangeFile:
        return _ObjectRangeFile(self.fs, f"{self.path}/{name}", self.size(name))


class ObjectTransaction(Transaction):
    """A save under an fsspec address, committed by writing the manifest."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self.fs, self.path = _open_fs(address)
        self.mark = ""
        # The manifest that was sent: `abort` compares it with what the store has.
        self.sent: bytes | None = None
        self.before: bytes | None = None  # the manifest that is replaced
        self.replaced: list[str] = []

    def begin(self, save_id: str, overwrite: bool) -> None:
        folder = ObjectFolder(self.address)
        names = folder.names()
        if MANIFEST in names:
            if not overwrite:
                raise CheckpointError(
                    f"{self.address} exists already; choose another path or pass overwrite=True"
                )
            # Only what really lies in the folder: names lead nowhere else.
            self.before, listed = _manifest_of(folder, self.address)
            self.replaced = sorted(listed & set(names))
        # Beside a checkpoint of ours, files of other names are the user's, and stay.
        # Without one, the address may be mistyped.
        foreign = [name for name in names if name != MANIFEST and not is_own(name)]
        if foreign and MANIFEST not in names:
            raise CheckpointError(
                f"{self.address} holds something that is not a torch-smp checkpoint ({foreign[0]}, ...); it is not "
                "overwritten. Choose another path, or remove it first"
            )
        # What no manifest names is of an interrupted save, or of one that is being
        # written.
        kept = {MANIFEST, *foreign, *self.replaced}
        self._sweep([name for name in names if name not in kept])
        self.fs.makedirs(self.path, exist_ok=True)
        self.mark = save_id.rsplit("-", 1)[-1]

    def join(self, save_id: str, mark: str) -> None:
        self.mark = mark

    def _sweep(self, names: list[str]) -> None:
        for name in names:
            try:
                changed = self.fs.modified(f"{self.path}/{name}").timestamp()
            # A store that does not tell times keeps what it has.
            except (NotImplementedError, AttributeError, KeyError, OSError):
                continue
            # Younger objects may belong to a save of another job that is still running.
            if time.time() - changed > _STALE_SECONDS:
                logger.warning(
                    "removing %s/%s, which an interrupted save left", self.address, name
                )
                self._remove(name)

    def file_name(self, stem: str, suffix: str) -> str:
        return f"{stem}-{self.mark}{suffix}"

    def create(self, name: str, algorithm: str) -> Sink:
        if "/" in name:
            self.fs.makedirs(f"{self.path}/{name.rsplit('/', 1)[0]}", exist_ok=True)
        # A store's objects are durable when their upload has ended.
        return Sink(
            self.fs.open(f"{self.path}/{name}", "wb"), name, algorithm, sync=False
        )

    def written(self) -> Folder:
        return ObjectFolder(self.address)

    def commit(self, manifest: bytes) -> None:
        self.sent = manifest
        # One put is atomic: readers see the old manifest or the new one.
        self.fs.pipe_file(f"{self.path}/{MANIFEST}", manifest)
        self._look_after_commit(manifest)
        # From here on it is the checkpoint, whatever happens to what it replaces.
        self.mark = ""
        for name in self.replaced:
            self._remove(name)

    def _remove(self, name: str) -> None:
        """Remove a file that is of no use; one that stays costs room, and no save."""
        try:
            self.fs.rm_file(f"{self.path}/{name}")
        except Exception as error:  # stores raise what they like
            logger.warning("%s/%s could not be removed: %s", self.address, name, error)

    def _look_after_commit(self, manifest: bytes) -> None:
        """Look once more at what was committed, and put the manifest of before back if
        a file has been removed.

        Raises:
            CheckpointError: a file is gone; the address holds what it held before.
        """
        try:
            listed = ObjectFolder(self.address).listing() or {}
        # Not known to be wrong: the commit stands.
        except (StoreError, FileNotFoundError) as error:
            logger.warning(
                "%s was saved, and could not be looked at afterwards: %s",
                self.address,
                error,
            )
            return
        lost = sorted(
            set(Manifest.from_bytes(manifest, self.address).files) - set(listed)
        )
        if not lost:
            return
        # Without a checkpoint of before, the address is empty again.
        if self.before is None:
            self.fs.rm_file(f"{self.path}/{MANIFEST}")
        else:
            self.fs.pipe_file(f"{self.path}/{MANIFEST}", self.before)
        self.sent = None
        raise CheckpointError(
            f"{self.address}/{lost[0]} is gone: it was removed during the commit; the checkpoint of before stays"
        )

    def abort(self) -> None:
        # Before `begin` nothing was written; after the commit nothing is taken back.
        if not self.mark or self._may_be_committed():
            return
        # The mark is in every name of this save and in no other's.
        for name in ObjectFolder(self.address).names():
            if self.mark in name:
                self.fs.rm_file(f"{self.path}/{name}")

    def _may_be_committed(self) -> bool:
        """Return whether the manifest may have arrived although the store raised: then
        its files stay."""
        if self.sent is None:
            return False
        # Only the very bytes that were sent show that the put arrived.
        try:
            return bool(self.fs.cat_file(f"{self.path}/{MANIFEST}") == self.sent)
        except FileNotFoundError:
            return False
        except Exception as error:
            logger.warning(
                "%s: it is not known whether this save arrived, its files stay: %s",
                self.address,
                error,
            )
            return True


def _manifest_of(folder: Folder, address: str) -> tuple[bytes | None, set[str]]:
    """Return a manifest that is to be replaced, and the files that it names."""
    try:
        data = folder.read(MANIFEST, MANIFEST_BYTES)
        return data, set(Manifest.from_bytes(data, f"{address}/{MANIFEST}").files)
    except CheckpointError as error:
        logger.warning(
            "the checkpoint to be replaced is broken, its files stay: %s", error
        )
        return None, set()


def remove_objects(address: str) -> None:
    """Remove a checkpoint: its manifest first, so that a half removed one is never
    taken for a complete one.

    Raises:
        CheckpointError: there is no manifest under the address.
    """
    fs, path = _open_fs(address)
    with _reading(path):
        is_there = bool(fs.exists(path))
        is_ours = bool(fs.exists(f"{path}/{MANIFEST}"))
    if not is_there:
        return
    if not is_ours:
        raise CheckpointError(
            f"{address} is not a torch-smp checkpoint and is not removed"
        )
    # The manifest goes first: what is left of a removal that ends here is no
    # checkpoint.
    fs.rm_file(f"{path}/{MANIFEST}")
    fs.rm(path, recursive=True)


def list_objects(address: str) -> list[str]:
    """List the names of the folders under an address.

    Raises:
        CheckpointError: nothing is there, or the store cannot be read.
    """
    fs, path = _open_fs(address)
    try:
        with _reading(path):
            entries = fs.ls(path, detail=True)
    except FileNotFoundError:
        raise NoSuchFolder(f"there is no folder of checkpoints at {address}") from None
    return [
        entry["name"].rstrip("/").rsplit("/", 1)[-1]
        for entry in entries
        if entry["type"] == "directory"
    ]


def write_object(address: str, data: bytes) -> None:
    """Write one small object."""
    fs, path = _open_fs(address)
    fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
    fs.pipe_file(path, data)

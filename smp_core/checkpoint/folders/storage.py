"""The storage of checkpoint files: the interface that the writer and the reader use.

A `Folder` is read; a `Transaction` is written and becomes visible as a whole at
`commit` or not at all. The two implementations are
smp_core.checkpoint.folders.local_folder (rename is the commit) and
smp_core.checkpoint.folders.object_folder (writing the manifest last is the commit);
smp_core.checkpoint.folders.addresses chooses between them.
"""

from __future__ import annotations

import contextlib
import os
import re
from abc import ABC, abstractmethod
from typing import Any, BinaryIO

import xxhash

from smp_core.checkpoint.layout import (
    CheckpointError,
    FileRecord,
    digest_of,
    new_digest,
)

# Each block of so many bytes has a digest of its own, which is checked while tensors
# are read.
BLOCK_BYTES = 4 << 20
BLOCK_DIGITS = 16  # hexadecimal, of XXH3-64
# Large enough for the disk, small enough that a piece is still in cache when it is
# hashed.
PIECE_BYTES = 8 << 20
_MARK = r"(-[0-9a-f]{12})?"  # the identity of a save that was moved into place
_OWN_FILE = re.compile(
    rf"tensors-\d{{5,}}-of-\d{{5,}}{_MARK}\.safetensors|(index|rest){_MARK}\.json|(rest|rest-pickle){_MARK}\.pt|extra"
)


class Sink:
    """A file being written: every byte goes through the digest.

    Args:
        raw: an unbuffered binary file.
        name: name in the folder, for messages.
        algorithm: digest algorithm.
        sync: make the content durable (called once, before closing).
    """

    def __init__(
        self, raw: BinaryIO, name: str, algorithm: str, sync: bool = True
    ) -> None:
        self.raw = raw
        self.name = name
        self.algorithm = algorithm
        self.sync = sync
        self.digest = new_digest(algorithm)
        self.bytes = 0
        self.header_bytes = 0
        self.header_digest = ""
        self._blocks: list[str] = []
        self._block = xxhash.xxh3_64()

    @property
    def blocks(self) -> str:
        """The digests of all blocks, one behind the other; the last one may be shorter
        than BLOCK_BYTES."""
        # A block that is just complete is in the list already.
        last = [self._block.hexdigest()] if self.bytes % BLOCK_BYTES else []
        return "".join(self._blocks + last)

    def write(self, data: Any) -> None:
        """Write all of a bytes-like object."""
        view = memoryview(data).cast("B")
        while len(view):
            # Pieces end where blocks end, so that each piece belongs to one block.
            piece = view[: BLOCK_BYTES - self.bytes % BLOCK_BYTES]
            view = view[len(piece) :]
            self.digest.update(piece)
            self._block.update(piece)
            self.bytes += len(piece)
            if self.bytes % BLOCK_BYTES == 0:
                self._blocks.append(self._block.hexdigest())
                self._block.reset()
            # A raw file may take fewer bytes than it is given.
            while len(piece):
                written = self.raw.write(piece)
                piece = piece[len(piece) if written is None else written :]

    def write_header(self, data: bytes) -> None:
        """Write the head of a tensor file, whose own digest is kept for a quick check
        at each opening."""
        self.header_bytes = len(data)
        self.header_digest = digest_of(data, self.algorithm)
        self.write(data)

    def close(self) -> FileRecord:
        """Make the file durable, close it, and return its record."""
        try:
            # Flushed to the disk before the record exists that a manifest would list.
            if self.sync:
                self.raw.flush()
                os.fsync(self.raw.fileno())
        finally:
            self.raw.close()
        return FileRecord(
            self.bytes, self.digest.hexdigest(), self.header_bytes, self.header_digest
        )

    def abandon(self) -> None:
        """Close without making anything durable."""
        with contextlib.suppress(OSError):
            self.raw.close()


class RangeFile(ABC):
    """An open file that is read by byte ranges.

    Attributes:
        bytes: its size.
        request_bytes: how much is best read at once, where each read is a request to
            another machine; 0 elsewhere.
    """

    bytes: int
    request_bytes: int = 0

    @abstractmethod
    def read_into(self, begin: int, target: memoryview) -> None:
        """Fill ``target`` from byte ``begin`` on.

        Raises:
            CheckpointError: the file ends before.
        """

    @abstractmethod
    def close(self) -> None: ...


class Folder(ABC):
    """A checkpoint folder for reading.

    Attributes:
        address: the path or address that the user gave, for messages.
    """

    address: str

    @abstractmethod
    def exists(self) -> bool:
        """Return whether the folder exists."""

    @abstractmethod
    def names(self) -> list[str]:
        """List the files in the folder, ``extra/NAME`` included; at most FOLDER_NAMES
        of a foreign one."""

    def listing(self) -> dict[str, int] | None:
        """Return the size of every file, where one request lists them all; None
        elsewhere."""
        return None

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the size of a regular file in bytes.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: it is a link, a pipe, ..., or cannot be read.
        """

    @abstractmethod
    def read(self, name: str, limit: int) -> bytes:
        """Read a small regular file.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: as :meth:`size`, or it has more than ``limit`` bytes.
        """

    @abstractmethod
    def open(self, name: str) -> RangeFile:
        """Open a regular file for reading ranges.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: as :meth:`size`.
        """

    def signs_of_crash(self) -> bool:
        """Return whether an unfinished save is next to this folder."""
        return False


class Transaction(ABC):
    """A save of one checkpoint.

    Rank 0 calls `begin` and hands the save's identity and `mark` to the others, which
    call `join`; all create files; rank 0 ends it with `commit` or `abort`.

    Attributes:
        address: the path or address that the user gave, for messages.
        mark: the part of the save's identity that its file names carry; empty where
            they need none.
    """

    address: str
    mark: str

    @abstractmethod
    def begin(self, save_id: str, overwrite: bool) -> None:
        """Make room for a new save.

        Raises:
            CheckpointError: something else is there, or ``overwrite`` is False and a
                checkpoint is.
        """

    @abstractmethod
    def join(self, save_id: str, mark: str) -> None:
        """Take part in a save that rank 0 began.

        Raises:
            CheckpointError: this rank does not see what rank 0 made (no shared file
                system).
        """

    @abstractmethod
    def file_name(self, stem: str, suffix: str) -> str:
        """Return the name under which a file of this save is created."""

    @abstractmethod
    def create(self, name: str, algorithm: str) -> Sink:
        """Open a new file of this save for writing."""

    @abstractmethod
    def written(self) -> Folder:
        """Return the folder in which the files of this save lie before the commit."""

    @abstractmethod
    def commit(self, manifest: bytes) -> None:
        """Write the manifest and make the save visible, all of it at once."""

    @abstractmethod
    def abort(self) -> None:
        """Remove the files of this save; the content from before stays."""


def missing(address: str) -> CheckpointError:
    """Make the error for a path at which nothing exists."""
    return CheckpointError(
        f"there is no checkpoint at {address}: nothing exists under this path"
    )


def is_own(name: str) -> bool:
    """Return whether a file in a folder, or the folder ``extra``, has a name that saves
    give; all others are the user's."""
    return bool(_OWN_FILE.fullmatch(name.split("/")[0]))

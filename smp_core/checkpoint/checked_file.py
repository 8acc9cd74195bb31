"""The check of bytes while they are read: a file is divided into blocks, each with a
digest in the index.

Bytes are read straight into their targets, in pieces that are hashed while they are in
the processor's cache. The slices of a rank lie one behind the other, so that a block
that one read has begun is hashed on by the next one, and every byte comes from the disk
once. Bytes of a block that no tensor needs are read into a small buffer; the writer
keeps small tensors, which all ranks read, in few blocks.

So a block may be compared with its digest after its first bytes have been handed out:
nothing that was read may be used before :meth:`CheckedFile.finish` has returned.
"""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from smp_core.checkpoint.folders.storage import BLOCK_DIGITS, RangeFile
from smp_core.checkpoint.layout import CheckpointError

# Stays in the cache of one core between its reading and its hashing.
_PIECE_BYTES = 1 << 20
_SHOWN = 3  # tensors that a message names


class CheckedFile(RangeFile):
    """A file whose blocks are compared with their digests.

    Args:
        file: the file, closed with this one.
        where: its path, for messages.
        digests: of all blocks, one behind the other.
        block: bytes of a block.
        names_in: lists the tensors that have bytes in a range, for messages.
    """

    def __init__(
        self,
        file: RangeFile,
        where: str,
        digests: str,
        block: int,
        names_in: Callable[[int, int], list[str]],
    ) -> None:
        self.file = file
        self.where = where
        self.digests = digests
        self.block = block
        self.names_in = names_in
        self.bytes = file.bytes
        # A store answers large requests best; a disk is read in pieces that fit the
        # cache.
        self._piece = file.request_bytes or _PIECE_BYTES
        self._digest = xxhash.xxh3_64()  # of the block in progress, from its beginning
        self._start = 0  # of that block
        self._position = 0  # behind the last byte that was hashed
        self._unwanted = memoryview(b"")

    def read_into(self, begin: int, target: memoryview) -> None:
        # Before anything is hashed: a short file is no damaged block.
        if begin + len(target) > self.bytes:
            raise CheckpointError(
                f"{self.where} is cut short: it ends at byte {self.bytes}, more was expected"
            )
        # A jump: the block in progress is read to its end and compared, then another
        # begins.
        if not self._position <= begin < self._start + self.block:
            self.finish()
            self._start = self._position = begin - begin % self.block
        # Bytes between the last read and this one belong to the block's digest too.
        self._skip(begin)
        self._read(target)

    def finish(self) -> None:
        """Check the block in progress, all of it.

        Raises:
            CheckpointError: it is damaged.
        """
        if self._position > self._start:
            self._skip(min(self._start + self.block, self.bytes))

    def _skip(self, upto: int) -> None:
        # One small buffer for all that is read only to be hashed.
        if self._position < upto and not len(self._unwanted):
            self._unwanted = memoryview(
                bytearray(min(self._piece, self.block, self.bytes))
            )
        while self._position < upto:
            self._read(self._unwanted[: upto - self._position])

    def _read(self, target: memoryview) -> None:
        """Read and hash what comes next, in pieces that end where blocks do."""
        while len(target):
            piece = target[: self._piece - self._position % self._piece]
            self.file.read_into(self._position, piece)
            self._hash(piece)
            target = target[len(piece) :]

    def _hash(self, piece: memoryview) -> None:
        """Hash what was read, and compare each block that ends in it."""
        while len(piece):
            # The last block may be shorter.
            stop = min(self._start + self.block, self.bytes)
            part = piece[: stop - self._position]
            self._digest.update(part)
            self._position += len(part)
            if self._position == stop:
                self._compare()
            piece = piece[len(part) :]

    def _compare(self) -> None:
        """Compare the block in progress, which is complete, and begin with the next
        one."""
        number = self._start // self.block
        if (
            self._digest.hexdigest()
            != self.digests[number * BLOCK_DIGITS : (number + 1) * BLOCK_DIGITS]
        ):
            names = self.names_in(self._start, self._position)
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise CheckpointError(
                f"{self.where} is damaged: its bytes from {self._start} to {self._position} do not fit their digest; "
                f"they hold {', '.join(names[:_SHOWN]) or 'its header'}{more}"
            )
        self._digest.reset()
        self._start = self._position

    def close(self) -> None:
        """Close the file."""
        self.file.close()

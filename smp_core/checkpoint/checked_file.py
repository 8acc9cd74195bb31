"""The check of bytes while they are read: a file is divided into blocks, each with a digest in the index.

A whole block is read straight into its target, in pieces that are hashed while they are in the processor's cache. Of a
block that is only wanted in part all is read, into a buffer that the next read begins with: the slices of a rank lie
one behind the other, so that every byte comes from the disk once.
"""

from __future__ import annotations

import xxhash

from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.storage import BLOCK_DIGITS, RangeFile

_PIECE_BYTES = 512 << 10  # stays in the cache of one core between its reading and its hashing


class CheckedFile(RangeFile):
    """A file whose blocks are compared with their digests.

    Args:
        file: the file, closed with this one.
        where: its path, for messages.
        digests: of all blocks, one behind the other.
        block: bytes of a block.
    """

    def __init__(self, file: RangeFile, where: str, digests: str, block: int) -> None:
        self.file = file
        self.where = where
        self.digests = digests
        self.block = block
        self.bytes = file.bytes
        self._kept = -1  # the number of the block in the buffer
        self._buffer = memoryview(b"")

    def read_into(self, begin: int, target: memoryview) -> None:
        end, position = begin + len(target), begin
        while position < end:
            number = position // self.block
            start, stop = number * self.block, min((number + 1) * self.block, self.bytes)
            if stop <= position:
                raise CheckpointError(f"{self.where} is cut short: it ends at byte {stop}, more was expected")
            if position == start and stop <= end and number != self._kept:
                position = self._whole_blocks(number, begin, target)
                continue
            upto = min(stop, end)
            target[position - begin : upto - begin] = self._part(number, start, stop)[position - start : upto - start]
            position = upto

    def _whole_blocks(self, number: int, begin: int, target: memoryview) -> int:
        """Read a block into its place, or as many as one request takes; return the position behind them."""
        start, end = number * self.block, min(begin + len(target), self.bytes)
        stop = min(start + max(self.file.request_bytes, self.block), end)
        if stop < self.bytes:
            stop -= stop % self.block
        if not self.file.request_bytes:
            self._read_block(number, start, target[start - begin : stop - begin])
            return stop
        self.file.read_into(start, target[start - begin : stop - begin])
        for position in range(start, stop, self.block):
            upto = min(position + self.block, stop)
            self._check(position // self.block, target[position - begin : upto - begin])
        return stop

    def _part(self, number: int, start: int, stop: int) -> memoryview:
        if number != self._kept:
            if not len(self._buffer):
                self._buffer = memoryview(bytearray(min(self.block, self.bytes)))
            self._kept = -1
            self._read_block(number, start, self._buffer[: stop - start])
            self._kept = number
        return self._buffer

    def _read_block(self, number: int, start: int, target: memoryview) -> None:
        digest, piece = xxhash.xxh3_64(), self.file.request_bytes or _PIECE_BYTES
        for begin in range(0, len(target), piece):
            part = target[begin : begin + piece]
            self.file.read_into(start + begin, part)
            digest.update(part)
        self._compare(number, digest.hexdigest())

    def _check(self, number: int, data: memoryview) -> None:
        self._compare(number, xxhash.xxh3_64_hexdigest(data))

    def _compare(self, number: int, digest: str) -> None:
        if digest != self.digests[number * BLOCK_DIGITS : (number + 1) * BLOCK_DIGITS]:
            first = number * self.block
            raise CheckpointError(f"{self.where} is damaged: its bytes from {first} on do not fit their digest")

    def close(self) -> None:
        """Close the file."""
        self.file.close()

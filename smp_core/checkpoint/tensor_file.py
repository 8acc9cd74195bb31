"""The safetensors files, streamed: a writer that hashes while it writes and never holds
a second copy of the data, and a reader of single slices.

The format (https://github.com/huggingface/safetensors#format) is a length, a JSON
header with dtype, shape and byte range of each entry, then the bytes. All sizes are
known from the plan, so the header goes first and the tensors follow one by one. A dtype
that safetensors does not know is stored as bytes (U8, last dim times the item size);
index.json has its true dtype.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smp_core.checkpoint.dtypes import safetensors_dtype
from smp_core.checkpoint.folders.storage import Folder, RangeFile, Sink
from smp_core.checkpoint.layout import (
    CheckpointError,
    Chunk,
    FileRecord,
    Manifest,
    digest_of,
)
from smp_core.torch_facts import decoded

# Where tensors begin in a file, as they do in memory: such copies are faster.
_CACHE_LINE_BYTES = 64
_SMALL_BYTES = 64 << 10  # tensors smaller than this lie side by side in a file
_SPAN_BYTES = 64 << 20  # most memory that a slice with gaps takes while it is read


@dataclass(frozen=True)
class Entry:
    """A tensor of a file to be written: its key in the file, shape and dtype."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def bytes_view(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, not copied. The tensor must outlive
    the view."""
    # Through the address: numpy has no bfloat16 or float8, and the bytes are the same.
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def host_tensor(tensor: Tensor) -> Tensor:
    """Return a contiguous CPU tensor with the same values; the tensor itself where it
    is one.

    Raises:
        CheckpointError: a tensor of another package that stays one without bytes.
    """
    # Codes are decoded, and lazy conjugations and signs are carried out: what is
    # written is what reading the tensor gives.
    host = decoded(tensor).detach().to("cpu")
    host = host.resolve_conj().resolve_neg().contiguous()
    if host.numel() and host.data_ptr() == 0:
        raise CheckpointError(
            f"a {type(tensor).__name__} of shape {list(tensor.shape)} has no bytes that could be saved: it wraps other "
            "tensors. Save those, or its values as a plain tensor"
        )
    return host


def place_in_file(size: int) -> tuple[int, bool]:
    """Return the key by which the tensors of a file are sorted, from a tensor's size in
    bytes.

    Sizes that are divisible by a higher power of two come first: this aligns each
    tensor to its item size, and each of a multiple of 64 bytes to a cache line. Then
    small tensors come last. Many of them (steps of optimizers, buffers) are read by all
    ranks, and a reader checks complete blocks: small tensors should share as few blocks
    as possible.
    """
    divisor = min(size & -size, _CACHE_LINE_BYTES)
    return -divisor, size < _SMALL_BYTES


def header_of(
    entries: Sequence[Entry], metadata: dict[str, str]
) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the head of a safetensors file (length and JSON, padded so that tensors
    begin on a cache line) and the absolute byte range of each entry.
    """
    # Offsets in the header count from its end, ranges in the index from the file's
    # start.
    content: dict[str, object] = {"__metadata__": metadata}
    position = 0
    for entry in entries:
        name = safetensors_dtype(entry.dtype)
        shape = list(entry.shape)
        # Other readers of safetensors see bytes; ours take the dtype from the index.
        if name is None:
            name = "U8"
            shape = (
                [*shape[:-1], shape[-1] * entry.dtype.itemsize]
                if shape
                else [entry.dtype.itemsize]
            )
        content[entry.key] = {
            "dtype": name,
            "shape": shape,
            "data_offsets": [position, position + entry.bytes],
        }
        position += entry.bytes
    text = json.dumps(content, separators=(",", ":")).encode()
    # Spaces behind the JSON are allowed, and let the tensors begin on a cache line.
    text += b" " * (-(8 + len(text)) % _CACHE_LINE_BYTES)
    start = 8 + len(text)
    ranges, position = [], start
    for entry in entries:
        ranges.append((position, position + entry.bytes))
        position += entry.bytes
    return struct.pack("<Q", len(text)) + text, ranges


def write_tensor_file(
    sink: Sink,
    entries: Sequence[Entry],
    tensors: Iterable[Tensor],
    metadata: dict[str, str],
) -> tuple[FileRecord, list[tuple[int, int]]]:
    """Write a safetensors file.

    Args:
        sink: open file; closed on return and abandoned on an error.
        entries: the tensors of the file, in order.
        tensors: the values, in the same order; taken one at a time.
        metadata: text for the header's ``__metadata__``.

    Returns:
        the file's record and the absolute byte range of each entry.

    Raises:
        CheckpointError: a tensor does not have the shape or dtype of its entry.
        OSError: from the disk.
    """
    try:
        header, ranges = header_of(entries, metadata)
        sink.write_header(header)
        # One value at a time: `tensors` reads or gathers when it is asked.
        for entry, tensor in zip(entries, tensors, strict=True):
            if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
                raise CheckpointError(
                    f"tensor {entry.key} changed while it was saved: planned {entry.shape} {entry.dtype}, "
                    f"found {tuple(tensor.shape)} {tensor.dtype}"
                )
            host = host_tensor(tensor)
            sink.write(bytes_view(host))
        return sink.close(), ranges
    except BaseException:
        sink.abandon()
        raise


class TensorFile:
    """A tensor file of a checkpoint, opened for slices; its header is checked against
    the manifest.

    Raises:
        CheckpointError: missing, cut short, or not the file that was written under this
            name.
    """

    def __init__(self, folder: Folder, manifest: Manifest, name: str) -> None:
        self.name = name
        self.where = f"{folder.address}/{name}"
        record = manifest.files.get(name)
        if record is None:
            raise CheckpointError(
                f"{self.where} is not listed in the manifest: index and manifest do not fit"
            )
        try:
            self.file: RangeFile = folder.open(name)
        except FileNotFoundError:
            raise CheckpointError(f"{self.where} is missing") from None
        try:
            self._check(record, manifest.algorithm)
        except BaseException:
            self.file.close()
            raise

    def _check(self, record: FileRecord, algorithm: str) -> None:
        problem = record.size_problem(self.where, self.file.bytes)
        if problem is not None:
            raise CheckpointError(problem)
        # The header names file and save, so its digest finds a file that was exchanged.
        header = bytearray(record.header_bytes)
        self.file.read_into(0, memoryview(header))
        if digest_of(bytes(header), algorithm) != record.header_digest:
            raise CheckpointError(
                f"{self.where} is damaged, or is not the file that this save wrote under this name"
            )

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def read(
        self,
        chunk: Chunk,
        dtype: torch.dtype,
        offset: Sequence[int],
        lengths: Sequence[int],
        target: Tensor,
    ) -> None:
        """Copy a box of a stored slice into a tensor of the box's shape, any device,
        layout and dtype.

        Args:
            chunk: the stored slice.
            dtype: its dtype.
            offset, lengths: the box, in coordinates of the stored slice.
            target: filled in place.
        """
        # Nothing to read: no request to a store for zero bytes.
        if math.prod(lengths) == 0:
            return
        itemsize = dtype.itemsize
        # Row-major strides of the stored slice, in elements; the box is one span of
        # bytes with gaps.
        strides = [math.prod(chunk.shape[dim + 1 :]) for dim in range(len(chunk.shape))]
        first = sum(o * s for o, s in zip(offset, strides, strict=True))
        span = sum((n - 1) * s for n, s in zip(lengths, strides, strict=True)) + 1
        begin = chunk.begin + first * itemsize
        direct = (
            target.device.type == "cpu"
            and target.dtype == dtype
            and target.is_contiguous()
            # The memory of such a view is not what reading it gives.
            and not target.is_conj()
            and not target.is_neg()
        )
        # Without gaps, and into memory of the same kind: no copy in between.
        if span == math.prod(lengths) and direct:
            self.file.read_into(begin, bytes_view(target))
            return
        # Gaps, or another device or dtype: a buffer of bounded size is needed.
        if span * itemsize > _SPAN_BYTES and lengths:
            self._read_in_parts(chunk, dtype, offset, lengths, target)
            return
        buffer = torch.empty(span, dtype=dtype)
        self.file.read_into(begin, bytes_view(buffer))
        target.copy_(buffer.as_strided(tuple(lengths), strides))

    def _read_in_parts(
        self,
        chunk: Chunk,
        dtype: torch.dtype,
        offset: Sequence[int],
        lengths: Sequence[int],
        target: Tensor,
    ) -> None:
        # Cut along the outermost dimension of the box; what is still too large is cut
        # again.
        dim = next(d for d, length in enumerate(lengths) if length > 1)
        stride_bytes = math.prod(chunk.shape[dim + 1 :]) * dtype.itemsize
        step = min(max(1, _SPAN_BYTES // stride_bytes), math.ceil(lengths[dim] / 2))
        for start in range(0, lengths[dim], step):
            size = min(step, lengths[dim] - start)
            part_offset = [*offset[:dim], offset[dim] + start, *offset[dim + 1 :]]
            part_lengths = [*lengths[:dim], size, *lengths[dim + 1 :]]
            self.read(
                chunk, dtype, part_offset, part_lengths, target.narrow(dim, start, size)
            )

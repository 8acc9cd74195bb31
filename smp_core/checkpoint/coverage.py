"""The check of an index against the files: slices cover their tensors, and their bytes
lie inside the files.

A tensor of which a part is in no slice would be read as whatever memory held before. A
slice outside of its file, or one range of bytes that many tensors share, would make a
small checkpoint ask for large memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from smp_core.checkpoint.folders.storage import BLOCK_DIGITS
from smp_core.checkpoint.layout import (
    CheckpointError,
    Chunk,
    Index,
    Manifest,
    TensorRecord,
)

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape


def check_index(index: Index, manifest: Manifest, where: str) -> None:
    """Check every slice of an index.

    Args:
        where: the index's path, for messages.

    Raises:
        CheckpointError: slices overlap or leave a part of a tensor out; bytes outside
            of the file, in its header, or in two slices.
    """
    # Ranges of bytes by file, to find two slices that share some.
    ranges: dict[str, list[tuple[int, int]]] = {}
    for name, record in index.tensors.items():
        for chunk in record.chunks:
            _check_place(name, record, chunk, manifest, where)
            if chunk.begin < chunk.end:
                ranges.setdefault(chunk.file, []).append((chunk.begin, chunk.end))
        if not is_covered(record):
            raise CheckpointError(
                f"{where} is damaged: the slices of {name} do not cover it, or overlap"
            )
    for file, places in ranges.items():
        places.sort()
        # Each file needs one digest for each of its blocks, or none would be checked.
        size = manifest.files[file].bytes
        if (
            index.blocks
            and len(index.blocks.get(file, ""))
            != -(-size // index.block_bytes) * BLOCK_DIGITS
        ):
            raise CheckpointError(
                f"{where} is damaged: it lacks digests of blocks of {file}"
            )
        # Sorted by their beginnings, neighbours overlap if any two do.
        if any(end > begin for (_, end), (begin, _) in itertools.pairwise(places)):
            raise CheckpointError(
                f"{where} is damaged: two slices have the same bytes of {file}"
            )


def is_covered(record: TensorRecord) -> bool:
    """Return whether the slices of a tensor make all of it, each element once."""
    # Empty slices of uneven sharding cover nothing.
    boxes = [
        (chunk.offset, chunk.shape) for chunk in record.chunks if math.prod(chunk.shape)
    ]
    return not record.numel or tiles(boxes, record.shape)


def _check_place(
    name: str, record: TensorRecord, chunk: Chunk, manifest: Manifest, where: str
) -> None:
    file = manifest.files.get(chunk.file)
    if file is None:
        raise CheckpointError(
            f"{where} is damaged: {name} is in {chunk.file}, which the manifest does not list"
        )
    inside = len(chunk.offset) == len(chunk.shape) == len(record.shape) and all(
        offset + size <= whole
        for offset, size, whole in zip(
            chunk.offset, chunk.shape, record.shape, strict=True
        )
    )
    size = math.prod(chunk.shape) * record.dtype.itemsize
    if not inside or chunk.end - chunk.begin != size:
        raise CheckpointError(
            f"{where} is damaged: a slice of {name} does not fit the tensor"
        )
    if size and not file.header_bytes <= chunk.begin <= chunk.end <= file.bytes:
        raise CheckpointError(
            f"{where} is damaged: a slice of {name} lies outside of {chunk.file}"
        )


def tiles(boxes: Sequence[Box], shape: Sequence[int], dim: int = 0) -> bool:
    """Return whether boxes of at least one element fill a shape exactly, without
    overlap.

    They are looked at as a mesh cuts a tensor: slabs along the first dimension, each
    cut along the next one, and so on.
    """
    if dim == len(shape):
        return len(boxes) == 1
    # Boxes of equal extent along this dimension form a slab; slabs follow each other
    # without gaps, and each is cut along the next dimensions.
    slabs: dict[tuple[int, int], list[Box]] = {}
    for offset, size in boxes:
        slabs.setdefault((offset[dim], size[dim]), []).append((offset, size))
    position = 0
    for begin, length in sorted(slabs):
        if begin != position:
            return False
        position += length
    return position == shape[dim] and all(
        tiles(slab, shape, dim + 1) for slab in slabs.values()
    )

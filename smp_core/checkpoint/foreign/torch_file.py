"""The files of `torch.save`, written with one tensor in memory at a time.

torch.save takes a whole object. Under `torch.serialization.skip_data` it writes
everything but the tensors' bytes and leaves room for them (a zip archive, each storage
an uncompressed, aligned entry `data/0`, `data/1`, ... in the order in which the
storages occur in the object). The bytes are then written into that room, tensor by
tensor, and the archive's checksums are put right, so that the file is the one that
torch.save would have made.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from smp_core.checkpoint.foreign.inert_pickle import (
    Global,
    Made,
    Persistent,
    read_inert,
)
from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.save_plan import LazyTensor, tie_key
from smp_core.checkpoint.tensor_file import bytes_view, host_tensor
from smp_core.checkpoint.tree import map_tensors
from smp_core.checkpoint.untrusted import only_checkpoint_errors
from smp_core.outside import StrPath

_PICKLE_BYTES = 64 << 20
# How many bytes the elements of a view may have: so many, and so many times the file's.
_VIEW_BYTES = 64 << 20
_VIEW_TIMES = 16
_VIEWS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
_ITEM_BYTES = {
    **dict.fromkeys(("ComplexDoubleStorage",), 16),
    **dict.fromkeys(("DoubleStorage", "LongStorage", "ComplexFloatStorage"), 8),
    **dict.fromkeys(("FloatStorage", "IntStorage", "QInt32Storage"), 4),
    **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
    **dict.fromkeys(
        ("CharStorage", "ByteStorage", "BoolStorage", "QInt8Storage", "QUInt8Storage"),
        1,
    ),
    **dict.fromkeys(("QUInt4x2Storage", "QUInt2x4Storage", "UntypedStorage"), 1),
}
# Signature, ..., crc at field 6, name length, extra length.
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
# Signature, ..., crc at field 7, name, extra and comment lengths.
_CENTRAL_HEADER = struct.Struct("<4s6H3I5H2I")
_CRC_IN_LOCAL_HEADER = 14
_CRC_IN_CENTRAL_HEADER = 16


class TorchFile:
    """A file of torch.save whose tensors are filled in one by one.

    Args:
        path: the file to make; must not exist.
        content: nested dicts, lists and tuples; each tensor, DTensor or LazyTensor in
            them leaves room for its whole value. Two over the same memory share the
            room.

    Attributes:
        leaves: the tensors to be filled in, in order, each once.

    Raises:
        CheckpointError: a value holds tensors where this walk does not look (in an
            object of its own).
    """

    def __init__(self, path: StrPath, content: Any) -> None:
        self.path = Path(path)
        self.leaves: list[Any] = []
        self._placeholders: list[Tensor] = []
        self._known: dict[Any, Tensor] = {}
        # Room for every tensor, tied ones once; the skeleton has no bytes of its own
        # yet.
        skeleton = map_tensors(content, self._room)
        with open(path, "xb") as file, torch.serialization.skip_data():
            torch.save(skeleton, file)
        self._entries = self._data_entries()
        # torch numbers storages in the order in which it meets them, which is that of
        # our walk. Other sizes mean that it met tensors that the walk did not.
        sizes = [entry.file_size for entry in self._entries]
        if sizes != [
            placeholder.untyped_storage().nbytes() for placeholder in self._placeholders
        ]:
            raise CheckpointError(
                "a value that is no dict, list or tuple holds tensors: it cannot be streamed"
            )
        # Unbuffered: bytes go to known positions.
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115  (closed in close)
        self._checksums: dict[str, int] = {}

    def _room(self, leaf: Tensor | LazyTensor) -> Tensor:
        # Tensors that share memory share the room, as in torch.save.
        key: Any = id(leaf)
        if isinstance(leaf, LazyTensor):
            key = key if leaf.tie is None else ("tie", leaf.tie)
        else:
            key = tie_key(leaf) or key
        if key not in self._known:
            # Never touched, so it takes address space only.
            self._known[key] = torch.empty(tuple(leaf.shape), dtype=leaf.dtype)
            self._placeholders.append(self._known[key])
            self.leaves.append(leaf)
        return self._known[key]

    def _data_entries(self) -> list[zipfile.ZipInfo]:
        # Entries of other names are the pickle and torch's own facts.
        with zipfile.ZipFile(self.path) as archive:
            found = {
                int(entry.filename.rsplit("/", 1)[1]): entry
                for entry in archive.infolist()
                if _is_data(entry)
            }
            self._directory_start = archive.start_dir
        return [found[number] for number in sorted(found)]

    def fill(self, number: int, tensor: Tensor) -> None:
        """Write the unsharded value of ``leaves[number]``.

        Raises:
            CheckpointError: it does not have the shape and dtype that room was left
                for.
        """
        # Another shape or dtype would run over the next entry.
        room = self._placeholders[number]
        if (tensor.shape, tensor.dtype) != (room.shape, room.dtype):
            raise CheckpointError(
                f"tensor changed: planned {room.shape} {room.dtype}, got {tensor.shape} {tensor.dtype}"
            )
        entry = self._entries[number]
        host = host_tensor(tensor)
        data = bytes_view(host)
        self._write_at(_data_start(self._file.fileno(), entry), data)
        self._checksums[entry.filename] = zlib.crc32(data)

    def _write_at(self, position: int, data: Any) -> None:
        view = memoryview(data)
        while len(view):
            count = os.pwrite(self._file.fileno(), view[: 1 << 30], position)
            view, position = view[count:], position + count

    def close(self) -> None:
        """Correct the checksums and make the file durable."""
        descriptor = self._file.fileno()
        # A checksum stands in up to three places: the entry's header, a descriptor
        # behind its data, and the directory at the end.
        for entry in self._entries:
            checksum = struct.pack("<I", self._checksums.get(entry.filename, 0))
            self._write_at(entry.header_offset + _CRC_IN_LOCAL_HEADER, checksum)
            if entry.flag_bits & 8:  # a descriptor with the checksum follows the data
                after = _data_start(descriptor, entry) + entry.file_size
                signed = os.pread(descriptor, 4, after) == b"PK\x07\x08"
                self._write_at(after + (4 if signed else 0), checksum)
        # The directory is a list of headers of different lengths.
        position, size = self._directory_start, os.fstat(descriptor).st_size
        while position + _CENTRAL_HEADER.size <= size:
            header = _CENTRAL_HEADER.unpack(
                os.pread(descriptor, _CENTRAL_HEADER.size, position)
            )
            if header[0] != b"PK\x01\x02":
                break
            name = os.pread(
                descriptor, header[10], position + _CENTRAL_HEADER.size
            ).decode()
            if name in self._checksums:
                self._write_at(
                    position + _CRC_IN_CENTRAL_HEADER,
                    struct.pack("<I", self._checksums[name]),
                )
            position += _CENTRAL_HEADER.size + header[10] + header[11] + header[12]
        os.fsync(descriptor)
        self._file.close()

    def abandon(self) -> None:
        """Close the file as it is. One that is removed while it is open goes on taking
        room on the disk, for as long as an error of this save is known."""
        self._file.close()


def _is_data(entry: zipfile.ZipInfo) -> bool:
    parts = entry.filename.split("/")
    return len(parts) >= 2 and parts[-2] == "data" and parts[-1].isdigit()


def _data_start(descriptor: int, entry: zipfile.ZipInfo) -> int:
    # The lengths of name and extra field differ between header and directory, so the
    # header itself is read.
    header = _LOCAL_HEADER.unpack(
        os.pread(descriptor, _LOCAL_HEADER.size, entry.header_offset)
    )
    return entry.header_offset + _LOCAL_HEADER.size + header[9] + header[10]


def stream_torch_save(
    path: StrPath,
    content: Any,
    whole: Callable[[Any], Tensor],
    advance: Callable[[int], None],
) -> None:
    """Write ``torch.save(content, path)`` with one tensor in memory at a time.

    Args:
        path: the file to make; must not exist.
        content: as for :class:`TorchFile`.
        whole: a leaf -> its value.
        advance: told the bytes of each tensor that has been written.
    """
    file = TorchFile(path, content)
    try:
        for number, leaf in enumerate(file.leaves):
            value = whole(leaf)
            file.fill(number, value)
            advance(value.nbytes)
        file.close()
    finally:
        file.abandon()


def check_torch_file(path: StrPath) -> None:
    """Read a ``torch.save`` file and compare its checksums, which ``torch.load`` does
    not.

    Raises:
        CheckpointError: cut short, damaged, or not such a file.
    """
    if not os.path.isfile(path):
        raise CheckpointError(
            f"{os.fspath(path)} is missing, or no file but a folder, a pipe or a device"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except Exception as error:  # of a damaged archive anything
        raise CheckpointError(f"{os.fspath(path)} is damaged: {error}") from error
    if broken is not None:
        raise CheckpointError(
            f"{os.fspath(path)} is damaged: the checksum of {broken} does not fit"
        )


def step_of_file(path: StrPath) -> tuple[int, float]:
    """Return the order of a Lightning ``.ckpt`` among others: its ``global_step``, then
    the file's time.

    The step is read without running code from the file; -1 where it cannot be found.
    """
    step = -1
    if not os.path.isfile(path):
        return step, 0.0
    # Whatever the file contains, a step that cannot be found is no error.
    with (
        contextlib.suppress(CheckpointError),
        only_checkpoint_errors(""),
        zipfile.ZipFile(path) as archive,
    ):
        entry = next(
            (
                each
                for each in archive.infolist()
                if each.filename.split("/")[-1] == "data.pkl"
            ),
            None,
        )
        # The pickle's size is bounded before it is read.
        if entry is not None and entry.file_size <= _PICKLE_BYTES:
            content = read_inert(archive.read(entry), os.fspath(path))
            found = content.get("global_step") if isinstance(content, dict) else None
            step = found if type(found) is int else -1
    return step, os.path.getmtime(path)


def check_torch_content(file: StrPath | BinaryIO, where: str) -> None:
    """Look at a ``torch.save`` archive before ``torch.load`` allocates what it asks
    for.

    ``torch.load(weights_only=True)`` runs no code, but believes sizes: of compressed
    entries, storages and bytearrays.

    Args:
        where: its place, for messages.

    Raises:
        CheckpointError: damaged, or it asks for more memory than it has bytes.
    """
    with only_checkpoint_errors(where), zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        # A compressed entry can expand to any size.
        if any(
            entry.compress_type != zipfile.ZIP_STORED
            or entry.file_size != entry.compress_size
            for entry in entries
        ):
            raise CheckpointError(
                f"{where} has compressed entries, which torch.save does not write: not read"
            )
        # Names without the archive's own folder before them.
        sizes = {entry.filename.partition("/")[2]: entry.file_size for entry in entries}
        pickled = [
            entry for entry in entries if entry.filename.partition("/")[2] == "data.pkl"
        ]
        if (
            len(pickled) != 1
            or len(sizes) != len(entries)
            or pickled[0].file_size > _PICKLE_BYTES
        ):
            raise CheckpointError(
                f"{where} is damaged: it is not what torch.save writes"
            )
        # Everything that torch.load would allocate is named in the pickle: storages,
        # and bytearrays made from a number.
        for node in _nodes(read_inert(archive.read(pickled[0]), where)):
            if isinstance(node, Persistent):
                _check_storage(node.identity, sizes, where)
            elif isinstance(node, Made):
                _check_call(node, sum(sizes.values()), where)


def _nodes(root: Any) -> Iterator[Any]:
    """Yield every stand-in that :func:`read_inert` made of a pickle, once."""
    # Without recursion: a pickle may nest as deep as it likes, and refer to itself.
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        if isinstance(node, (Made, Persistent, dict, list, tuple, set, frozenset)):
            seen.add(id(node))
        if isinstance(node, (Made, Persistent)):
            yield node
        if isinstance(node, Made):
            waiting += [*node.arguments, node.state, *node.entries]
        elif isinstance(node, dict):
            waiting += [*node.keys(), *node.values()]
        elif isinstance(node, (list, tuple, set, frozenset)):
            waiting += node


def _check_call(made: Made, held: int, where: str) -> None:
    """Refuse what would take memory by a number in the pickle: ``bytearray(size)``,
    ``torch.FloatTensor(size)``, and a view with many more elements than it has memory.

    Args:
        held: bytes of the archive.
    """
    name = made.by.name
    by_size = name == "bytearray" and any(type(a) is int for a in made.arguments)
    # torch.save names these classes, and never calls them.
    if by_size or name.endswith("Tensor"):
        raise CheckpointError(f"{where} asks for memory by its size: not read")
    if name in _VIEWS and isinstance(made.arguments[0], Persistent):
        storage, _, shape = made.arguments[:3]
        itemsize = _ITEM_BYTES.get(storage.identity[1].name, 16)
        # An expanded tensor is written out whole by whoever saves it again.
        if math.prod(shape) * itemsize > _VIEW_BYTES + _VIEW_TIMES * held:
            raise CheckpointError(
                f"{where} has a tensor of shape {list(shape)} over {held} bytes at "
                "most: not read; save it with .contiguous()"
            )


def _check_storage(identity: Any, sizes: Mapping[str, int], where: str) -> None:
    # torch's persistent id of a storage: (kind, class, key, device, elements).
    kind, storage, key, _, count = identity
    itemsize = _ITEM_BYTES.get(storage.name, 0) if isinstance(storage, Global) else 0
    if (
        kind != "storage"
        or not itemsize
        or type(count) is not int
        or count * itemsize > sizes.get(f"data/{key}", -1)
    ):
        raise CheckpointError(
            f"{where} is damaged: a tensor has more elements than bytes, or is of an unknown kind"
        )

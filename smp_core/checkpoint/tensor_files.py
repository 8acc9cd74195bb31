"""The tensor files of one checkpoint that are open, for slices and for unsharded
tensors."""

from __future__ import annotations

import functools

import torch

from smp_core.checkpoint.checked_file import CheckedFile
from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.opening import OpenCheckpoint
from smp_core.checkpoint.tensor_file import TensorFile


class TensorFiles:
    """The open tensor files of a checkpoint, each opened once. What was read is for use
    when the ``with`` block has ended: the last bytes are checked there.
    """

    def __init__(self, opened: OpenCheckpoint) -> None:
        self.opened = opened
        self.files: dict[str, TensorFile] = {}
        self._checked: list[CheckedFile] = []

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            # After an error the last block may be half read; the error says more.
            for checked in self._checked if error is None else ():
                checked.finish()
        finally:
            for file in self.files.values():
                file.close()

    def get(self, name: str) -> TensorFile:
        """Open a tensor file, or return the open one."""
        if name not in self.files:
            try:
                file = TensorFile(self.opened.folder, self.opened.manifest, name)
                self.files[name] = file
            except CheckpointError:
                self.opened.same_save()
                raise
            index = self.opened.index
            # Bytes are checked on their way unless all digests were compared before.
            if self.opened.check_bytes and name in index.blocks:
                names_in = functools.partial(index.names_in, name)
                digests, block = index.blocks[name], index.block_bytes
                file.file = checked = CheckedFile(
                    file.file, file.where, digests, block, names_in
                )
                self._checked.append(checked)
        return self.files[name]

    def unsharded(self, name: str) -> torch.Tensor:
        """Read an unsharded tensor from its slices."""
        record = self.opened.index.record(name)
        # The slices cover the tensor exactly (smp_core.checkpoint.coverage), so nothing
        # of this memory stays unset.
        result = torch.empty(record.shape, dtype=record.dtype)
        for chunk in record.chunks:
            part = result
            for dim, (offset, size) in enumerate(
                zip(chunk.offset, chunk.shape, strict=True)
            ):
                part = part.narrow(dim, offset, size)
            self.get(chunk.file).read(
                chunk, record.dtype, [0] * len(chunk.shape), chunk.shape, part
            )
        return result

"""Weights in 8 or 4 bits, row by row: what frozen parameters are stored and gathered
as.

Symmetric integers with a scale for each block of a row (blockwise quantisation as in
ZeRO++, arXiv 2306.10209, 3.1): blocks of 256 elements for int8, of 64 for int4
(QLoRA's, arXiv 2305.14314). Blocks do not cross rows, so a rank that holds some rows of
a matrix has the same codes as one that holds all. A row of codes is its scales in
bfloat16, then its integers.

Codes are a fixed point: weights of float32, float64 or bfloat16 that were decoded in
their own dtype have the same codes again, bit by bit. A product of 7 bits and the 8 of
a scale is exact in float32, and where it is rounded to bfloat16 the same scale is the
nearest one again. So checkpoints can hold decoded weights and lose nothing. (float16
too, but for blocks whose largest magnitude is below 1e-5.)

Error bound per element, with a = the largest magnitude of its block: int8 a/250, int4
a/13.8 (half a step, and the rounding of the scale). A block that holds inf or nan is
decoded as nan; one below 1e-38 is lost.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

RowCodeName = Literal["int8", "int4"]
_LARGEST = {"int8": 127.0, "int4": 7.0}
_BLOCK = {"int8": 256, "int4": 64}
_ELEMENTS_AT_A_TIME = 1 << 22


class RowCodec:
    """Rows of floating point numbers <-> rows of bytes. B: blocks of a row.

    Args:
        name: "int8" or "int4".
    """

    def __init__(self, name: RowCodeName) -> None:
        self.name = name
        self._block, self._largest = _BLOCK[name], _LARGEST[name]

    def row_bytes(self, row: int) -> int:
        """Return the bytes of a row of so many elements."""
        return 2 * self._blocks(row) + (-(-row // 2) if self.name == "int4" else row)

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Compress ``values`` [n, row] into ``out`` uint8 [n, row_bytes(row)]."""
        for part, codes in self._in_parts(values, out, values.shape[1]):
            self._encode(part, codes)

    def decode(self, codes: Tensor, out: Tensor) -> None:
        """Decompress ``codes`` uint8 [n, row_bytes(row)] into ``out`` [n, row], rounded
        once to its dtype."""
        for part, values in self._in_parts(codes, out, out.shape[1]):
            self._decode(part, values)

    def _encode(self, values: Tensor, out: Tensor) -> None:
        n = values.shape[0]
        # Scales are rounded to bfloat16 before codes are made of them.
        blocks = self._padded(values.float()).view(n, -1, self._block)
        scales_NB = (blocks.abs().amax(dim=-1) / self._largest).to(torch.bfloat16)
        codes = (blocks / scales_NB.float().unsqueeze(-1)).round_()
        # A block of zeros divides by zero, and gets codes of zero.
        codes = (
            codes.clamp_(-self._largest, self._largest)
            .nan_to_num_(0.0)
            .to(torch.int8)
            .view(n, -1)
        )
        if self.name == "int4":
            codes = (codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)
        n_scales = 2 * scales_NB.shape[1]
        out[:, :n_scales].copy_(scales_NB.view(torch.uint8))
        out[:, n_scales:].copy_(codes[:, : out.shape[1] - n_scales].view(torch.uint8))

    def _decode(self, codes: Tensor, out: Tensor) -> None:
        n, row = out.shape
        n_scales = 2 * self._blocks(row)
        # The scales lie in front, as bytes; the codes behind them.
        scales_NB = codes[:, :n_scales].contiguous().view(torch.bfloat16).float()
        integers = codes[:, n_scales:].view(torch.int8)
        if self.name == "int4":
            integers = torch.stack(
                ((integers << 4) >> 4, integers >> 4), dim=-1
            ).flatten(1)[:, :row]
        blocks = self._padded(integers.float()).view(n, -1, self._block)
        out.copy_((blocks * scales_NB.unsqueeze(-1)).view(n, -1)[:, :row])

    def _padded(self, rows: Tensor) -> Tensor:
        """Return rows with zeros behind, up to a multiple of a block."""
        missing = -rows.shape[1] % self._block
        return F.pad(rows, (0, missing)) if missing else rows

    def _blocks(self, row: int) -> int:
        return -(-row // self._block)

    @staticmethod
    def _in_parts(one: Tensor, other: Tensor, row: int) -> zip[tuple[Tensor, Tensor]]:
        """Pair the rows of both, some four million elements at a time: temporaries are
        several times as large."""
        rows = max(1, _ELEMENTS_AT_A_TIME // max(row, 1))
        return zip(one.split(rows), other.split(rows), strict=True)

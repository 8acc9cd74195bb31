"""An optimizer's moments in 8 bits: a table of 256 values over seven decades, and one
scale for each block of a row.

Dynamic quantisation of Dettmers et al., "8-bit Optimizers via Block-wise Quantization"
(arXiv 2110.02861, sections 2.1 and 2.2), with bitsandbytes' tables: each block of 256
elements is divided by its largest magnitude, and each element becomes the nearest value
of the table. In one respect it follows Li et al., "Memory Efficient Optimizers with
4-bit States" (arXiv 2309.01507, section 4.1): a second moment above 0 is never rounded
to 0, which an update is divided by.

Blocks do not cross rows. A rank that holds some rows of a matrix therefore has the same
codes as one that holds all.

Error of an element x of a block with the largest magnitude a: for first moments 0.71 % of a, and 6.2 % of x where
|x| > a/10 (11 % where |x| > a/100); for second moments about half of it. The smallest values are a * 5.5e-7 and
a * 3.25e-7.
A block that holds inf or nan is decoded as nan and inf: none of its elements is finite.
"""

from __future__ import annotations

import functools
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from smp_core.codecs.codec import BLOCK

_DECADES = 7


def n_blocks(row: int) -> int:
    """Return the blocks, and scales, of a row of so many elements."""
    return -(-row // BLOCK)


class MomentCodec:
    """Rows of float32 <-> rows of 8-bit codes and their scales.

    Args:
        signed: first moments; False: second moments, which are never below 0.
        device: of the rows; the tables are made there.
    """

    def __init__(self, signed: bool, device: torch.device) -> None:
        values, middles = _tables(signed)
        self._values = torch.tensor(values, dtype=torch.float32, device=device)
        self._middles = torch.tensor(middles, dtype=torch.float32, device=device)

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes uint8 [n, row] and scales float32 [n, blocks] of rows [n,
        row]."""
        row = rows.shape[1]
        # Each block by its largest magnitude, then the table's nearest value.
        blocks = _in_blocks(rows.float())
        scales = blocks.abs().amax(dim=-1)
        blocks = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(
            -1
        )
        # The number of limits that lie below is the code.
        codes = torch.bucketize(blocks, self._middles, out_int32=True).to(torch.uint8)
        return codes.flatten(1)[:, :row], scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return rows float32 [n, row] of codes [n, row] and scales [n, blocks]."""
        row = codes.shape[1]
        blocks = _in_blocks(codes)
        # int32: half the memory of torch's usual index
        decoded = self._values.index_select(0, blocks.flatten().int()).view(
            blocks.shape
        )
        return decoded.mul_(scales.unsqueeze(-1)).flatten(1)[:, :row]


def _in_blocks(rows: Tensor) -> Tensor:
    """Return rows [n, row] as [n, blocks, block], with zeros behind a row that is no
    multiple of a block."""
    n, row = rows.shape
    blocks = n_blocks(row)
    if blocks == 1:
        # A row shorter than a block is one, without padding.
        return rows.unsqueeze(1)
    return F.pad(rows, (0, blocks * BLOCK - row)).view(n, blocks, BLOCK)


@functools.cache
def _tables(signed: bool) -> tuple[list[float], list[float]]:
    """Return the 256 values, rising, and the 255 limits between them.

    Each decade up to 1 has twice as many values as the one below, in the middles of
    equal stretches; besides there are 0 and 1.
    """
    # 0 and 1 are exact: nothing recorded, and the block's largest.
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        n = 2 ** (decade if signed else decade + 1)
        largest = 10.0 ** (decade + 1 - _DECADES)
        magnitudes = [largest * (0.1 + 0.9 * (place + 0.5) / n) for place in range(n)]
        values += magnitudes
        if signed:
            values += [-magnitude for magnitude in magnitudes]
    values.sort()
    # Nearest means halfway between neighbours.
    limits = [(below + above) / 2 for below, above in itertools.pairwise(values)]
    if not signed:
        limits[0] = 0.0  # what is above 0 stays above 0
    return values, limits

"""Blockwise codes in one pass over memory each way, as Triton kernels: encoding (amax,
scale, codes and what is rounded off), decoding, and decoding with the sum over peers.

A block is one row of a program: its largest magnitude, its scale and its codes come out
of the same registers. The scale is the flag too: it is not finite where the block held
inf or nan. Bytes and numbers are those of :class:`smp_core.codecs.codec.Blockwise`'s
eager formulas (true divisions, ties to even, products and sums not fused), except for
codes of blocks that are not finite, whose values are lost anyway. Payloads of bfloat16
have no scales, and are added up here alone.

Imported only where Triton is there. Shape letters: R payloads, N elements of each, B
bytes of each.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 8
_KINDS = {"int8": 0, "int4": 1, "fp8": 2, "bfloat16": 3}


@triton.jit  # type: ignore[untyped-decorator]
def _places(BLOCK: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the blocks of this program [ROWS], and the places of their values [ROWS,
    BLOCK].

    64-bit: a unit may have more than 2^31 elements."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _encode_kernel(  # type: ignore[no-untyped-def]
    values_ptr,
    rest_ptr,
    scales_ptr,
    codes_ptr,
    N,
    LIMIT: tl.constexpr,
    KIND: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row, at = _places(BLOCK, ROWS)
    inside = at < N
    x = tl.load(values_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if KEEP:
        x += tl.load(rest_ptr + at, mask=inside, other=0.0)
        tl.store(values_ptr + at, x, mask=inside)
    # A maximum passes over nan, so nan counts as inf here.
    scale = tl.div_rn(tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=1), LIMIT)
    tl.store(scales_ptr + row, scale, mask=row * BLOCK < N)
    # The smallest normal number: zeros stay zeros.
    scaled = tl.div_rn(x, tl.maximum(scale, 1.1754943508222875e-38)[:, None])
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT)
    if KIND == 2:
        numbers = scaled.to(tl.float8e4nv)
        back = numbers.to(tl.float32)
        codes = numbers.to(tl.uint8, bitcast=True)
    else:
        # 1.5 * 2^23 leaves no bits behind the point: rounded to the nearest, ties to
        # even.
        back = (scaled + 12582912.0) - 12582912.0
        codes = back.to(tl.int8).to(tl.uint8, bitcast=True)
    if KEEP:
        off = tl.where((scale < float("inf"))[:, None], x - back * scale[:, None], 0.0)
        tl.store(rest_ptr + at, off, mask=inside)
    if KIND == 1:
        low, high = tl.split(tl.reshape(codes, (ROWS, BLOCK // 2, 2)))
        pair = row[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        tl.store(codes_ptr + pair, (low & 15) | (high << 4), mask=2 * pair < N)
    else:
        tl.store(codes_ptr + at, codes, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _decoded(  # type: ignore[no-untyped-def]
    scales_ptr,
    codes_ptr,
    row,
    N,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the values [rows, BLOCK] of one payload, float32."""
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if KIND == 1:
        pair = row[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        pairs = tl.load(codes_ptr + pair, mask=2 * pair < N, other=0).to(tl.int32)
        # The upper bit of four is the sign.
        numbers = tl.interleave(((pairs & 15) ^ 8) - 8, ((pairs >> 4) ^ 8) - 8).to(
            tl.float32
        )
    else:
        codes = tl.load(codes_ptr + at, mask=at < N, other=0)
        if KIND == 3:
            numbers = codes.to(tl.float32)
        elif KIND == 2:
            numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            numbers = codes.to(tl.int8, bitcast=True).to(tl.float32)
    # Numbers of bfloat16 have no scale.
    if KIND != 3:
        scale = tl.load(scales_ptr + row, mask=row * BLOCK < N, other=0.0)
        numbers = numbers * scale[:, None]
    return numbers


@triton.jit  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    scales_ptr,
    codes_ptr,
    out_ptr,
    N,
    scales_stride,
    codes_stride,
    out_stride,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row, at = _places(BLOCK, ROWS)
    r = tl.program_id(1).to(tl.int64)
    values = _decoded(
        scales_ptr + r * scales_stride,
        codes_ptr + r * codes_stride,
        row,
        N,
        KIND,
        BLOCK,
    )
    tl.store(
        out_ptr + r * out_stride + at, values.to(out_ptr.dtype.element_ty), mask=at < N
    )


@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(  # type: ignore[no-untyped-def]
    scales_ptr,
    codes_ptr,
    own_ptr,
    total_ptr,
    N,
    R,
    me,
    scales_stride,
    codes_stride,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row, at = _places(BLOCK, ROWS)
    own = tl.load(own_ptr + at, mask=at < N, other=0.0)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for r in range(R):
        if r == me:
            total += own
        else:
            total += _decoded(scales_ptr, codes_ptr, row, N, KIND, BLOCK)
        scales_ptr += scales_stride
        codes_ptr += codes_stride
    tl.store(total_ptr + at, total, mask=at < N)


def encode(
    name: str,
    limit: float,
    block: int,
    values: Tensor,
    rest: Tensor | None,
    out: Tensor,
) -> None:
    """Compress ``values`` [N] into ``out`` [B]. With ``rest`` [N] float32, ``values``
    (float32) become the sum of both and ``rest`` what is rounded off that, 0 in blocks
    that are not finite."""
    scales, codes = _split(name, out, values.numel(), block)
    _encode_kernel[_grid(values.numel(), block)](
        values,
        values if rest is None else rest,
        scales,
        codes,
        values.numel(),
        LIMIT=limit,
        KEEP=rest is not None,
        **_options(name, block),
    )


def decode(name: str, block: int, payloads_RB: Tensor, out_RN: Tensor) -> None:
    """Decompress payloads into ``out_RN``, in its dtype; elements of a row are
    contiguous, rows may be anywhere."""
    count, n = out_RN.shape
    scales, codes = _split(name, payloads_RB, n, block)
    _decode_kernel[(*_grid(n, block), count)](
        scales,
        codes,
        out_RN,
        n,
        scales.stride(0),
        codes.stride(0),
        out_RN.stride(0),
        **_options(name, block),
    )


def sum_rows(
    name: str, block: int, payloads_RB: Tensor, own_N: Tensor, me: int, total_N: Tensor
) -> None:
    """Write the sum of the decompressed payloads, in their order, into ``total_N``;
    ``own_N`` (float32) has the place ``me``."""
    n = own_N.numel()
    scales, codes = _split(name, payloads_RB, n, block)
    _sum_kernel[_grid(n, block)](
        scales,
        codes,
        own_N,
        total_N,
        n,
        payloads_RB.shape[0],
        me,
        scales.stride(0),
        codes.stride(0),
        **_options(name, block),
    )


def _split(name: str, payloads: Tensor, n: int, block: int) -> tuple[Tensor, Tensor]:
    """Return scales and codes of payloads [..., B]."""
    if name == "bfloat16":
        numbers = payloads.view(torch.bfloat16)
        return numbers, numbers  # no scales
    first_code = 4 * triton.cdiv(n, block)
    return payloads[..., :first_code].view(torch.float32), payloads[..., first_code:]


def _grid(n: int, block: int) -> tuple[Any, ...]:
    return (triton.cdiv(n, block * _ROWS),)


def _options(name: str, block: int) -> dict[str, Any]:
    return {
        "KIND": _KINDS[name],
        "BLOCK": block,
        "ROWS": _ROWS,
        "enable_fp_fusion": False,
    }

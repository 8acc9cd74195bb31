"""The cast of a tensor in one pass as a Triton kernel: its FP8 numbers and its amax;
and the transpose of numbers that are in FP8 already.

The one pass makes delayed scaling cheaper than current scaling: with the scale known
beforehand the tensor is read once. Where Hopper's gradient products need the transpose
too it is made of the numbers, by a kernel of its own: Triton 3.6 on an H100 left a part
of the second layout unwritten when one kernel stored both of a float32 tensor (`casts`
of `make gpu-check`). Numbers are those of :func:`smp_core.fp8.casting.cast_eager`
(clamp, round to nearest even, nan stays nan); the amax is inf where the tensor holds a
nan.

The module is imported only where Triton is installed. Shape letters: R rows, C columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smp_core.fp8.scaling import E5M2, LARGEST

_BLOCK_R, _BLOCK_C = 64, 64


@triton.jit  # type: ignore[untyped-decorator]
def _tile(BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the rows [BLOCK_R] and the columns [BLOCK_C] of this program.

    64-bit: a long sequence times a wide layer passes 2^31 elements."""
    r = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    c = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    return r, c


@triton.jit  # type: ignore[untyped-decorator]
def _cast_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    scale_ptr,
    numbers_ptr,
    amax_ptr,
    R,
    C,
    stride_r,
    stride_c,
    LARGEST_VALUE: tl.constexpr,
    IS_E5M2: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    r, c = _tile(BLOCK_R, BLOCK_C)
    inside = (r[:, None] < R) & (c[None, :] < C)
    x = tl.load(
        x_ptr + r[:, None] * stride_r + c[None, :] * stride_c, mask=inside, other=0.0
    ).to(tl.float32)
    # A maximum passes over nan, so nan counts as inf here.
    magnitude = tl.where(x == x, tl.abs(x), float("inf"))
    tl.atomic_max(amax_ptr, tl.max(tl.max(magnitude, axis=1), axis=0))
    # Comparisons with nan are false, so nan stays. (With the min.NaN and max.NaN of
    # tl.clamp Triton may store garbage: triton-lang/triton#11111.)
    scaled = x * tl.load(scale_ptr)
    scaled = tl.where(scaled > LARGEST_VALUE, LARGEST_VALUE, scaled)
    scaled = tl.where(scaled < -LARGEST_VALUE, -LARGEST_VALUE, scaled)
    if IS_E5M2:
        numbers = scaled.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        numbers = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(numbers_ptr + r[:, None] * C + c[None, :], numbers, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _transpose_kernel(  # type: ignore[no-untyped-def]
    bytes_ptr,
    columns_ptr,
    R,
    C,
    stride_r,
    stride_c,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    r, c = _tile(BLOCK_R, BLOCK_C)
    inside = (r[:, None] < R) & (c[None, :] < C)
    numbers = tl.load(
        bytes_ptr + r[:, None] * stride_r + c[None, :] * stride_c, mask=inside, other=0
    )
    # The tile, turned, into a row-major tensor [C, R].
    turned = (c[:, None] < C) & (r[None, :] < R)
    tl.store(columns_ptr + c[:, None] * R + r[None, :], tl.trans(numbers), mask=turned)


def transposed_fused(x8_RC: Tensor) -> Tensor:
    """Make a row-major copy ``[C, R]`` of FP8 numbers of any strides on the current
    CUDA device.

    Tiles pass through shared memory, so that both sides are touched 16 bytes at a time;
    torch's copy of a transposed view of bytes touches one side byte by byte.
    """
    count_r, count_c = x8_RC.shape
    given_RC = x8_RC.view(torch.uint8)
    columns_CR = given_RC.new_empty(count_c, count_r)
    grid = (triton.cdiv(count_r, _BLOCK_R), triton.cdiv(count_c, _BLOCK_C))
    _transpose_kernel[grid](
        given_RC,
        columns_CR,
        count_r,
        count_c,
        given_RC.stride(0),
        given_RC.stride(1),
        BLOCK_R=_BLOCK_R,
        BLOCK_C=_BLOCK_C,
    )
    return columns_CR.view(x8_RC.dtype)


def cast_fused(
    x_RC: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    columns: bool,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return ``[R, C]`` FP8 numbers, ``[C, R]`` ones if wanted, and the 0-d float32 amax
    of ``x_RC``.

    Args:
        x_RC: on the current CUDA device, any strides, floating point.
        scale: 0-d float32 on the same device.
        amax: 0-d float32, the amax so far, which takes up that of ``x_RC``; None: a new
            one.
    """
    count_r, count_c = x_RC.shape
    if amax is None:
        amax = torch.zeros((), device=x_RC.device)
    numbers = x_RC.new_empty(count_r, count_c, dtype=torch.uint8)
    grid = (triton.cdiv(count_r, _BLOCK_R), triton.cdiv(count_c, _BLOCK_C))
    _cast_kernel[grid](
        x_RC,
        scale,
        numbers,
        amax,
        count_r,
        count_c,
        x_RC.stride(0),
        x_RC.stride(1),
        LARGEST_VALUE=LARGEST[dtype],
        IS_E5M2=dtype == E5M2,
        BLOCK_R=_BLOCK_R,
        BLOCK_C=_BLOCK_C,
    )
    made = numbers.view(dtype)
    return made, transposed_fused(made) if columns else None, amax

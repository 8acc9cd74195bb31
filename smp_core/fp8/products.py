"""The three matrix products of a linear layer in FP8, on the device and emulated.

    forward         y[R, N]  = x[R, K] w[N, K]^T
    input gradient  dx[R, K] = g[R, N] w[N, K]
    weight gradient dw[N, K] = g[R, N]^T x[R, K]

On CUDA from capability 8.9 on these are ``torch._scaled_mm`` (torch has no public name
for it before 2.13), which needs the first operand row-major and the second
column-major: so the gradients' products read transposed copies, made by the casts. Fast
accumulation (fewer bits in the tensor core's sums) is used in the forward product only.
Sizes are multiples of 16; rows are padded here where they are not.

Elsewhere operands are dequantised and multiplied: the same numbers up to the order of
summation. FP8 numbers and their products are exact in float32, so the results differ
from the device's only by the rounding of sums.

Shape letters: R rows (tokens), K inputs, N outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from smp_core.fp8.casting import Quantized, transposed
from smp_core.torch_facts import device_multiplies_fp8

_ALIGNMENT = 16


def forward_product(
    x: Quantized, w: Quantized, dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """Compute ``[R, N]`` in ``dtype``, with the bias added."""
    assert x.rows is not None and w.rows is not None
    # Elsewhere than on FP8 tensor cores the same numbers are multiplied in float32.
    if not device_multiplies_fp8(x.rows.device):
        y = _emulate(x.rows, w.rows.t(), x, w, dtype)
        return y if bias is None else y + bias.to(dtype)
    if bias is None:
        return scaled_mm(x.rows, w.rows.t(), x, w, dtype, fast=True)
    bias = bias.to(dtype)
    # The kernel adds a bias in the dtype of its result, if that is half precision.
    if dtype in (torch.bfloat16, torch.float16):
        return scaled_mm(x.rows, w.rows.t(), x, w, dtype, bias=bias, fast=True)
    return scaled_mm(x.rows, w.rows.t(), x, w, dtype, fast=True) + bias


def input_gradient(g: Quantized, w: Quantized, dtype: torch.dtype) -> Tensor:
    """Compute ``[R, K]`` in ``dtype``."""
    assert g.rows is not None
    if not device_multiplies_fp8(g.rows.device):
        assert w.rows is not None
        return _emulate(g.rows, w.rows, g, w, dtype)
    # Hopper wants the second operand column-major, so the transpose is read.
    if w.columns is not None:
        w8_KN = w.columns
    else:
        assert w.rows is not None
        w8_KN = transposed(w.rows)
    return scaled_mm(g.rows, w8_KN.t(), g, w, dtype)


def weight_gradient(g: Quantized, x: Quantized, dtype: torch.dtype) -> Tensor:
    """Compute ``[N, K]`` in ``dtype``."""
    # Without transposes the operands were kept as they are.
    if g.columns is None or x.columns is None:
        assert g.rows is not None and x.rows is not None
        return _emulate(g.rows.t(), x.rows, g, x, dtype)
    g8_NR, x8_KR = _padded(g.columns), _padded(x.columns)
    return scaled_mm(g8_NR, x8_KR.t(), g, x, dtype)


def needs_columns(device: torch.device) -> bool:
    """Return whether the products on this device read transposed copies of inputs and
    gradients."""
    return device_multiplies_fp8(device)


def scaled_mm(
    a8: Tensor,
    b8: Tensor,
    a: Quantized,
    b: Quantized,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """Compute ``a8 @ b8`` by ``torch._scaled_mm``, after a check of Hopper's rules on
    every device.

    Raises:
        ValueError: ``a8`` is not row-major, ``b8`` not column-major, both are E5M2, or
            a size is no multiple of 16.
    """
    if not a8.is_contiguous() or not b8.t().is_contiguous():
        raise ValueError(
            f"_scaled_mm wants a row-major and a column-major operand, got {a8.stride()}, {b8.stride()}"
        )
    if a8.shape[1] % _ALIGNMENT or b8.shape[0] % _ALIGNMENT or b8.shape[1] % _ALIGNMENT:
        raise ValueError(
            f"_scaled_mm wants sizes that 16 divides, got {tuple(a8.shape)} x {tuple(b8.shape)}"
        )
    if a8.dtype == b8.dtype == torch.float8_e5m2:
        raise ValueError("_scaled_mm has no product of two E5M2 operands")
    result = torch._scaled_mm(
        a8,
        b8,
        scale_a=a.inverse_scale,
        scale_b=b.inverse_scale,
        bias=bias,
        out_dtype=torch.float32 if dtype == torch.float64 else dtype,
        use_fast_accum=fast,
    )
    return result.to(dtype)


def _emulate(
    a8: Tensor, b8: Tensor, a: Quantized, b: Quantized, dtype: torch.dtype
) -> Tensor:
    """Compute ``a8 @ b8`` on dequantised operands."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # Autocast would round these to bfloat16.
    with torch.autocast(a8.device.type, enabled=False):
        product = a8.to(wide) @ b8.to(wide)
    return (product * (a.inverse_scale * b.inverse_scale).to(wide)).to(dtype)


def _padded(x8_CR: Tensor) -> Tensor:
    """Pad the summed dim with zeros to a multiple of 16."""
    missing = -x8_CR.shape[1] % _ALIGNMENT
    if missing == 0:
        return x8_CR
    return F.pad(x8_CR.view(torch.uint8), (0, missing)).view(x8_CR.dtype)

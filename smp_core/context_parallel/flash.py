"""The CUDA flash attention of torch behind the signatures of :mod:`smp_core.context_parallel.kernels`.

``_flash_attention_forward`` and ``_flash_attention_backward`` take [B, L, H, D], grouped heads, causal masks aligned at
the end and windows as they are, and several documents in one call through cumulative lengths (a row [L, H, D] at a
time). Both names are private, and used because the public ``varlen_attn`` has no grouped heads in torch 2.11 and its
backward takes no LSE from outside. FlashAttention 3 and 4 run behind the same names once
``torch.nn.attention.activate_flash_attention_impl`` has been called. A window of W tokens, the token itself included,
is (W - 1, 0) there.

Both need heads of one size for keys and values, a multiple of 8 and at most 256. Zeros behind shorter heads change no
score and no sum, and their results are cut off again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from smp_core import streams

Segments = Sequence[tuple[int, int]]
aten = torch.ops.aten


def flash_forward(
    q_BLHD: torch.Tensor,
    k_BMKD: torch.Tensor,
    v_BMKE: torch.Tensor,
    segments: Segments,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the output [B, L, H, E] and the LSE [B, H, L], float32."""
    options, e = _options(scale, window), v_BMKE.shape[-1]
    q_BLHD, k_BMKD, v_BMKD = _of_one_size(q_BLHD, k_BMKD, v_BMKE)
    if len(segments) == 1:
        (lengths,) = segments
        out, lse, *_ = aten._flash_attention_forward(
            q_BLHD, k_BMKD, v_BMKD, None, None, *lengths, 0.0, causal, False, **options
        )
        return out[..., :e], lse
    layout = _varlen(tuple(segments), q_BLHD.device)
    outs, lses = [], []
    for q, k, v in zip(q_BLHD, k_BMKD, v_BMKD, strict=True):
        out, lse, *_ = aten._flash_attention_forward(q, k, v, *layout, 0.0, causal, False, **options)
        outs.append(out[..., :e])
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def flash_backward(
    grad_BLHE: torch.Tensor,
    q_BLHD: torch.Tensor,
    k_BMKD: torch.Tensor,
    v_BMKE: torch.Tensor,
    out_BLHE: torch.Tensor,
    lse_BHL: torch.Tensor,
    segments: Segments,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of queries, keys and values. The kernels need a contiguous LSE."""
    options, d, e = _options(scale, window), q_BLHD.shape[-1], v_BMKE.shape[-1]
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_BLHD.device), torch.empty(0, device=q_BLHD.device)
    of_one_size = _of_one_size(grad_BLHE, q_BLHD, k_BMKD, v_BMKE, out_BLHE)
    if len(segments) == 1:
        (lengths,) = segments
        dq, dk, dv = aten._flash_attention_backward(
            *of_one_size, lse_BHL.contiguous(), None, None, *lengths, 0.0, causal, *no_dropout, **options
        )
        return dq[..., :d], dk[..., :d], dv[..., :e]
    layout = _varlen(tuple(segments), q_BLHD.device)
    rows = [
        aten._flash_attention_backward(*tensors, lse.contiguous(), *layout, 0.0, causal, *no_dropout, **options)
        for *tensors, lse in zip(*of_one_size, lse_BHL, strict=True)
    ]
    dq, dk, dv = (torch.stack(gradients) for gradients in zip(*rows, strict=True))
    return dq[..., :d], dk[..., :d], dv[..., :e]


def _of_one_size(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Pad every head with zeros to one size that the kernels take."""
    size = -(-max(tensor.shape[-1] for tensor in tensors) // 8) * 8
    return [F.pad(tensor, (0, size - tensor.shape[-1])) if tensor.shape[-1] < size else tensor for tensor in tensors]


def _options(scale: float, window: int | None) -> dict[str, Any]:
    if window is None:
        return {"scale": scale}
    return {"scale": scale, "window_size_left": window - 1, "window_size_right": 0}


@lru_cache(maxsize=64)
def _varlen(segments: tuple[tuple[int, int], ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Return the cumulative lengths of queries and of keys, and the longest of each: the same for all layers of a
    batch.
    """
    queries, keys = zip(*segments, strict=True)
    cumulative = [streams.on_device([0, *accumulate(each)], torch.int32, device) for each in (queries, keys)]
    return cumulative[0], cumulative[1], max(queries), max(keys)

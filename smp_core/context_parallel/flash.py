"""torch's CUDA flash attention behind the signatures of :mod:`smp_core.context_parallel.kernels`.

``_flash_attention_forward`` and ``_flash_attention_backward`` take [B, L, H, D], grouped heads, causal masks aligned at
the end and windows as they are, and several documents in one call through cumulative lengths (a row [L, H, D] at a
time). They are private, and used because the public ``varlen_attn`` has no grouped heads in torch 2.11 and its backward
takes no LSE from outside. FlashAttention 3 and 4 run behind the same names once
``torch.nn.attention.activate_flash_attention_impl`` has been called. A window of W tokens, the own one included, is
(W - 1, 0) in their terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

Segments = Sequence[tuple[int, int]]
aten = torch.ops.aten


def flash_forward(
    q_BLHD: torch.Tensor,
    k_BMKD: torch.Tensor,
    v_BMKD: torch.Tensor,
    segments: Segments,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, L, H, D] and LSE [B, H, L], float32."""
    options = _options(scale, window)
    if len(segments) == 1:
        (lengths,) = segments
        out, lse, *_ = aten._flash_attention_forward(
            q_BLHD, k_BMKD, v_BMKD, None, None, *lengths, 0.0, causal, False, **options
        )
        return out, lse
    layout = _varlen(segments, q_BLHD.device)
    outs, lses = [], []
    for q, k, v in zip(q_BLHD, k_BMKD, v_BMKD, strict=True):
        out, lse, *_ = aten._flash_attention_forward(q, k, v, *layout, 0.0, causal, False, **options)
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def flash_backward(
    grad_BLHD: torch.Tensor,
    q_BLHD: torch.Tensor,
    k_BMKD: torch.Tensor,
    v_BMKD: torch.Tensor,
    out_BLHD: torch.Tensor,
    lse_BHL: torch.Tensor,
    segments: Segments,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values. The kernels want the LSE contiguous."""
    options = _options(scale, window)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_BLHD.device), torch.empty(0, device=q_BLHD.device)
    if len(segments) == 1:
        (lengths,) = segments
        lse = lse_BHL.contiguous()
        return aten._flash_attention_backward(
            grad_BLHD, q_BLHD, k_BMKD, v_BMKD, out_BLHD, lse, None, None, *lengths, 0.0, causal, *no_dropout, **options
        )
    layout = _varlen(segments, q_BLHD.device)
    rows = [
        aten._flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), *layout, 0.0, causal, *no_dropout, **options
        )
        for grad, q, k, v, out, lse in zip(grad_BLHD, q_BLHD, k_BMKD, v_BMKD, out_BLHD, lse_BHL, strict=True)
    ]
    dq, dk, dv = (torch.stack(gradients) for gradients in zip(*rows, strict=True))
    return dq, dk, dv


def _options(scale: float, window: int | None) -> dict[str, Any]:
    if window is None:
        return {"scale": scale}
    return {"scale": scale, "window_size_left": window - 1, "window_size_right": 0}


def _varlen(segments: Segments, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Cumulative lengths of queries and keys, and the longest of each."""
    queries, keys = zip(*segments, strict=True)
    cumulative = torch.tensor([[0, *accumulate(queries)], [0, *accumulate(keys)]], dtype=torch.int32)
    on_device = cumulative.to(device, non_blocking=True)
    return on_device[0], on_device[1], max(queries), max(keys)

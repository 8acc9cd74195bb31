"""The attention of one rectangle, forward and backward, with the row-wise logarithm of the softmax's denominator (LSE).

Every function here takes the tensors of one :class:`~smp_core.context_parallel.sequence_plan.KernelCall`: queries and
keys of several documents one after another, each document's queries aligned with the end of its keys ("bottom-right").
Backward gets the output and LSE of the unsplit row, so the gradients of a piece are exact (FlashAttention-2, arXiv
2307.08691, section 3.1).

    CUDA, half precision    torch's flash attention, several documents in one call (smp_core/context_parallel/flash.py)
    CPU                     ``_scaled_dot_product_flash_attention_for_cpu`` and
                            ``_scaled_dot_product_flash_attention_for_cpu_backward``, private because no public function
                            returns the LSE. Their causal mask is aligned at the start and they die on an empty range,
                            so a causal rectangle is a full block and a square, merged by their LSE.
    anything else           plain matrix products, one document at a time (float32 and float64 on CUDA, heads of more
                            than 256 and devices older than Ampere there; on CPU value heads of another size than the
                            keys')

Shape letters: B rows, L queries, M keys, H query heads, K key and value heads (H a multiple of K), D head size, E head
size of values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from smp_core.context_parallel.flash import flash_backward, flash_forward

Segments = Sequence[tuple[int, int]]
aten = torch.ops.aten


@dataclass(eq=False)
class AttentionWork:
    """The work that the kernels were asked for.

    Attributes:
        pairs: (query, key) pairs that are not masked, times query heads, forward and backward alike.
        calls: kernel calls by name.
    """

    pairs: int = 0
    calls: dict[str, int] = field(default_factory=dict)


_counting: list[AttentionWork] = []


@contextlib.contextmanager
def count_attention_work() -> Iterator[AttentionWork]:
    """Count the work of this process's kernels inside the block."""
    work = AttentionWork()
    _counting.append(work)
    try:
        yield work
    finally:
        _counting.remove(work)


def _count(name: str, rows: int, heads: int, segments: Segments, causal: bool, window: int | None) -> None:
    for work in _counting:
        work.calls[name] = work.calls.get(name, 0) + 1
        work.pairs += rows * heads * sum(visible_pairs(q, k, causal, window) for q, k in segments)


def visible_pairs(queries: int, keys: int, causal: bool, window: int | None) -> int:
    """Count the (query, key) pairs of a rectangle, aligned at its end, that are not masked."""
    if not causal:
        return queries * keys
    last = [keys - queries + i + 1 for i in (0, queries - 1)]  # keys that the first and the last query see
    total = (last[0] + last[1]) * queries // 2
    if window is not None and last[1] > window:
        over = last[1] - window
        skipped = max(0, last[0] - window - 1)
        total -= over * (over + 1) // 2 - skipped * (skipped + 1) // 2
    return total


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the LSE: float64 for float64, float32 otherwise."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def kernel_for(q: torch.Tensor, v: torch.Tensor) -> str:
    """Return the kernel for queries [.., D] and values [.., E]: "flash", "cpu" or "math"."""
    if q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16):
        fits = max(q.shape[-1], v.shape[-1]) <= 256 and torch.cuda.get_device_capability(q.device) >= (8, 0)
        return "flash" if fits else "math"
    return "cpu" if q.device.type == "cpu" and q.shape[-1] == v.shape[-1] else "math"


def forward(
    q_BLHD: torch.Tensor,
    k_BMKD: torch.Tensor,
    v_BMKE: torch.Tensor,
    segments: Segments,
    *,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the output [B, L, H, E] and the LSE [B, H, L] (:func:`lse_dtype`)."""
    name = kernel_for(q_BLHD, v_BMKE)
    _count(name, len(q_BLHD), q_BLHD.shape[2], segments, causal, window)
    if name == "flash":
        return flash_forward(q_BLHD, k_BMKD, v_BMKE, segments, scale, causal, window)
    outs, lses = [], []
    for q, k, v in _by_segment(segments, (q_BLHD,), (k_BMKD, v_BMKE)):
        heads_first = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        out, lse = (_cpu_forward if name == "cpu" else _math_forward)(*heads_first, scale, causal, window)
        outs.append(out.transpose(1, 2))
        lses.append(lse)
    return torch.cat(outs, 1), torch.cat(lses, 2)


def backward(
    grad_BLHE: torch.Tensor,
    q_BLHD: torch.Tensor,
    k_BMKD: torch.Tensor,
    v_BMKE: torch.Tensor,
    out_BLHE: torch.Tensor,
    lse_BHL: torch.Tensor,
    segments: Segments,
    *,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of queries [B, L, H, D], keys [B, M, K, D] and values [B, M, K, E]."""
    name = kernel_for(q_BLHD, v_BMKE)
    _count(name, len(q_BLHD), q_BLHD.shape[2], segments, causal, window)
    if name == "flash":
        return flash_backward(grad_BLHE, q_BLHD, k_BMKD, v_BMKE, out_BLHE, lse_BHL, segments, scale, causal, window)
    one = _cpu_backward if name == "cpu" else _math_backward
    grads: tuple[list[torch.Tensor], ...] = ([], [], [])
    of_queries = (grad_BLHE, q_BLHD, out_BLHE, lse_BHL.transpose(1, 2))
    for grad, q, out, lse, k, v in _by_segment(segments, of_queries, (k_BMKD, v_BMKE)):
        grad, q, k, v, out, lse = (tensor.transpose(1, 2) for tensor in (grad, q, k, v, out, lse))
        for collected, gradient in zip(grads, one(grad, q, k, v, out, lse, scale, causal, window), strict=True):
            collected.append(gradient.transpose(1, 2))
    return torch.cat(grads[0], 1), torch.cat(grads[1], 1), torch.cat(grads[2], 1)


def _by_segment(
    segments: Segments, of_queries: Sequence[torch.Tensor], of_keys: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the tensors of each document in turn: those over queries [B, L, ...], then those over keys [B, M, ...]."""
    q_sizes, k_sizes = [q for q, _ in segments], [k for _, k in segments]
    yield from zip(
        *(tensor.split(q_sizes, 1) for tensor in of_queries),
        *(tensor.split(k_sizes, 1) for tensor in of_keys),
        strict=True,
    )


# Torch's flash attention for CPU; heads first: [B, H, L, D]


def _cpu_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the output [B, H, L, E] and the LSE [B, H, L]."""
    attend = aten._scaled_dot_product_flash_attention_for_cpu
    before = k.shape[2] - q.shape[2]
    if not causal:
        return attend(q, k, v, scale=scale)
    if window is not None and window < k.shape[2]:
        return attend(q, k, v, attn_mask=_additive_mask(q, k, window), scale=scale)
    square = attend(q, k[:, :, before:], v[:, :, before:], is_causal=True, scale=scale)
    if not before:
        return square
    block = attend(q, k[:, :, :before], v[:, :, :before], scale=scale)
    return _merged(block, square)


def _merged(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the softmax over two sets of keys from (output, LSE) over each."""
    lse = torch.logaddexp(one[1], other[1])
    shares = [torch.exp(part - lse).unsqueeze(-1) for part in (one[1], other[1])]
    out = one[0].to(lse.dtype) * shares[0] + other[0].to(lse.dtype) * shares[1]
    return out.to(one[0].dtype), lse


def _cpu_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def gradients(k: torch.Tensor, v: torch.Tensor, is_causal: bool, mask: torch.Tensor | None = None) -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale
        )

    before = k.shape[2] - q.shape[2]
    if not causal:
        return gradients(k, v, False)
    if window is not None and window < k.shape[2]:
        return gradients(k, v, False, _additive_mask(q, k, window))
    # The square, then the block of keys before it.
    dq, dk, dv = gradients(k[:, :, before:], v[:, :, before:], True)
    if not before:
        return dq, dk, dv
    dq_block, dk_block, dv_block = gradients(k[:, :, :before], v[:, :, :before], False)
    return dq + dq_block, torch.cat([dk_block, dk], 2), torch.cat([dv_block, dv], 2)


def _additive_mask(q: torch.Tensor, k: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return [L, M], minus infinity where a causal query does not see the key."""
    return torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(_hidden(q, k, window), float("-inf"))


def _hidden(q: torch.Tensor, k: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return [L, M], True where a causal query does not see the key."""
    queries = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)[:, None]
    keys = torch.arange(k.shape[2], device=q.device)[None]
    hidden = keys > queries
    return hidden if window is None else hidden | (keys <= queries - window)


# Plain products; heads first: [B, H, L, D]


def _math_scores(
    q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the queries as [B, K, H/K, L, D] and the scores [B, K, H/K, L, M], both in the dtype of the LSE."""
    wide = q.to(lse_dtype(q.dtype)).unflatten(1, (k.shape[1], -1))
    scores = wide @ k.to(wide.dtype).unsqueeze(2).transpose(-1, -2) * scale
    return wide, scores.masked_fill(_hidden(q, k, window), float("-inf")) if causal else scores


def _math_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the output [B, H, L, E] and the LSE [B, H, L]."""
    _, scores = _math_scores(q, k, scale, causal, window)
    lse = torch.logsumexp(scores, -1)
    out = torch.exp(scores - lse.unsqueeze(-1)) @ v.to(scores.dtype).unsqueeze(2)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def _math_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide, scores = _math_scores(q, k, scale, causal, window)
    groups = (k.shape[1], -1)
    weights = torch.exp(scores - lse.unflatten(1, groups).unsqueeze(-1))
    grad_out = grad.to(scores.dtype).unflatten(1, groups)
    delta = (grad_out * out.to(scores.dtype).unflatten(1, groups)).sum(-1, keepdim=True)
    grad_scores = weights * (grad_out @ v.to(scores.dtype).unsqueeze(2).transpose(-1, -2) - delta) * scale
    dq = (grad_scores @ k.to(scores.dtype).unsqueeze(2)).flatten(1, 2)
    dk = (grad_scores.transpose(-1, -2) @ wide).sum(2)
    dv = (weights.transpose(-1, -2) @ grad_out).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

"""Kernels that take one document at a time, and whose causal mask is aligned at the
first query and key: torch's flash attention for CPU, and cuDNN's attention.

A causal rectangle is aligned at its end (:mod:`smp_core.context_parallel.kernels`): for
these it is the block of the earlier keys, which every query sees, and a square, whose
two masks are the same. Their outputs are merged by their LSE; in backward each gets the
output and LSE of both together.

    CPU     ``_scaled_dot_product_flash_attention_for_cpu`` and
            ``_scaled_dot_product_flash_attention_for_cpu_backward``; they die on an empty range.
    cuDNN   ``_scaled_dot_product_cudnn_attention`` and ``_scaled_dot_product_cudnn_attention_backward``, which torch's
            own context parallelism calls with an LSE from outside too. No windows, and the LSE has a last dim of 1.

All four are private, and used because no public function returns the LSE.

Shape letters: B rows, L queries, M keys, H query heads, K key and value heads, D head
size, E head size of values; heads first: [B, H, L, D].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from smp_core.context_parallel.fastest import Kernel, Masks, Segments, Tensors

aten = torch.ops.aten


def forward_by_document(
    one: Callable[..., tuple[Tensor, Tensor]],
    q_BLHD: Tensor,
    k_BMKD: Tensor,
    v_BMKE: Tensor,
    masks: Masks,
) -> tuple[Tensor, Tensor]:
    """Compute the output [B, L, H, E] and the LSE [B, H, L] with a function of one
    document, heads first."""
    # Heads first, as these kernels take them; results go back to tokens first.
    outs, lses = [], []
    for q, k, v in _by_document(masks.segments, (q_BLHD,), (k_BMKD, v_BMKE)):
        out, lse = one(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), masks)
        outs.append(out.transpose(1, 2))
        lses.append(lse)
    return torch.cat(outs, 1), torch.cat(lses, 2)


def backward_by_document(
    one: Callable[..., Tensors],
    grad_BLHE: Tensor,
    q_BLHD: Tensor,
    k_BMKD: Tensor,
    v_BMKE: Tensor,
    out_BLHE: Tensor,
    lse_BHL: Tensor,
    masks: Masks,
) -> Tensors:
    """Compute the gradients of queries, keys and values with a function of one
    document, heads first."""
    grads: tuple[list[Tensor], ...] = ([], [], [])
    # LSE goes with the queries: tokens in dim 1 like the rest.
    of_queries = (grad_BLHE, q_BLHD, out_BLHE, lse_BHL.transpose(1, 2))
    for grad, q, out, lse, k, v in _by_document(
        masks.segments, of_queries, (k_BMKD, v_BMKE)
    ):
        grad, q, k, v, out, lse = (
            tensor.transpose(1, 2) for tensor in (grad, q, k, v, out, lse)
        )
        for collected, gradient in zip(
            grads, one(grad, q, k, v, out, lse, masks), strict=True
        ):
            collected.append(gradient.transpose(1, 2))
    return torch.cat(grads[0], 1), torch.cat(grads[1], 1), torch.cat(grads[2], 1)


def _by_document(
    segments: Segments, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors of each document in turn: those over queries [B, L, ...], then
    those over keys [B, M, ...]."""
    # Documents fill both ranges, one after another.
    q_sizes = [q for q, _ in segments]
    k_sizes = [k for _, k in segments]
    queries = [tensor.split(q_sizes, 1) for tensor in of_queries]
    keys = [tensor.split(k_sizes, 1) for tensor in of_keys]
    yield from zip(*queries, *keys, strict=True)


def hidden(q: Tensor, k: Tensor, window: int | None) -> Tensor:
    """Return [L, M], True where a causal query does not see the key."""
    # Queries stand at the end of the keys.
    queries = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)[
        :, None
    ]
    keys = torch.arange(k.shape[2], device=q.device)[None]
    late = keys > queries
    return late if window is None else late | (keys <= queries - window)


# A rectangle as a block and a square


def _forward(
    attend: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the output [B, H, L, E] and the LSE [B, H, L] with ``attend(k, v,
    causal)``."""
    # Keys before the square, which every query sees. Without causality there is one
    # rectangle.
    before = k.shape[2] - q.shape[2] if causal else 0
    if not before:
        return attend(k, v, causal)
    square = attend(k[:, :, before:], v[:, :, before:], True)
    block = attend(k[:, :, :before], v[:, :, :before], False)
    return _merged(block, square)


def _merged(
    one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Merge the softmax over two sets of keys from (output, LSE) over each."""
    # Each part's share of the softmax is exp(its LSE - LSE of both).
    lse = torch.logaddexp(one[1], other[1])
    shares = [torch.exp(part - lse).unsqueeze(-1) for part in (one[1], other[1])]
    out = one[0].to(lse.dtype) * shares[0] + other[0].to(lse.dtype) * shares[1]
    return out.to(one[0].dtype), lse


def _backward(
    gradients: Callable[..., Tensors], q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> Tensors:
    """Compute the gradients of queries, keys and values with ``gradients(k, v,
    causal)``."""
    # With output and LSE of both parts, the gradients of each are those in the whole
    # row.
    before = k.shape[2] - q.shape[2] if causal else 0
    if not before:
        return gradients(k, v, causal)
    dq, dk, dv = gradients(k[:, :, before:], v[:, :, before:], True)
    dq_block, dk_block, dv_block = gradients(k[:, :, :before], v[:, :, :before], False)
    return dq + dq_block, torch.cat([dk_block, dk], 2), torch.cat([dv_block, dv], 2)


# Torch's flash attention for CPU


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, masks: Masks
) -> tuple[Tensor, Tensor]:
    """Compute the output [B, H, L, D] and the LSE [B, H, L]."""

    def attend(k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None) -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=causal, attn_mask=mask, scale=masks.scale
        )

    # A window hides early keys too, which the causal flag cannot say; it needs a mask.
    if _has_window(k, masks):
        return attend(k, v, False, _additive_mask(q, k, masks.window))
    return _forward(attend, q, k, v, masks.causal)


def _cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    masks: Masks,
) -> Tensors:
    def gradients(
        k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None
    ) -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=masks.scale
        )

    if _has_window(k, masks):
        return gradients(k, v, False, _additive_mask(q, k, masks.window))
    return _backward(gradients, q, k, v, masks.causal)


def _has_window(k: Tensor, masks: Masks) -> bool:
    return masks.causal and masks.window is not None and masks.window < k.shape[2]


def _additive_mask(q: Tensor, k: Tensor, window: int | None) -> Tensor:
    """Return [L, M], minus infinity where a causal query does not see the key."""
    return torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(
        hidden(q, k, window), float("-inf")
    )


CPU = Kernel(
    "cpu",
    partial(forward_by_document, _cpu_forward),
    partial(backward_by_document, _cpu_backward),
    one_size=True,
)


# cuDNN


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, masks: Masks
) -> tuple[Tensor, Tensor]:
    """Compute the output [B, H, L, E] and the LSE [B, H, L], float32."""

    def attend(k: Tensor, v: Tensor, causal: bool) -> Any:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=masks.scale
        )
        return out, lse.view(q.shape[:3])

    return _forward(attend, q, k, v, masks.causal)


def _cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    masks: Masks,
) -> Tensors:
    # The operator wants the state of a generator, dropout or not.
    no_dropout = [torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2)]
    lse = lse.contiguous().unsqueeze(-1)

    def gradients(k: Tensor, v: Tensor, causal: bool) -> Any:
        layout = (None, None, q.shape[2], k.shape[2])  # no lengths of documents
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse,
            *no_dropout,
            None,
            *layout,
            0.0,
            causal,
            scale=masks.scale,
        )

    return _backward(gradients, q, k, v, masks.causal)


def _cudnn_takes(q_BLHD: Tensor, k_BMKD: Tensor, v_BMKE: Tensor, masks: Masks) -> bool:
    """Return whether a call is of one document without a window, and torch would take
    cuDNN for its heads."""
    # One document at a time would be possible, but others are faster at packed ones.
    if len(masks.segments) > 1 or (
        masks.window is not None and masks.window < k_BMKD.shape[1]
    ):
        return False
    q, k, v = (
        tensor.transpose(1, 2) for tensor in CUDNN.padded(q_BLHD, k_BMKD, v_BMKE)
    )
    # Torch is asked for the piece that it would run.
    grouped = q_BLHD.shape[2] != k_BMKD.shape[2]
    square = masks.causal and q_BLHD.shape[1] == k_BMKD.shape[1]
    return can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, square, grouped))


CUDNN = Kernel(
    "cuDNN",
    partial(forward_by_document, _cudnn_forward),
    partial(backward_by_document, _cudnn_backward),
    _cudnn_takes,
    multiple=8,
)

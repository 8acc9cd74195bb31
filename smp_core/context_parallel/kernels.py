"""The attention of one rectangle, forward and backward, with the row-wise logarithm of
the softmax's denominator (LSE).

Every function here takes the tensors of one
:class:`~smp_core.context_parallel.sequence_plan.KernelCall`: queries and keys of
several documents one after another, each document's queries aligned with the end of its
keys ("bottom-right"). Backward gets the output and LSE of the unsplit row, so the
gradients of a piece are exact (FlashAttention-2, arXiv 2307.08691, section 3.1).

    CUDA, half precision    the fastest of torch's flash attention and FlashAttention 3 (flash.py) and of cuDNN's
                            attention (start_aligned.py), measured once for each kind of call (fastest.py)
    CPU                     torch's flash attention for CPU (start_aligned.py)
    anything else           plain matrix products, one document at a time (float32 and float64 on CUDA, heads of more
                            than 256 and devices older than Ampere there)

Heads of sizes that a kernel does not take are padded with zeros. On CUDA nothing is
measured, and torch's flash attention taken, where algorithms have to be deterministic,
where ``activate_flash_attention_impl`` has settled what runs behind it, and while a
CUDA graph records. ``torch.backends.cuda.enable_cudnn_sdp``, ``enable_flash_sdp`` and
``torch.nn.attention.sdpa_kernel`` say between which kernels the choice is.

Shape letters: B rows, L queries, M keys, H query heads, K key and value heads (H a
multiple of K), D head size, E head size of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from smp_core.context_parallel.fastest import (
    FastestKernel,
    Kernel,
    Masks,
    Tensors,
    kind_of,
)
from smp_core.context_parallel.flash import FLASH, FLASH_3
from smp_core.context_parallel.start_aligned import (
    CPU,
    CUDNN,
    backward_by_document,
    forward_by_document,
    hidden,
)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the LSE: float64 for float64, float32 otherwise."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def kernels_for(
    q_BLHD: Tensor, k_BMKD: Tensor, v_BMKE: Tensor, masks: Masks
) -> Sequence[Kernel]:
    """Return the kernels that take a call, of which the fastest is to be found where
    there are several; the first is the one that the others are compared with."""
    # Where one kernel alone can do it, nothing is measured.
    if q_BLHD.device.type == "cpu":
        return (CPU,)
    if not _flash_takes(q_BLHD, v_BMKE):
        return (PRODUCTS,)
    # Measuring would choose by time, which may differ from run to run.
    settled = (
        current_flash_attention_impl() is not None
        or torch.are_deterministic_algorithms_enabled()
    )
    if settled or torch.cuda.is_current_stream_capturing():
        return (FLASH,)
    # The switches of torch.nn.attention say which kernels may be tried.
    flash = (FLASH, FLASH_3) if torch.backends.cuda.flash_sdp_enabled() else ()
    return tuple(
        k for k in (*flash, CUDNN) if k.takes(q_BLHD, k_BMKD, v_BMKE, masks)
    ) or (FLASH,)


def _flash_takes(q: Tensor, v: Tensor) -> bool:
    """Return whether flash attention takes queries [.., D] and values [.., E] on their
    device."""
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    return max(q.shape[-1], v.shape[-1]) <= 256 and torch.cuda.get_device_capability(
        q.device
    ) >= (8, 0)


FASTEST = FastestKernel()
"""The choices of this process."""


def forward(
    q_BLHD: Tensor, k_BMKD: Tensor, v_BMKE: Tensor, masks: Masks
) -> tuple[Tensor, Tensor]:
    """Compute the output [B, L, H, E] and the LSE [B, H, L] (:func:`lse_dtype`)."""
    tensors = (q_BLHD, k_BMKD, v_BMKE)
    return _with_a_kernel(tensors, masks, lambda k: _forward(k, tensors, masks))


def backward(
    grad_BLHE: Tensor,
    q_BLHD: Tensor,
    k_BMKD: Tensor,
    v_BMKE: Tensor,
    out_BLHE: Tensor,
    lse_BHL: Tensor,
    masks: Masks,
) -> Tensors:
    """Compute the gradients of queries [B, L, H, D], keys [B, M, K, D] and values [B,
    M, K, E]."""
    tensors, results = (q_BLHD, k_BMKD, v_BMKE), (grad_BLHE, out_BLHE, lse_BHL)
    return _with_a_kernel(
        tensors, masks, lambda kernel: _backward(kernel, tensors, masks, *results)
    )


def _with_a_kernel(
    tensors: Tensors, masks: Masks, work: Callable[[Kernel], Any]
) -> Any:
    """Return ``work(kernel)`` with the fastest of the kernels that take the call."""
    kernels = kernels_for(*tensors, masks)
    if len(kernels) == 1:
        return work(kernels[0])

    def both_ways(kernel: Kernel) -> tuple[Tensor, ...]:
        out, lse = _forward(kernel, tensors, masks)
        # Any gradient will do.
        return out, lse, *_backward(kernel, tensors, masks, out, out, lse)

    return FASTEST.run(kind_of(tensors, masks, kernels), kernels, both_ways, work)


def _forward(kernel: Kernel, tensors: Tensors, masks: Masks) -> tuple[Tensor, Tensor]:
    # Padding of heads is cut off again.
    out, lse = kernel.forward(*kernel.padded(*tensors), masks)
    return out[..., : tensors[2].shape[-1]], lse


def _backward(
    kernel: Kernel,
    tensors: Tensors,
    masks: Masks,
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
) -> Tensors:
    gradients = kernel.backward(*kernel.padded(grad, *tensors, out), lse, masks)
    dq, dk, dv = (
        gradient[..., : tensor.shape[-1]]
        for gradient, tensor in zip(gradients, tensors, strict=True)
    )
    return dq, dk, dv


# Plain products; heads first: [B, H, L, D]


def _math_scores(q: Tensor, k: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
    """Return the queries as [B, K, H/K, L, D] and the scores [B, K, H/K, L, M], both in
    the dtype of the LSE."""
    # Query heads in groups, one for each key head.
    wide = q.to(lse_dtype(q.dtype)).unflatten(1, (k.shape[1], -1))
    scores = wide @ k.to(wide.dtype).unsqueeze(2).transpose(-1, -2) * masks.scale
    return wide, scores.masked_fill(
        hidden(q, k, masks.window), float("-inf")
    ) if masks.causal else scores


def _math_forward(
    q: Tensor, k: Tensor, v: Tensor, masks: Masks
) -> tuple[Tensor, Tensor]:
    """Compute the output [B, H, L, E] and the LSE [B, H, L]."""
    # The output is made from LSE, so that backward can make the weights again.
    _, scores = _math_scores(q, k, masks)
    lse = torch.logsumexp(scores, -1)
    out = torch.exp(scores - lse.unsqueeze(-1)) @ v.to(scores.dtype).unsqueeze(2)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def _math_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    masks: Masks,
) -> Tensors:
    # Weights of the unsplit row: scores of this piece, LSE of all keys.
    wide, scores = _math_scores(q, k, masks)
    groups = (k.shape[1], -1)
    weights = torch.exp(scores - lse.unflatten(1, groups).unsqueeze(-1))
    grad_out = grad.to(scores.dtype).unflatten(1, groups)
    # The part of a weight's gradient that all keys of a row have in common.
    delta = (grad_out * out.to(scores.dtype).unflatten(1, groups)).sum(-1, keepdim=True)
    grad_scores = (
        weights
        * (grad_out @ v.to(scores.dtype).unsqueeze(2).transpose(-1, -2) - delta)
        * masks.scale
    )
    # Key heads collect the gradients of all query heads that use them.
    dq = (grad_scores @ k.to(scores.dtype).unsqueeze(2)).flatten(1, 2)
    dk = (grad_scores.transpose(-1, -2) @ wide).sum(2)
    dv = (weights.transpose(-1, -2) @ grad_out).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


PRODUCTS = Kernel(
    "math",
    partial(forward_by_document, _math_forward),
    partial(backward_by_document, _math_backward),
)

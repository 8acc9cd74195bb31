"""The CUDA flash attention of torch, and FlashAttention 3, as
:class:`~smp_core.context_parallel.fastest.Kernel`.

``_flash_attention_forward`` and ``_flash_attention_backward`` take [B, L, H, D],
grouped heads, causal masks aligned at the end and windows as they are, and several
documents in one call through cumulative lengths (a row [L, H, D] at a time). Both names
are private, and used because the public ``varlen_attn`` has no grouped heads in torch
2.11 and its backward takes no LSE from outside. A window of W tokens, the token itself
included, is (W - 1, 0) there. Heads have one size for keys and values, a multiple of 8
and at most 256.

FlashAttention 3 has the same signatures in torch's module ``_fa3``:
``_fa3_import_module``, ``_fa3_flash_attention_forward_impl_default`` and
``_fa3_flash_attention_backward_impl`` are private too. The public
``torch.nn.attention.activate_flash_attention_impl`` puts them behind torch's own names
for the whole process, which would leave nothing to compare with.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from functools import cache, lru_cache, partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from smp_core.context_parallel.fastest import Kernel, Masks, Tensors
from smp_core.torch_facts import streams

logger = logging.getLogger("smp")
aten = torch.ops.aten


def flash_forward(
    q_BLHD: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, masks: Masks, operators: Any = None
) -> tuple[Tensor, Tensor]:
    """Compute the output [B, L, H, D] and the LSE [B, H, L], float32.

    Args:
        operators: what has both names; torch's if None.
    """
    segments, causal = masks.segments, masks.causal
    options = _options(masks)
    attend = (operators or aten)._flash_attention_forward
    if len(segments) == 1:
        (lengths,) = segments
        out, lse, *_ = attend(
            q_BLHD, k_BMKD, v_BMKD, None, None, *lengths, 0.0, causal, False, **options
        )
        return out, lse
    layout = _varlen(tuple(segments), q_BLHD.device)
    outs, lses = [], []
    for q, k, v in zip(q_BLHD, k_BMKD, v_BMKD, strict=True):
        out, lse, *_ = attend(q, k, v, *layout, 0.0, causal, False, **options)
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def flash_backward(
    grad_BLHD: Tensor,
    q_BLHD: Tensor,
    k_BMKD: Tensor,
    v_BMKD: Tensor,
    out_BLHD: Tensor,
    lse_BHL: Tensor,
    masks: Masks,
    operators: Any = None,
) -> Tensors:
    """Compute the gradients of queries, keys and values. The kernels need a contiguous
    LSE."""
    segments, causal = masks.segments, masks.causal
    options = _options(masks)
    differentiate = (operators or aten)._flash_attention_backward
    no_dropout = (
        torch.zeros(2, dtype=torch.uint64, device=q_BLHD.device),
        torch.empty(0, device=q_BLHD.device),
    )
    tensors = (grad_BLHD, q_BLHD, k_BMKD, v_BMKD, out_BLHD)
    if len(segments) == 1:
        (lengths,) = segments
        dq, dk, dv = differentiate(
            *tensors,
            lse_BHL.contiguous(),
            None,
            None,
            *lengths,
            0.0,
            causal,
            *no_dropout,
            **options,
        )
        return dq, dk, dv
    layout = _varlen(tuple(segments), q_BLHD.device)
    rows = [
        differentiate(
            *row, lse.contiguous(), *layout, 0.0, causal, *no_dropout, **options
        )
        for *row, lse in zip(*tensors, lse_BHL, strict=True)
    ]
    dq, dk, dv = (torch.stack(gradients) for gradients in zip(*rows, strict=True))
    return dq, dk, dv


def _options(masks: Masks) -> dict[str, Any]:
    if masks.window is None:
        return {"scale": masks.scale}
    return {
        "scale": masks.scale,
        "window_size_left": masks.window - 1,
        "window_size_right": 0,
    }


@lru_cache(maxsize=64)
def _varlen(
    segments: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[Tensor, Tensor, int, int]:
    """Return the cumulative lengths of queries and of keys, and the longest of each:
    the same for all layers of a batch.
    """
    queries, keys = zip(*segments, strict=True)
    cumulative = [
        streams.on_device([0, *accumulate(each)], torch.int32, device)
        for each in (queries, keys)
    ]
    return cumulative[0], cumulative[1], max(queries), max(keys)


@cache
def flash_3() -> Any:
    """Return FlashAttention 3's operators under the names of torch's; None where it is
    not installed."""
    if importlib.util.find_spec("flash_attn_interface") is None:
        return None
    try:
        ways = importlib.import_module("torch.nn.attention._fa3")
        ways._fa3_import_module("flash_attn_interface")
        return SimpleNamespace(
            _flash_attention_forward=ways._fa3_flash_attention_forward_impl_default,
            _flash_attention_backward=ways._fa3_flash_attention_backward_impl,
        )
    except (ImportError, AttributeError, RuntimeError) as error:
        logger.warning("FlashAttention 3 is installed, but cannot be used: %s", error)
        return None


def _with_flash_3(run: Any, *args: Any) -> Any:
    return run(*args, operators=flash_3())


def _flash_3_takes(q: Tensor, *_: Any) -> bool:
    return torch.cuda.get_device_capability(q.device)[0] == 9 and flash_3() is not None


FLASH = Kernel("flash", flash_forward, flash_backward, multiple=8, one_size=True)
FLASH_3 = Kernel(
    "FA3",
    partial(_with_flash_3, flash_forward),
    partial(_with_flash_3, flash_backward),
    _flash_3_takes,
    multiple=8,
    one_size=True,
)

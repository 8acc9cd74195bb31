"""The three kinds of kernels agree; CUDA's are stood in for by what torch documents of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smp_core.context_parallel import flash, kernels

SEGMENTS = [((6, 6),), ((6, 14),), ((1, 1), (2, 5), (3, 3)), ((4, 40),)]


def tensors(segments: Any, rows: int = 2, heads: int = 4, kv_heads: int = 2, size: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    queries, keys = (sum(lengths) for lengths in zip(*segments, strict=True))
    shapes = [(queries, heads), (queries, heads), (keys, kv_heads), (keys, kv_heads)]
    return [torch.randn(rows, *shape, size, generator=generator, dtype=torch.float64) for shape in shapes]


def run_with(
    name: str, segments: Any, causal: bool, window: int | None, patch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    patch.setattr(kernels, "kernel_for", lambda q, v: name)
    grad, q, k, v = tensors(segments)
    options = {"scale": 0.3, "causal": causal, "window": window}
    out, lse = kernels.forward(q, k, v, segments, **options)
    return [out, lse, *kernels.backward(grad, q, k, v, out, lse, segments, **options)]


MASKS = [(True, None), (True, 3), (True, 50), (False, None)]


@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
def test_cpu_flash_equals_plain_products(
    segments: Any, causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1e-13: float64 rounding of sums over at most 40 keys."""
    ours = run_with("cpu", segments, causal, window, monkeypatch)
    for one, other in zip(ours, run_with("math", segments, causal, window, monkeypatch), strict=True):
        assert (one - other).abs().max() <= 1e-13


class DocumentedFlash:
    """``aten._flash_attention_forward/backward`` as torch documents them, by autograd over a mask: [B, L, H, D] or,
    with cumulative lengths, [L, H, D] and an LSE [H, L]; masks aligned at the end; windows of (left + 1) keys."""

    def _mask(self, q: int, k: int, causal: bool, left: int, right: int) -> torch.Tensor:
        at = torch.arange(q)[:, None] + k - q
        key = torch.arange(k)[None]
        hidden = torch.zeros(q, k, dtype=torch.bool)
        if causal or right >= 0:
            hidden |= key > at + max(right, 0)
        if left >= 0:
            hidden |= key < at - left
        return hidden

    def _dense(self, q: Any, k: Any, v: Any, causal: bool, scale: float, left: int = -1, right: int = -1) -> Any:
        share = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)
        scores = torch.einsum("blhd,bmhd->bhlm", q, k) * scale
        scores = scores.masked_fill(self._mask(q.shape[1], k.shape[1], causal, left, right), float("-inf"))
        return torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), v), scores.logsumexp(-1)

    def _any(self, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, causal: bool, **o: Any) -> Any:
        options = {
            "scale": o["scale"],
            "left": o.get("window_size_left", -1),
            "right": o.get("window_size_right", -1),
        }
        if cu_q is None:
            assert (max_q, max_k) == (q.shape[1], k.shape[1])
            return self._dense(q, k, v, causal, **options)
        sizes_q, sizes_k = cu_q.diff().tolist(), cu_k.diff().tolist()
        assert (max_q, max_k) == (max(sizes_q), max(sizes_k)) and cu_q.dtype == cu_k.dtype == torch.int32
        pieces = [
            self._dense(a[None], b[None], c[None], causal, **options)
            for a, b, c in zip(q.split(sizes_q), k.split(sizes_k), v.split(sizes_k), strict=True)
        ]
        return torch.cat([out[0] for out, _ in pieces]), torch.cat([lse[0] for _, lse in pieces], 1)

    def _flash_attention_forward(self, q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, **options):  # type: ignore[no-untyped-def]
        assert dropout == 0.0 and debug is False
        return (*self._any(q, k, v, cu_q, cu_k, max_q, max_k, causal, **options), None, None, None)

    def _flash_attention_backward(  # type: ignore[no-untyped-def]
        self, grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng_state, unused, **options
    ):
        assert lse.is_contiguous() and dropout == 0.0 and rng_state.dtype == torch.uint64
        with torch.enable_grad():
            q, k, v = (tensor.detach().requires_grad_(True) for tensor in (q, k, v))
            again, again_lse = self._any(q, k, v, cu_q, cu_k, max_q, max_k, causal, **options)
        torch.testing.assert_close(again, out)
        torch.testing.assert_close(again_lse, lse)
        return torch.autograd.grad(again, (q, k, v), grad)


@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
def test_cuda_flash_is_called_as_torch_documents_it(
    segments: Any, causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "aten", DocumentedFlash())
    ours = run_with("flash", segments, causal, window, monkeypatch)
    for one, other in zip(ours, run_with("math", segments, causal, window, monkeypatch), strict=True):
        assert (one - other).abs().max() <= 1e-13


def test_each_device_and_shape_gets_its_kernel() -> None:
    def on(device: str, dtype: torch.dtype, size: int = 64, value_size: int = 64) -> str:
        class Like:
            def __init__(self, size: int) -> None:
                self.device, self.dtype, self.shape = torch.device(device), dtype, (1, 1, 1, size)

        return kernels.kernel_for(Like(size), Like(value_size))  # type: ignore[arg-type]

    assert on("cuda", torch.bfloat16) == on("cuda", torch.float16) == "flash"
    assert (
        on("cuda", torch.float32) == on("cuda", torch.bfloat16, 64, 32) == on("cuda", torch.bfloat16, 60, 60) == "math"
    )
    assert on("cuda", torch.bfloat16, 512, 512) == "math"
    assert on("cpu", torch.bfloat16) == on("cpu", torch.float64) == "cpu"
    assert on("cpu", torch.float32, 64, 32) == on("mps", torch.float16) == "math"

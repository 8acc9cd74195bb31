"""The three kinds of kernels agree; CUDA's are stood in for by what torch documents of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smp_core.context_parallel import flash, kernels

SEGMENTS = [((6, 6),), ((6, 14),), ((1, 1), (2, 5), (3, 3)), ((4, 40),)]


def tensors(segments: Any, size: int = 16, value_size: int = 16) -> list[torch.Tensor]:
    rows, heads, kv_heads = 2, 4, 2
    generator = torch.Generator().manual_seed(2)
    queries, keys = (sum(lengths) for lengths in zip(*segments, strict=True))
    of_queries, of_keys = (rows, queries, heads), (rows, keys, kv_heads)
    shapes = [(*of_queries, value_size), (*of_queries, size), (*of_keys, size), (*of_keys, value_size)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def run_with(
    name: str,
    segments: Any,
    causal: bool,
    window: int | None,
    patch: pytest.MonkeyPatch,
    sizes: tuple[int, int] = (16, 16),
) -> list[torch.Tensor]:
    patch.setattr(kernels, "kernel_for", lambda q, v: name)
    grad, q, k, v = tensors(segments, *sizes)
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
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0
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


@pytest.mark.parametrize("sizes", [(24, 16), (16, 20), (6, 6)])
@pytest.mark.parametrize("segments", SEGMENTS[1:3], ids=str)
def test_heads_of_sizes_that_cuda_flash_does_not_take_are_filled_up(
    segments: Any, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "aten", DocumentedFlash())
    ours = run_with("flash", segments, True, None, monkeypatch, sizes)
    for one, other in zip(ours, run_with("math", segments, True, None, monkeypatch, sizes), strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= 1e-13


def test_cumulative_lengths_are_copied_to_the_device_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[object] = []
    monkeypatch.setattr(flash.streams, "on_device", lambda values, *_: copies.append(values) or torch.tensor(values))
    for _ in range(3):
        flash._varlen(((2, 5), (3, 4)), torch.device("cpu"))
    assert copies == [[0, 2, 5], [0, 5, 9]]


def test_each_device_and_shape_gets_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(device: str, dtype: torch.dtype, size: int = 64, value_size: int = 64) -> str:
        class Like:
            def __init__(self, size: int) -> None:
                self.device, self.dtype, self.shape = torch.device(device), dtype, (1, 1, 1, size)

        return kernels.kernel_for(Like(size), Like(value_size))  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert on("cuda", torch.bfloat16) == on("cuda", torch.float16) == "flash"
    assert on("cuda", torch.bfloat16, 192, 128) == on("cuda", torch.bfloat16, 60, 60) == "flash"
    assert on("cuda", torch.float32) == on("cuda", torch.bfloat16, 512, 512) == "math"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert on("cuda", torch.float16) == "math"
    assert on("cpu", torch.bfloat16) == on("cpu", torch.float64) == "cpu"
    assert on("cpu", torch.float32, 64, 32) == on("mps", torch.float16) == "math"

"""All kernels agree, and the fastest of those that take a call is chosen; CUDA's are
stood in for by what torch documents of them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.attention_work import count_attention_work
from smp_core.context_parallel import flash, kernels, start_aligned
from smp_core.context_parallel.fastest import FastestKernel, Kernel, Masks

ALL = (kernels.CPU, kernels.PRODUCTS, kernels.FLASH, kernels.FLASH_3, kernels.CUDNN)
SEGMENTS = [((6, 6),), ((6, 14),), ((1, 1), (2, 5), (3, 3)), ((4, 40),)]


def tensors(segments: Any, size: int = 16, value_size: int = 16) -> list[torch.Tensor]:
    rows, heads, kv_heads = 2, 4, 2
    generator = torch.Generator().manual_seed(2)
    queries, keys = (sum(lengths) for lengths in zip(*segments, strict=True))
    of_queries, of_keys = (rows, queries, heads), (rows, keys, kv_heads)
    shapes = [
        (*of_queries, value_size),
        (*of_queries, size),
        (*of_keys, size),
        (*of_keys, value_size),
    ]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    ]


def run_with(
    name: str,
    segments: Any,
    causal: bool,
    window: int | None,
    patch: pytest.MonkeyPatch,
    sizes: tuple[int, int] = (16, 16),
) -> list[torch.Tensor]:
    kernel = {each.name: each for each in ALL}[name]
    patch.setattr(kernels, "kernels_for", lambda *_: (kernel,))
    grad, q, k, v = tensors(segments, *sizes)
    masks = Masks(segments, 0.3, causal, window)
    out, lse = kernels.forward(q, k, v, masks)
    return [out, lse, *kernels.backward(grad, q, k, v, out, lse, masks)]


MASKS = [(True, None), (True, 3), (True, 50), (False, None)]


@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
def test_cpu_flash_equals_plain_products(
    segments: Any, causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1e-13: float64 rounding of sums over at most 40 keys."""
    ours = run_with("cpu", segments, causal, window, monkeypatch)
    for one, other in zip(
        ours, run_with("math", segments, causal, window, monkeypatch), strict=True
    ):
        assert (one - other).abs().max() <= 1e-13


class DocumentedFlash:
    """``aten._flash_attention_forward/backward`` as torch documents them, by autograd
    over a mask: [B, L, H, D] or, with cumulative lengths, [L, H, D] and an LSE [H, L];
    masks aligned at the end; windows of (left + 1) keys."""

    def _mask(
        self, q: int, k: int, causal: bool, left: int, right: int
    ) -> torch.Tensor:
        at = torch.arange(q)[:, None] + k - q
        key = torch.arange(k)[None]
        hidden = torch.zeros(q, k, dtype=torch.bool)
        if causal or right >= 0:
            hidden |= key > at + max(right, 0)
        if left >= 0:
            hidden |= key < at - left
        return hidden

    def _dense(
        self,
        q: Any,
        k: Any,
        v: Any,
        causal: bool,
        scale: float,
        left: int = -1,
        right: int = -1,
    ) -> Any:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0
        share = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)
        scores = torch.einsum("blhd,bmhd->bhlm", q, k) * scale
        scores = scores.masked_fill(
            self._mask(q.shape[1], k.shape[1], causal, left, right), float("-inf")
        )
        return torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), v), scores.logsumexp(
            -1
        )

    def _any(
        self,
        q: Any,
        k: Any,
        v: Any,
        cu_q: Any,
        cu_k: Any,
        max_q: int,
        max_k: int,
        causal: bool,
        **o: Any,
    ) -> Any:
        options = {
            "scale": o["scale"],
            "left": o.get("window_size_left", -1),
            "right": o.get("window_size_right", -1),
        }
        if cu_q is None:
            assert (max_q, max_k) == (q.shape[1], k.shape[1])
            return self._dense(q, k, v, causal, **options)
        sizes_q, sizes_k = cu_q.diff().tolist(), cu_k.diff().tolist()
        assert (max_q, max_k) == (
            max(sizes_q),
            max(sizes_k),
        ) and cu_q.dtype == cu_k.dtype == torch.int32
        pieces = [
            self._dense(a[None], b[None], c[None], causal, **options)
            for a, b, c in zip(
                q.split(sizes_q), k.split(sizes_k), v.split(sizes_k), strict=True
            )
        ]
        return torch.cat([out[0] for out, _ in pieces]), torch.cat(
            [lse[0] for _, lse in pieces], 1
        )

    def _flash_attention_forward(
        self, q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, **options
    ):  # type: ignore[no-untyped-def]
        assert dropout == 0.0 and debug is False
        return (
            *self._any(q, k, v, cu_q, cu_k, max_q, max_k, causal, **options),
            None,
            None,
            None,
        )

    def _flash_attention_backward(  # type: ignore[no-untyped-def]
        self,
        grad,
        q,
        k,
        v,
        out,
        lse,
        cu_q,
        cu_k,
        max_q,
        max_k,
        dropout,
        causal,
        rng_state,
        unused,
        **options,
    ):
        assert (
            lse.is_contiguous() and dropout == 0.0 and rng_state.dtype == torch.uint64
        )
        with torch.enable_grad():
            q, k, v = (tensor.detach().requires_grad_(True) for tensor in (q, k, v))
            again, again_lse = self._any(
                q, k, v, cu_q, cu_k, max_q, max_k, causal, **options
            )
        torch.testing.assert_close(again, out)
        torch.testing.assert_close(again_lse, lse)
        return torch.autograd.grad(again, (q, k, v), grad)


@pytest.mark.parametrize("name", ["flash", "FA3"])
@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
def test_cuda_flash_is_called_as_torch_documents_it(
    segments: Any,
    causal: bool,
    window: int | None,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name == "flash":
        monkeypatch.setattr(flash, "aten", DocumentedFlash())
    else:
        monkeypatch.setattr(flash, "flash_3", DocumentedFlash)
    ours = run_with(name, segments, causal, window, monkeypatch)
    for one, other in zip(
        ours, run_with("math", segments, causal, window, monkeypatch), strict=True
    ):
        assert (one - other).abs().max() <= 1e-13


class DocumentedCudnn:
    """``aten._scaled_dot_product_cudnn_attention`` and its backward as torch's context
    parallelism calls them: heads first, masks aligned at the start, an LSE [B, H, L,
    1]."""

    def _both(
        self, q: Any, k: Any, v: Any, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert (
            all(tensor.shape[-1] % 8 == 0 for tensor in (q, k, v))
            and q.shape[-1] == k.shape[-1]
        )
        share = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(share, 1).transpose(2, 3) * scale
        if causal:
            late = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(late, float("-inf"))
        return scores.softmax(-1) @ v.repeat_interleave(share, 1), scores.logsumexp(
            -1, keepdim=True
        )

    def _scaled_dot_product_cudnn_attention(
        self, q, k, v, bias, with_lse, dropout, causal, debug, *, scale
    ):  # type: ignore[no-untyped-def]
        assert bias is None and with_lse is True and dropout == 0.0 and debug is False
        return (
            *self._both(q, k, v, causal, scale),
            None,
            None,
            q.shape[2],
            k.shape[2],
            None,
            None,
            None,
        )

    def _scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-untyped-def]
        self,
        grad,
        q,
        k,
        v,
        out,
        lse,
        seed,
        offset,
        bias,
        cu_q,
        cu_k,
        max_q,
        max_k,
        dropout,
        causal,
        *,
        scale,
    ):
        assert bias is None and cu_q is None and cu_k is None and dropout == 0.0
        assert (max_q, max_k) == (q.shape[2], k.shape[2]) and lse.is_contiguous()
        assert seed.dtype == offset.dtype == torch.int64
        share = q.shape[1] // k.shape[1]
        wide_k, wide_v = (tensor.repeat_interleave(share, 1) for tensor in (k, v))
        scores = q @ wide_k.transpose(2, 3) * scale
        if causal:
            scores = scores.masked_fill(
                torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf")
            )
        # Of the whole row, which may have more keys than these.
        weights = (scores - lse).exp()
        grad_scores = (
            weights
            * (grad @ wide_v.transpose(2, 3) - (grad * out).sum(-1, keepdim=True))
            * scale
        )
        dk, dv = grad_scores.transpose(2, 3) @ q, weights.transpose(2, 3) @ grad
        return grad_scores @ wide_k, *(
            each.unflatten(1, (-1, share)).sum(2) for each in (dk, dv)
        )


@pytest.mark.parametrize("sizes", [(16, 16), (24, 16), (12, 20)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("segments", [((6, 6),), ((6, 14),)], ids=str)
def test_cudnn_is_called_as_torch_does(
    segments: Any, causal: bool, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_aligned, "aten", DocumentedCudnn())
    ours = run_with("cuDNN", segments, causal, None, monkeypatch, sizes)
    for one, other in zip(
        ours, run_with("math", segments, causal, None, monkeypatch, sizes), strict=True
    ):
        assert one.shape == other.shape and (one - other).abs().max() <= 1e-13


@pytest.mark.parametrize("name", ["flash", "cpu"])
@pytest.mark.parametrize("sizes", [(24, 16), (16, 20), (6, 6), (192, 128)], ids=str)
@pytest.mark.parametrize("segments", SEGMENTS[1:3], ids=str)
def test_heads_of_sizes_that_a_kernel_does_not_take_are_padded(
    segments: Any, sizes: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "aten", DocumentedFlash())
    ours = run_with(name, segments, True, None, monkeypatch, sizes)
    for one, other in zip(
        ours, run_with("math", segments, True, None, monkeypatch, sizes), strict=True
    ):
        assert one.shape == other.shape
        # Sums of ten times as many terms.
        assert (one - other).abs().max() <= (1e-13 if sizes[0] < 100 else 1e-12)


def test_cumulative_lengths_are_copied_to_the_device_once_for_all_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[object] = []
    monkeypatch.setattr(
        flash.streams,
        "on_device",
        lambda values, *_: copies.append(values) or torch.tensor(values),
    )
    for _ in range(3):
        flash._varlen(((2, 5), (3, 4)), torch.device("cpu"))
    assert copies == [[0, 2, 5], [0, 5, 9]]


# Which kernel


def names_for(
    device: str, dtype: torch.dtype, size: int = 64, value_size: int = 64, **call: Any
) -> list[str]:
    """Kernels between which there is a choice; tensors on "meta" that pose as a
    device's."""

    class Like:
        def __init__(self, size: int) -> None:
            self.device, self.dtype, self.shape = (
                torch.device(device),
                dtype,
                (1, 64, 4, size),
            )

    masks = Masks(call.get("segments", ((64, 64),)), 1.0, True, call.get("window"))
    given = (Like(size), Like(size), Like(value_size), masks)
    return [kernel.name for kernel in kernels.kernels_for(*given)]  # type: ignore[arg-type]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that has all kernels; the tensors are no tensors, so cuDNN's answer is
    told."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(flash, "flash_3", lambda: SimpleNamespace())
    monkeypatch.setattr(start_aligned, "SDPAParams", lambda *_: None)
    monkeypatch.setattr(
        start_aligned,
        "can_use_cudnn_attention",
        lambda _: torch.backends.cuda.cudnn_sdp_enabled(),
    )
    monkeypatch.setattr(
        Kernel,
        "padded",
        lambda self, *tensors: [torch.empty(1, 1, 1, 1)] * len(tensors),
    )


@pytest.mark.usefixtures("hopper")
def test_each_device_and_shape_gets_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = torch.bfloat16
    assert (
        names_for("cuda", half)
        == names_for("cuda", torch.float16)
        == ["flash", "FA3", "cuDNN"]
    )
    assert (
        names_for("cuda", half, 192, 128)
        == names_for("cuda", half, 60, 60)
        == ["flash", "FA3", "cuDNN"]
    )
    assert (
        names_for("cuda", half, window=63) == ["flash", "FA3"]
        and len(names_for("cuda", half, window=64)) == 3
    )
    assert names_for("cuda", half, segments=((30, 30), (34, 34))) == ["flash", "FA3"]
    assert (
        names_for("cuda", torch.float32)
        == names_for("cuda", half, 512, 512)
        == ["math"]
    )
    monkeypatch.setattr(flash, "flash_3", lambda: None)
    assert names_for("cuda", half) == ["flash", "cuDNN"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert names_for("cuda", torch.float16) == ["math"]
    assert (
        names_for("cpu", half)
        == names_for("cpu", torch.float64)
        == names_for("cpu", torch.float32, 64, 32)
        == ["cpu"]
    )
    assert names_for("mps", torch.float16) == ["math"]


@pytest.mark.usefixtures("hopper")
def test_torchs_own_switches_say_between_which_kernels_the_choice_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        assert names_for("cuda", torch.bfloat16) == ["cuDNN"]
        assert names_for("cuda", torch.bfloat16, window=9) == ["flash"], (
            "cuDNN has no windows, and something has to run"
        )
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        assert names_for("cuda", torch.bfloat16) == ["flash", "FA3"]
    torch.use_deterministic_algorithms(True)
    try:
        assert names_for("cuda", torch.bfloat16) == ["flash"]
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(kernels, "current_flash_attention_impl", lambda: "FA4")
    assert names_for("cuda", torch.bfloat16) == ["flash"], (
        "its user has settled what runs behind this name"
    )


class Choice:
    """Kernels that take all calls of the CPU, between which :mod:`kernels` has to
    choose, by times that are told."""

    def __init__(self, patch: pytest.MonkeyPatch, **milliseconds: float) -> None:
        self.ran: list[str] = []
        self.fails: set[str] = set()
        self.factor = dict.fromkeys(milliseconds, 1.0)
        self.tried: list[str] = []
        self.fastest = FastestKernel(
            lambda work: (work(), milliseconds[self.ran[-1]])[1]
        )
        made = tuple(self._kernel(name) for name in milliseconds)
        patch.setattr(kernels, "kernels_for", lambda *_: made)
        patch.setattr(kernels, "FASTEST", self.fastest)

    def _kernel(self, name: str) -> Kernel:
        def forward(*args: Any) -> Any:
            self.ran.append(name)
            if name in self.fails:
                raise RuntimeError("no plan")
            out, lse = kernels.PRODUCTS.forward(*args)
            return out * self.factor[name], lse

        return Kernel(name, forward, kernels.PRODUCTS.backward)

    def call(self, queries: int = 6) -> str:
        """Name of the kernel whose numbers a forward gave."""
        q, k, v = (torch.randn(2, queries, 4, 16) for _ in range(3))
        with count_attention_work() as work:
            kernels.forward(q, k, v, Masks(((queries, queries),), 0.3, True, None))
        return [*work.calls][-1]


def test_the_fastest_kernel_is_found_once_for_all_calls_of_a_kind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choice = Choice(monkeypatch, flash=2.0, slow=3.0, fast=1.0)
    random_state = torch.get_rng_state()
    with caplog.at_level(logging.INFO, "smp"):
        choice.call()
    assert choice.ran == ["flash", "flash", "slow", "slow", "fast", "fast", "fast"]
    [line] = caplog.messages
    assert line.startswith(
        "attention of up to 8 x 8 tokens, 2 rows, heads (4, 4) of (16, 16), torch.float32, causal"
    )
    assert line.endswith(
        "on cpu: fast, of flash 2.000 ms, slow 3.000 ms, fast 1.000 ms"
    )
    choice.ran.clear()
    torch.set_rng_state(random_state)
    assert choice.call(8) == choice.call(5) == "fast" and choice.ran == [
        "fast",
        "fast",
    ], "both are up to 8 tokens"
    assert choice.call(9) == "fast" and len(choice.ran) == 9, (
        "16 tokens are another kind"
    )
    assert len(choice.fastest.measured) == 2


def test_measuring_draws_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    Choice(monkeypatch, flash=2.0, fast=1.0)
    tensors = [torch.randn(1, 4, 2, 8) for _ in range(3)]
    before = torch.get_rng_state()
    kernels.forward(*tensors, Masks(((4, 4),), 1.0, True, None))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_kernel_with_other_numbers_is_never_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that gives nan, and one that raises; each with a warning."""
    choice = Choice(monkeypatch, flash=2.0, wrong=1.0, nan=1.0, broken=1.0)
    choice.factor |= {"wrong": 1.01, "nan": float("nan")}
    choice.fails = {"broken"}
    assert choice.call() == "flash"
    warnings = [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING
    ]
    assert ["its output is off by 0.01" in text for text in warnings] == [
        True,
        False,
        False,
    ]
    assert "wrong is left out" in warnings[0] and "off by nan" in warnings[1]
    assert warnings[2].endswith("broken is left out: RuntimeError: no plan")


def test_a_chosen_kernel_that_raises_later_gives_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choice = Choice(monkeypatch, flash=2.0, fast=1.0)
    assert choice.call() == "fast"
    choice.fails = {"fast"}
    assert (
        choice.call() == "flash" and "fast raised, flash takes its place" in caplog.text
    )
    choice.fails = set()
    assert choice.call() == "flash"
    choice.fails = {"flash"}
    with pytest.raises(RuntimeError, match="no plan"):
        choice.call()


def test_without_memory_to_measure_the_first_kernel_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choice = Choice(monkeypatch, flash=2.0, fast=1.0)

    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(choice.fastest, "_milliseconds", out_of_memory)
    assert choice.call() == "flash" and "no memory to measure" in caplog.text

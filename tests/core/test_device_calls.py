"""What CUDA's operators are asked, without a device: shapes, layouts and dtypes, which
torch checks on "meta" too; and that every Triton kernel compiles for the devices there
are."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from smp_core.context_parallel import flash, kernels
from smp_core.context_parallel.fastest import Kernel, Masks, Segments
from smp_core.fp8 import products
from smp_core.fp8.casting import Quantized
from smp_core.fp8.scaling import E4M3, E5M2
from smp_core.torch_facts import kernels as of_device

META = torch.device("meta")
DOCUMENTS = ((30, 40), (34, 56))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("segments", [((64, 96),), DOCUMENTS])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("d", "e"), [(128, 128), (192, 128), (100, 64)])
def test_flash_attention_takes_what_it_is_given(
    dtype: torch.dtype,
    segments: Segments,
    window: int | None,
    d: int,
    e: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lengths(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(len(values), dtype=dtype, device=META)

    monkeypatch.setattr(flash.streams, "on_device", lengths)
    # Nothing of this stays in the cache.
    monkeypatch.setattr(flash, "_varlen", flash._varlen.__wrapped__)
    takes_all_of(kernels.FLASH, dtype, segments, window, d, e, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("d", "e"), [(128, 128), (192, 128), (100, 64)])
def test_cudnn_attention_takes_what_it_is_given(
    dtype: torch.dtype, d: int, e: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes_all_of(kernels.CUDNN, dtype, ((64, 96),), None, d, e, monkeypatch)


def takes_all_of(
    kernel: Kernel,
    dtype: torch.dtype,
    segments: Segments,
    window: int | None,
    d: int,
    e: int,
    patch: pytest.MonkeyPatch,
) -> None:
    """Call a kernel forward and backward, with heads padded as it wants them."""
    patch.setattr(kernels, "kernels_for", lambda *_: (kernel,))
    q, grad = (torch.empty(2, 64, 8, size, device=META, dtype=dtype) for size in (d, e))
    k, v = (torch.empty(2, 96, 2, size, device=META, dtype=dtype) for size in (d, e))
    masks = Masks(segments, 0.1, True, window)
    out, lse = kernels.forward(q, k, v, masks)
    assert (out.shape, out.dtype) == (grad.shape, dtype)
    assert (tuple(lse.shape), lse.dtype) == ((2, 8, 64), torch.float32)
    gradients = kernels.backward(grad, q, k, v, out, lse, masks)
    assert [(each.shape, each.dtype) for each in gradients] == [
        (each.shape, dtype) for each in (q, k, v)
    ]


@pytest.mark.parametrize("rows", [32, 26])
def test_fp8_products_take_what_they_are_given(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_device, "_CAPABLE", {META: True})
    inputs, outputs, scale = 64, 48, torch.empty((), device=META)

    def both(shape: tuple[int, int], dtype: torch.dtype) -> Quantized:
        layouts = (
            torch.empty(each, device=META, dtype=dtype) for each in (shape, shape[::-1])
        )
        return Quantized(*layouts, scale)

    x, w, g = (
        both((rows, inputs), E4M3),
        both((outputs, inputs), E4M3),
        both((rows, outputs), E5M2),
    )
    bias = torch.empty(outputs, device=META, dtype=torch.bfloat16)
    for seen, shape in (
        (products.forward_product(x, w, torch.bfloat16, bias), (rows, outputs)),
        (products.input_gradient(g, w, torch.bfloat16), (rows, inputs)),
        (products.weight_gradient(g, x, torch.bfloat16), (outputs, inputs)),
    ):
        assert (tuple(seen.shape), seen.dtype) == (shape, torch.bfloat16)


# Triton


def compiled(
    kernel: Any,
    capability: int,
    pointers: dict[str, str],
    sizes: dict[str, str],
    **constants: Any,
) -> str:
    """PTX of a kernel; a binary is made of it too, by the assembler that comes with
    Triton."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {
        name: {**pointers, **sizes}.get(name, "constexpr") for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"enable_fp_fusion": False}
    made = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=options
    )
    assert made.asm["cubin"]
    return str(made.asm["ptx"])


CODES = {"int8": (0, 127.0), "int4": (1, 7.0), "fp8": (2, 448.0)}
EVERY = [
    (capability, code)
    for capability in (80, 90, 100)
    for code in CODES
    if (capability, code) != (80, "fp8")
]
SAMPLE = [(80, "int8"), (100, "fp8")]


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
@pytest.mark.parametrize(
    ("capability", "code"),
    [
        pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow)
        for case in EVERY
    ],
)
def test_codecs_compile_without_fused_sums(capability: int, code: str) -> None:
    from smp_core.codecs import triton_codec as codecs

    kind, limit = CODES[code]
    shared = {"KIND": kind, "BLOCK": 256, "ROWS": 8}
    pair = {"scales_ptr": "*fp32", "codes_ptr": "*u8"}
    strides = {"N": "i32", "scales_stride": "i32", "codes_stride": "i32"}
    for values in ("*fp32", "*bf16", "*fp16"):
        keep = values == "*fp32"
        given = {**pair, "values_ptr": values, "rest_ptr": values}
        ptx = compiled(
            codecs._encode_kernel,
            capability,
            given,
            {"N": "i32"},
            LIMIT=limit,
            KEEP=keep,
            **shared,
        )
        assert "div.rn" in ptx and "fma.rn" not in ptx
        assert ("cvt.rn.satfinite.e4m3x2" in ptx) == (code == "fp8")
        if values != "*fp16":
            out = {**pair, "out_ptr": values}
            compiled(
                codecs._decode_kernel,
                capability,
                out,
                {**strides, "out_stride": "i64"},
                **shared,
            )
    sums_compile(capability, kind, pair)


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
def test_sums_of_bfloat16_compile() -> None:
    sums_compile(80, 3, {"scales_ptr": "*bf16", "codes_ptr": "*bf16"})


def sums_compile(capability: int, kind: int, pair: dict[str, str]) -> None:
    from smp_core.codecs import triton_codec as codecs

    shared = {"KIND": kind, "BLOCK": 256, "ROWS": 8}
    strides = {"N": "i32", "scales_stride": "i32", "codes_stride": "i32", "R": "i32"}
    sums = {**pair, "own_ptr": "*fp32", "total_ptr": "*fp32"}
    ptx = compiled(
        codecs._sum_kernel, capability, sums, {**strides, "me": "i32"}, **shared
    )
    assert "fma.rn" not in ptx, "sums are those of the eager formulas"
    compiled(codecs._sum_kernel, capability, sums, strides, me=1, **shared)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
@pytest.mark.parametrize("capability", [90, 100])
def test_casts_compile(capability: int) -> None:
    from smp_core.fp8.triton_casts import _cast_kernel, _transpose_kernel

    tiles = {"stride_c": 1, "BLOCK_R": 64, "BLOCK_C": 64}
    numbers = {"bytes_ptr": "*u8", "columns_ptr": "*u8"}
    compiled(
        _transpose_kernel,
        capability,
        numbers,
        {"R": "i32", "C": "i32", "stride_r": "i32"},
        **tiles,
    )
    for source in ("*fp32", "*bf16", "*fp16"):
        for e5m2 in (False, True):
            for transposed in (False, True):
                pointers = {
                    "x_ptr": source,
                    "scale_ptr": "*fp32",
                    "numbers_ptr": "*u8",
                    "amax_ptr": "*fp32",
                }
                constants = {
                    "stride_c": 1,
                    "LARGEST_VALUE": 57344.0 if e5m2 else 448.0,
                    "IS_E5M2": e5m2,
                }
                constants |= {"TRANSPOSED": transposed, "BLOCK_R": 64, "BLOCK_C": 64}
                sizes = {"R": "i32", "C": "i32", "stride_r": "i32"}
                compiled(_cast_kernel, capability, pointers, sizes, **constants)

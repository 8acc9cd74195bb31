"""The fused cast's kernel without a GPU: its results in Triton's interpreter, its code
as compiled for Hopper.

Triton's interpreter does not round to FP8 as devices do (31.5 becomes 16 in E4M3, ties
go away from even, nan of E4M3 becomes 384), so values here are FP8 numbers times a
power of two, or beyond the range; rounding is the instruction whose name is looked for
in the compiled code, and `make gpu-check` compares it bit by bit on a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from smp_core.fp8.casting import amax_of, cast_eager, transposed
from smp_core.fp8.scaling import E4M3, E5M2, LARGEST
from tests.harness import ROOT

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def interpret(dtypes: Sequence[torch.dtype]) -> None:
    """The kernel, interpreted, against the eager formula: odd sizes, other strides, too
    large values, infinities."""
    from smp_core.fp8.triton_casts import cast_fused, transposed_fused

    scale = torch.tensor(2.0**-3)
    for dtype in dtypes:
        numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
        exact = numbers[numbers.float().isfinite()].float() / scale
        for source in (torch.float32, torch.bfloat16):
            x = torch.stack([exact.roll(n) for n in range(70)]).to(source)
            x[0, :2] = torch.tensor([torch.inf, -torch.inf])
            x[69, 3:5] = 3 * LARGEST[dtype] / scale * torch.tensor([1, -1])
            for given in (
                (x, x.t(), x[:, :48], x[3:4])
                if source is torch.float32
                else (x[:, :48],)
            ):
                rows, columns, amax = cast_fused(given, scale, dtype, columns=True)
                expected = cast_eager(given, scale, dtype).contiguous()
                assert torch.equal(
                    rows.view(torch.uint8), expected.view(torch.uint8)
                ), (dtype, source, given.shape)
                assert torch.equal(
                    columns.view(torch.uint8), transposed(expected).view(torch.uint8)
                )
                assert torch.equal(amax, amax_of(given))
            so_far = torch.tensor([1.0, 7.0])
            cast_fused(
                x[3:4, :2] * 0 + 3,
                scale,
                dtype,
                columns=False,
                amax=so_far[0],
            )
            cast_fused(
                x[3:4, :2] * 0 + 3,
                scale,
                dtype,
                columns=False,
                amax=so_far[1],
            )
            assert so_far.tolist() == [3.0, 7.0]
        assert cast_fused(x, scale, dtype, columns=False)[1] is None
        for given in (expected, expected.t(), expected[:, :1], expected[1:70, 3:40]):
            seen = transposed_fused(given)
            assert seen.is_contiguous() and torch.equal(
                seen.view(torch.uint8), given.view(torch.uint8).t()
            )
        x[5, 7] = torch.nan
        assert cast_fused(x, scale, dtype, columns=False)[2] == torch.inf


@needs_triton
@pytest.mark.parametrize(
    "dtypes",
    [pytest.param(each, marks=pytest.mark.slow) for each in ("E5M2", "E4M3, E5M2")],
)
def test_the_interpreted_kernel_equals_the_eager_cast(dtypes: str) -> None:
    # A process of its own: Triton decides at its first import whether kernels are
    # interpreted.
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from tests.core.fp8.test_fp8_triton import *; interpret(({dtypes},))",
        ],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


def code_for(capability: int, dtype: torch.dtype) -> str:
    """PTX for a contiguous bfloat16 tensor whose sizes are multiples of
    16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from smp_core.fp8.triton_casts import _cast_kernel

    pointers = {
        "x_ptr": "*bf16",
        "scale_ptr": "*fp32",
        "numbers_ptr": "*u8",
        "amax_ptr": "*fp32",
    }
    signature = {**pointers, "R": "i32", "C": "i32", "stride_r": "i32"}
    constants: dict[str, Any] = {
        "stride_c": 1,
        "LARGEST_VALUE": LARGEST[dtype],
        "IS_E5M2": dtype == E5M2,
    }
    constants |= {"BLOCK_R": 64, "BLOCK_C": 64}
    aligned: Any = {
        (place,): [["tt.divisibility", 16]] for place in range(len(signature))
    }
    source = ASTSource(
        _cast_kernel,
        {**signature, **dict.fromkeys(constants, "constexpr")},
        constants,
        aligned,
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]


@needs_triton
@pytest.mark.parametrize(("dtype", "name"), [(E4M3, "e4m3"), (E5M2, "e5m2")])
def test_the_kernel_compiles_for_hopper_to_what_it_is_meant_to_be(
    dtype: torch.dtype, name: str
) -> None:
    ptx = code_for(90, dtype)
    assert f"cvt.rn.satfinite.{name}x2.f32" in ptx, "rounds once, to nearest even"
    assert not re.search(r"(min|max)\.NaN", ptx), (
        "breaks transposed stores: triton-lang/triton#11111"
    )
    assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}, (
        "numbers leave 16 bytes at a time"
    )
    assert "atom.global" in ptx

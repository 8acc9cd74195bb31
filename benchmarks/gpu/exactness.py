"""Part 1: kernels, casts, scales and products of FP8, number by number."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.device import Device, NotHere
from benchmarks.gpu.items import Rows
from smp_core.fp8 import convert_to_fp8
from smp_core.fp8.casting import (
    Quantized,
    amax_of,
    cast_eager,
    transposed,
    transposed_eager,
)
from smp_core.fp8.products import forward_product, input_gradient, weight_gradient
from smp_core.fp8.scaling import E4M3, E5M2, LARGEST, scale_for
from smp_core.torch_facts import has_triton

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/core/codecs/test_triton_codec.py", "tests/core/fp8/test_fp8_triton.py")
SHAPES = {
    "plain": (96, 160),
    "odd": (1000, 48),
    "transposed": (128, 128),
    "wild": (16, 64),
}
Cast = Callable[..., Any]


def kernels(on: Device) -> Rows:
    """Yield the kernels' own tests, which take a CUDA device by themselves; a rehearsal
    collects them."""
    for path in TESTS:
        yield path, partial(_tests, path, on.rehearsal)


def _tests(path: str, collects: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path]
    done = subprocess.run(
        [*command, *(["--collect-only"] if collects else [])],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode and not lines:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {
        "ok": done.returncode == 0,
        "pytest": lines[-1].strip("= "),
        **({"failed": failed[:5]} if failed else {}),
    }


def casts(on: Device) -> Rows:
    cast = _fused(on)
    for dtype in (E4M3, E5M2):
        for source in (torch.bfloat16, torch.float32, torch.float16):
            for kind in SHAPES:
                yield (
                    f"{kind} {source} to {dtype}",
                    partial(_one_cast, on, cast, kind, source, dtype),
                )
        yield f"transposes of {dtype}", partial(_transposes, on, dtype)
        yield f"nan stays nan in {dtype}", partial(_nan, on, cast, dtype)
    yield "scales are powers of two", partial(_scales, on)


def _fused(on: Device) -> Cast:
    """Return the kernel; in a rehearsal what it is compared with."""
    if not on.rehearsal:
        on.needs(fp8=True)
        if not has_triton():
            raise NotHere("Triton")
        from smp_core.fp8.triton_casts import cast_fused

        return cast_fused

    def cast(
        x: torch.Tensor,
        scale: torch.Tensor,
        dtype: torch.dtype,
        *,
        columns: bool,
    ) -> Any:
        x8 = cast_eager(x, scale, dtype).contiguous()
        return (
            x8,
            transposed(x8) if columns else None,
            amax_of(x).nan_to_num(math.inf, math.inf),
        )

    return cast


def _one_cast(
    on: Device, cast: Cast, kind: str, source: torch.dtype, dtype: torch.dtype
) -> dict[str, Any]:
    """Compare rows, columns and amax, bit by bit; also of strided tensors and
    infinities."""
    x = torch.randn(SHAPES[kind], device=on.device, dtype=source)
    if kind == "transposed":
        x = x.t()
    scale = scale_for(amax_of(x), LARGEST[dtype])
    if kind == "wild":
        x[0, :4] = torch.tensor(
            [math.inf, -math.inf, 6e4, -6e4], device=on.device, dtype=source
        )
    rows, columns, amax = cast(x, scale, dtype, columns=True)
    expected = cast_eager(x, scale, dtype).contiguous()
    pairs = ((rows, expected), (columns, transposed(expected)))
    differing = sum(
        int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs
    )
    return {
        "ok": differing == 0 and torch.equal(amax, amax_of(x)),
        "differing": differing,
    }


def _transposes(on: Device, dtype: torch.dtype) -> dict[str, Any]:
    ok = True
    for shape in SHAPES.values():
        numbers = torch.randint(256, shape, device=on.device, dtype=torch.uint8).view(
            dtype
        )
        for given in (numbers, numbers.t(), numbers[1:, 3:]):
            ok &= torch.equal(
                transposed(given).view(torch.uint8),
                transposed_eager(given).view(torch.uint8),
            )
    return {"ok": ok}


def _nan(on: Device, cast: Cast, dtype: torch.dtype) -> dict[str, Any]:
    x = torch.randn(64, 64, device=on.device)
    x[3, 5] = math.nan
    rows, _, amax = cast(x, torch.ones((), device=on.device), dtype, columns=False)
    return {
        "ok": bool(rows[3, 5].float().isnan()) and not bool(amax.isfinite()),
        "amax": str(amax.item()),
    }


def _scales(on: Device) -> dict[str, Any]:
    """Check scales for amaxes of every magnitude: the mantissa is a half, and on the
    device the same as on the CPU."""
    amaxes = torch.logspace(-37, 38, 5000)
    scales = scale_for(amaxes.to(on.device), LARGEST[E4M3])
    exact = bool((scales.frexp().mantissa == 0.5).all())
    return {
        "ok": exact and torch.equal(scales.cpu(), scale_for(amaxes, LARGEST[E4M3])),
        "powers of two": exact,
    }


def products(on: Device) -> Rows:
    if not on.rehearsal:
        on.needs(fp8=True)
    shapes = (
        ((32, 64, 48), (26, 64, 16))
        if on.rehearsal
        else ((256, 512, 384), (250, 1024, 64))
    )
    for shape in shapes:
        for name in ("forward", "input gradient", "weight gradient"):
            yield (
                f"{name} {'x'.join(map(str, shape))}",
                partial(_product, on, name, *shape),
            )
    for size in (1e-4, 1.0, 1e4):
        yield f"noise floor, values of {size:g}", partial(_noise, on, size)


def _product(
    on: Device, name: str, rows: int, inputs: int, outputs: int
) -> dict[str, Any]:
    """Compare with float64 products of the same FP8 numbers. Results round to bfloat16
    (2^-8); fast accumulation in forward keeps about 14 bits of partial sums, hence 2^-6
    of the largest value there."""
    torch.manual_seed(0)
    shapes = {
        "x": ((rows, inputs), E4M3),
        "w": ((outputs, inputs), E4M3),
        "g": ((rows, outputs), E5M2),
    }
    q = {}
    for letter, (shape, dtype) in shapes.items():
        tensor = torch.randn(shape, device=on.device, dtype=torch.bfloat16)
        scale = scale_for(amax_of(tensor), LARGEST[dtype])
        numbers = cast_eager(tensor, scale, dtype)
        q[letter] = Quantized(numbers, transposed(numbers), 1 / scale)
    x, w, g = (each.rows.double() * each.inverse_scale.double() for each in q.values())  # type: ignore[union-attr]
    seen, expected, limit = {
        "forward": lambda: (
            forward_product(q["x"], q["w"], torch.bfloat16, None),
            x @ w.t(),
            2**-6,
        ),
        "input gradient": lambda: (
            input_gradient(q["g"], q["w"], torch.bfloat16),
            g @ w,
            2**-7,
        ),
        "weight gradient": lambda: (
            weight_gradient(q["g"], q["x"], torch.bfloat16),
            g.t() @ x,
            2**-7,
        ),
    }[name]()
    worst = ((seen.double() - expected).abs().max() / expected.abs().max()).item()
    return {"ok": worst <= limit, "of the largest value": worst, "limit": limit}


def decibels(expected: torch.Tensor, seen: torch.Tensor) -> float:
    noise = (expected.double() - seen.double()).pow(2).sum()
    return 10 * math.log10((expected.double().pow(2).sum() / noise).item())


def _noise(on: Device, size: float) -> dict[str, Any]:
    """Measure the signal-to-noise ratio of a layer's output (at least 25 dB) and
    gradients (20 dB), while scales are found and after."""
    rows, inputs, outputs = (32, 64, 96) if on.rehearsal else (512, 1024, 2048)
    torch.manual_seed(0)
    net = nn.Linear(inputs, outputs, bias=False, device=on.device, dtype=torch.bfloat16)
    plain = nn.Linear(
        inputs, outputs, bias=False, device=on.device, dtype=torch.float32
    )
    plain.load_state_dict(net.state_dict())
    fp8 = convert_to_fp8(net)
    found: dict[str, Any] = {"ok": True}
    for step in ("calibrating", "delayed"):
        x = torch.randn(rows, inputs, device=on.device, dtype=torch.bfloat16) * size
        g = torch.randn(rows, outputs, device=on.device, dtype=torch.bfloat16) * size
        x1, x2 = x.clone().requires_grad_(), x.float().requires_grad_()
        net.zero_grad(), plain.zero_grad()
        y1, y2 = net(x1), plain(x2)
        y1.backward(g), y2.backward(g.float())
        pairs = (
            (y2.detach(), y1.detach()),
            (x2.grad, x1.grad),
            (plain.weight.grad, net.weight.grad),
        )
        output, *gradients = (round(decibels(*pair), 1) for pair in pairs)
        found["ok"] &= output >= 25 and min(gradients) >= 20
        found[f"{step}, dB"] = [output, *gradients]
        fp8.step()
    return found

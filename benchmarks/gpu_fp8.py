"""FP8 on a Hopper (or Ada, Blackwell) GPU: is it right, and is it fast?

    python benchmarks/gpu_fp8.py [--out benchmarks/results/gpu_fp8.json] [--quick]
    python benchmarks/gpu_fp8.py --device cpu --tiny      # a rehearsal: everything runs, nothing is measured

Needs torch >= 2.11 and this repository; measures torchao (tensorwise) and Transformer Engine (delayed) too where they
are installed, through our backends. Three parts, one table each, all of it in the JSON:

    correctness   the fused cast against the eager one, bit by bit; the three products against float64; the noise floor
                  of a layer (output >= 25 dB, gradients >= 20 dB)
    layers        linear layers of Llama 3.1 8B and 70B at 8K and 16K tokens, forward and backward, casts included;
                  goal: native >= 1.5 x bfloat16 and not slower than torchao
    step          a training step of a Llama of 1.2 billion parameters, 8K tokens, activation checkpointing, eager and
                  compiled; goal: native >= 1.25 x bfloat16

Times are medians between recorded events. The exit status is 1 if a correctness check or one of our layers fails.

The rehearsal walks through the same lines on a CPU that poses as a device with FP8 tensor cores: the device's layouts
and ``torch._scaled_mm`` (a slow reference kernel there), the eager cast in place of Triton's, ``aot_eager`` in place of
inductor, sizes of a few dozen. Its times mean nothing and are not compared.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from smp_core.fp8 import Fp8Recipe, casting, convert_to_fp8
from smp_core.fp8.backends import convert_with
from smp_core.fp8.casting import Quantized, amax_of, cast_eager, device_multiplies_fp8, has_triton, transposed
from smp_core.fp8.products import forward_product, input_gradient, weight_gradient
from smp_core.fp8.scaling import E4M3, E5M2, LARGEST, scale_for


@dataclass(frozen=True)
class Plan:
    """What is run: shapes of layers (name, inputs, outputs), tokens, repetitions of a measurement, and the model."""

    shapes: tuple[tuple[str, int, int], ...]
    tokens: tuple[int, ...]
    repeats: int
    warm_up: int = 6
    products: tuple[tuple[int, int, int], ...] = ((256, 512, 384), (250, 1024, 64))
    layer: tuple[int, int, int] = (512, 1024, 2048)
    model: tuple[int, int, int, int, int] = (128256, 2048, 16, 32, 8192)
    """vocabulary, width, layers, heads, hidden; the shape of Llama 3.2 1B"""
    length: int = 8192
    compiler: str = "inductor"


FULL = Plan(
    shapes=(
        ("8B attention", 4096, 4096),
        ("8B up", 4096, 14336),
        ("8B down", 14336, 4096),
        ("70B attention", 8192, 8192),
        ("70B up", 8192, 28672),
        ("70B down", 28672, 8192),
    ),
    tokens=(8192, 16384),
    repeats=20,
)
QUICK = Plan(shapes=FULL.shapes[:2], tokens=(8192,), repeats=20, length=2048)
TINY = Plan(
    shapes=(("tiny", 32, 48),),
    tokens=(20,),
    repeats=2,
    warm_up=1,
    products=((32, 64, 48), (26, 64, 16)),
    layer=(32, 64, 96),
    model=(64, 32, 2, 4, 48),
    length=24,
    compiler="aot_eager",
)
DEVICE = torch.device("cuda", 0)
CASTS = {"plain": (96, 160), "odd": (1000, 48), "transposed": (128, 128), "wild": (16, 64)}


def pose_as_device() -> None:
    """Let a CPU take the paths of a device with FP8 tensor cores, without Triton."""
    global DEVICE
    DEVICE = torch.device("cpu")
    casting._CAPABLE[DEVICE] = True
    casting._TRITON = False


def fused_cast() -> Callable[..., Any] | None:
    """The kernel; in the rehearsal what it is compared with; None without Triton."""
    if DEVICE.type == "cuda":
        if not has_triton():
            return None
        from smp_core.fp8.triton_casts import cast_fused

        return cast_fused

    def cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, rows: bool, columns: bool) -> Any:
        x8 = cast_eager(x, scale, dtype).contiguous()
        return x8 if rows else None, transposed(x8) if columns else None, amax_of(x).nan_to_num(math.inf, math.inf)

    return cast


# Correctness


def decibels(expected: torch.Tensor, seen: torch.Tensor) -> float:
    noise = (expected.double() - seen.double()).pow(2).sum()
    return 10 * math.log10((expected.double().pow(2).sum() / noise).item())


def check_casts() -> list[dict[str, Any]]:
    """The kernel against the eager formula: rows, columns and amax, also of strided tensors, infinities and nan."""
    cast_fused = fused_cast()
    if cast_fused is None:
        return [{"check": "fused cast", "ok": None, "seen": "Triton is not installed"}]
    found: list[dict[str, Any]] = []
    for dtype in (E4M3, E5M2):
        for source in (torch.bfloat16, torch.float32, torch.float16):
            for kind, shape in CASTS.items():
                x = torch.randn(shape, device=DEVICE, dtype=source)
                if kind == "transposed":
                    x = x.t()
                scale = scale_for(amax_of(x), LARGEST[dtype])
                if kind == "wild":
                    x[0, :4] = torch.tensor([math.inf, -math.inf, 6e4, -6e4], device=DEVICE, dtype=source)
                rows, columns, amax = cast_fused(x, scale, dtype, rows=True, columns=True)
                expected = cast_eager(x, scale, dtype)
                assert rows is not None and columns is not None
                ok = torch.equal(rows.view(torch.uint8), expected.contiguous().view(torch.uint8))
                ok = ok and torch.equal(columns.view(torch.uint8), transposed(expected).view(torch.uint8))
                ok = ok and torch.equal(amax, amax_of(x))
                found.append({"check": f"fused cast {kind} {source} -> {dtype}", "ok": ok, "seen": "bit by bit"})
        x = torch.randn(64, 64, device=DEVICE)
        x[3, 5] = math.nan
        rows, _, amax = cast_fused(x, torch.ones((), device=DEVICE), dtype, rows=True, columns=False)
        assert rows is not None
        ok = bool(rows[3, 5].float().isnan()) and not bool(amax.isfinite())
        found.append({"check": f"nan stays nan, {dtype}", "ok": ok, "seen": f"amax {amax.item()}"})
    return found


def check_products(plan: Plan) -> list[dict[str, Any]]:
    """Against float64 products of the same FP8 numbers. Results round to bfloat16 (2^-8); fast accumulation in forward
    keeps about 14 bits of partial sums, hence 2^-6 of the largest value there."""
    found = []
    for rows, inputs, outputs in plan.products:
        x, w, g = (
            torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
            for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
        )

        def quantized(tensor: torch.Tensor, dtype: torch.dtype) -> Quantized:
            scale = scale_for(amax_of(tensor), LARGEST[dtype])
            numbers = cast_eager(tensor, scale, dtype)
            return Quantized(numbers, transposed(numbers), 1 / scale)

        x8, w8, g8 = quantized(x, E4M3), quantized(w, E4M3), quantized(g, E5M2)
        xd, wd, gd = (q.rows.double() * q.inverse_scale.double() for q in (x8, w8, g8))  # type: ignore[union-attr]
        for name, seen, expected, limit in (
            ("forward", forward_product(x8, w8, torch.bfloat16, None), xd @ wd.t(), 2**-6),
            ("input gradient", input_gradient(g8, w8, torch.bfloat16), gd @ wd, 2**-7),
            ("weight gradient", weight_gradient(g8, x8, torch.bfloat16), gd.t() @ xd, 2**-7),
        ):
            worst = ((seen.double() - expected).abs().max() / expected.abs().max()).item()
            text = f"{worst:.1e} of the largest value (limit {limit:.1e})"
            found.append({"check": f"{name} {rows}x{inputs}x{outputs}", "ok": worst <= limit, "seen": text})
    return found


def check_layer(plan: Plan) -> list[dict[str, Any]]:
    rows, inputs, outputs = plan.layer
    found = []
    for size in (1e-4, 1.0, 1e4):
        torch.manual_seed(0)
        net = nn.Linear(inputs, outputs, bias=False, device=DEVICE, dtype=torch.bfloat16)
        plain = nn.Linear(inputs, outputs, bias=False, device=DEVICE, dtype=torch.float32)
        plain.load_state_dict(net.state_dict())
        fp8 = convert_to_fp8(net)
        for step in ("calibrating", "delayed"):
            x = torch.randn(rows, inputs, device=DEVICE, dtype=torch.bfloat16) * size
            g = torch.randn(rows, outputs, device=DEVICE, dtype=torch.bfloat16) * size
            x1, x2 = x.clone().requires_grad_(), x.float().requires_grad_()
            net.zero_grad(), plain.zero_grad()
            y1, y2 = net(x1), plain(x2)
            y1.backward(g), y2.backward(g.float())
            values = [
                decibels(y2.detach(), y1.detach()),
                decibels(x2.grad, x1.grad),
                decibels(plain.weight.grad, net.weight.grad),
            ]
            ok = values[0] >= 25 and min(values[1:]) >= 20
            text = "output {:.1f}, gradients {:.1f} and {:.1f} dB".format(*values)
            found.append({"check": f"noise floor, size {size:g}, {step}", "ok": ok, "seen": text})
            fp8.step()
    return found


# Speed


def median_ms(work: Callable[[], Any], repeats: int, warm_up: int) -> float:
    for _ in range(warm_up):
        work()
    times = []
    for _ in range(repeats):
        if DEVICE.type == "cpu":
            began = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - began))
            continue
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def forward_backward(net: Any, x: torch.Tensor, g: torch.Tensor) -> Callable[[], Any]:
    def work() -> None:
        x.grad = None
        for parameter in net.parameters():
            parameter.grad = None
        net(x).backward(g)

    return work


def plain_layer(plan: Plan, net: nn.Module, x: torch.Tensor, g: torch.Tensor) -> Callable[[], Any]:
    return forward_backward(net, x, g)


def native_layer(
    plan: Plan, net: nn.Module, x: torch.Tensor, g: torch.Tensor, compiled: bool = False
) -> Callable[[], Any]:
    fp8 = convert_to_fp8(net, Fp8Recipe(exclude=()))
    forward_backward(net, x, g)()
    fp8.step()  # calibrated from here on: one pass for each cast
    assert all(map(all, fp8.state.calibrated))
    return forward_backward(torch.compile(net, backend=plan.compiler) if compiled else net, x, g)


def native_compiled_layer(plan: Plan, net: nn.Module, x: torch.Tensor, g: torch.Tensor) -> Callable[[], Any]:
    return native_layer(plan, net, x, g, compiled=True)


def torchao_layer(plan: Plan, net: nn.Module, x: torch.Tensor, g: torch.Tensor) -> Callable[[], Any]:
    recipe = Fp8Recipe(backend="torchao", scaling="dynamic", fp8_all_gather=False, exclude=())
    convert_with(net, recipe, DEVICE)
    return forward_backward(torch.compile(net, backend=plan.compiler), x, g)


def te_layer(plan: Plan, net: nn.Module, x: torch.Tensor, g: torch.Tensor) -> Callable[[], Any]:
    convert_with(net, Fp8Recipe(backend="transformer_engine", fp8_all_gather=False, exclude=()), DEVICE)
    return forward_backward(net, x, g)


LAYERS: dict[str, Callable[..., Callable[[], Any]]] = {
    "bfloat16": plain_layer,
    "native": native_layer,
    "native, compiled": native_compiled_layer,
    "torchao, compiled": torchao_layer,
    "Transformer Engine": te_layer,
}
OURS = ("bfloat16", "native", "native, compiled")
NEEDS = {"torchao, compiled": "torchao", "Transformer Engine": "transformer_engine"}


def measure_layers(plan: Plan) -> list[dict[str, Any]]:
    found = []
    for tokens in plan.tokens:
        for name, inputs, outputs in plan.shapes:
            row: dict[str, Any] = {"layer": name, "inputs": inputs, "outputs": outputs, "tokens": tokens}
            x = torch.randn(tokens, inputs, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
            g = torch.randn(tokens, outputs, device=DEVICE, dtype=torch.bfloat16) * 1e-3
            for kind, make in LAYERS.items():
                # Layers of one kind and other shapes would be compiled for symbolic sizes.
                torch.compiler.reset()
                row[kind] = attempt(kind, layer_ms, make, plan, inputs, outputs, x, g)
            found.append(row)
            torch.cuda.empty_cache()
    return found


def layer_ms(
    make: Callable[..., Callable[[], Any]], plan: Plan, inputs: int, outputs: int, x: torch.Tensor, g: torch.Tensor
) -> float:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(inputs, outputs, bias=False, device=DEVICE, dtype=torch.bfloat16))
    return median_ms(make(plan, net, x, g), plan.repeats, plan.warm_up)


def attempt(kind: str, work: Callable[..., float], *arguments: Any) -> Any:
    """Milliseconds, or why there are none: a failure does not end the run."""
    if kind in NEEDS and importlib.util.find_spec(NEEDS[kind]) is None:
        return "not installed"
    try:
        return work(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


# A training step


class Block(nn.Module):
    """Llama's: RMSNorm, rotary attention with grouped heads, SwiGLU."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, kv_heads * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BSD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, s, _ = x_BSD.shape
        h = self.attention_norm(x_BSD)
        q, k, v = (
            layer(h).view(b, s, heads, self.size).transpose(1, 2)
            for layer, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        q, k = (t * cos + torch.cat([-t[..., self.size // 2 :], t[..., : self.size // 2]], -1) * sin for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x_BSD = x_BSD + self.o(mixed.transpose(1, 2).reshape(b, s, -1))
        h = self.mlp_norm(x_BSD)
        return x_BSD + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Every block is recomputed in backward; one key head for four query heads."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, heads // 4, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.embed.weight
        self.size = width // heads

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        angle = torch.arange(x.shape[1], device=x.device)[:, None] / 5e5 ** (
            torch.arange(0, self.size, 2, device=x.device) / self.size
        )
        angle = torch.cat([angle, angle], -1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1).float(), tokens[:, 1:].flatten())


def step_ms(plan: Plan, fp8: bool, compiled: bool) -> float:
    torch.manual_seed(0)
    torch.compiler.reset()
    with DEVICE:
        model = Llama(*plan.model).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if fp8:
        convert_to_fp8(model).follow(optimizer)
    if compiled:
        for block in model.blocks:
            block.compile(backend=plan.compiler)
    tokens = torch.randint(plan.model[0], (1, plan.length + 1), device=DEVICE)

    def work() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return median_ms(work, plan.repeats // 2, plan.warm_up)


def measure_steps(plan: Plan) -> list[dict[str, Any]]:
    found = []
    for compiled in (False, True):
        row: dict[str, Any] = {"step": "compiled" if compiled else "eager", "tokens": plan.length}
        for kind in ("bfloat16", "native"):
            row[kind] = attempt(kind, step_ms, plan, kind == "native", compiled)
            torch.cuda.empty_cache()
        found.append(row)
    return found


# The report


def ratio(row: dict[str, Any], kind: str) -> float | None:
    fast, base = row.get(kind), row["bfloat16"]
    return base / fast if isinstance(fast, float) and isinstance(base, float) else None


def show(title: str, rows: list[dict[str, Any]]) -> None:
    def cell(value: Any) -> str:
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    columns = list(rows[0])
    widths = [max(len(c), *(len(cell(row.get(c, ""))) for row in rows)) for c in columns]
    print(f"\n{title}\n" + "  ".join(c.ljust(w) for c, w in zip(columns, widths, strict=True)))
    for row in rows:
        print("  ".join(cell(row.get(c, "")).ljust(w) for c, w in zip(columns, widths, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="few shapes and short sequences, to see that it runs")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal, with --tiny")
    parser.add_argument("--tiny", action="store_true", help="sizes of a few dozen; nothing is measured")
    flags = parser.parse_args()
    rehearsal = flags.device == "cpu"
    if rehearsal:
        if not flags.tiny:
            parser.error("a CPU emulates FP8: write --device cpu --tiny for a rehearsal")
        pose_as_device()
    elif not torch.cuda.is_available() or not device_multiplies_fp8(DEVICE):
        print("no CUDA device of capability 8.9 or higher: nothing to measure here", file=sys.stderr)
        return 2
    plan = TINY if flags.tiny else QUICK if flags.quick else FULL
    checks = [*check_casts(), *check_products(plan), *check_layer(plan)]
    show("correctness", checks)
    layers = measure_layers(plan)
    for row in layers:
        best = [r for r in (ratio(row, "native"), ratio(row, "native, compiled")) if r is not None]
        ao = ratio(row, "torchao, compiled")
        row["native / bfloat16"] = max(best, default=math.nan)
        row["goal"] = bool(best) and max(best) >= 1.5 and (ao is None or max(best) >= ao)
    show("linear layers, forward and backward, ms", layers)
    steps = measure_steps(plan)
    for row in steps:
        speedup = ratio(row, "native")
        row["native / bfloat16"] = math.nan if speedup is None else speedup
        row["goal"] = speedup is not None and speedup >= 1.25
    show("training step, ms", steps)
    right = all(check["ok"] is not False for check in checks)
    print("\ncorrect" if right else "\nA CORRECTNESS CHECK FAILED")
    for row in (*layers, *steps):
        for kind, value in row.items():
            if kind in OURS and isinstance(value, str):
                print(f"{kind} FAILED: {value}")
                right = False
    if rehearsal:
        print("a rehearsal on a CPU: times and goals mean nothing")
    if flags.out is not None:
        report = {
            "date": datetime.date.today().isoformat(),
            "device": platform.machine() if rehearsal else torch.cuda.get_device_name(DEVICE),
            "rehearsal": rehearsal,
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": has_triton()},
            "quick": flags.quick,
            "correctness": checks,
            "layers": layers,
            "steps": steps,
        }
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        flags.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

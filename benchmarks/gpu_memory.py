"""Memory and step time of the activation savers on one CUDA device.

    python benchmarks/gpu_memory.py [--parameters 1b] [--tokens 8192 32768] [--out benchmarks/results/gpu_memory.json]
    python benchmarks/gpu_memory.py --device cpu --tiny --out tiny.json   # does the program run? no GPU needed

A Llama of 1 to 3 billion parameters in bfloat16 (random weights, fused AdamW, one sequence), at each length: nothing
saved, full, selective, full with offloaded inputs at horizons 1, 2 and 4, and, to compare with, full with torch's own
`save_on_cpu`, which copies on the compute stream. For each:

- the allocator's peak, and what it is made of (smp_core.memory_report, in a step of its own);
- the median step time, and how much longer than "full" that is;
- from a profiler trace of one more step: the time of copies (out, in), and the share of it beside which a kernel ran.

Whether a copy can hide at all is in "copy_ms" (a block's input at the measured rate) and "block_ms" (its forward); the
goal, in "goal": where the copy is shorter, horizon 2 costs at most 5 % of "full"'s step. Runs on torch >= 2.11 and
needs nothing but torch and this project.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from smp_core.config import SmpConfig
from smp_core.engine import parallelize
from smp_core.memory_report import MemoryReport

GIB = 2**30
SIZES = {
    "1b": {"width": 2048, "layers": 16, "heads": 32, "groups": 8, "inner": 8192},
    "3b": {"width": 3072, "layers": 28, "heads": 24, "groups": 8, "inner": 8192},
    "tiny": {"width": 64, "layers": 6, "heads": 4, "groups": 2, "inner": 128},
}
VOCABULARY = 32000
GOAL = 0.05
SMALLEST_COPY = 2**16
OFFLOAD: dict[str, Any] = {"checkpoint": "full", "offload": True, "offload_min_bytes": 0}
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"activations": "selective"},
    "full": {"activations": "full"},
    "full + offload, horizon 1": {"activations": {**OFFLOAD, "loading_horizon": 1}},
    "full + offload, horizon 2": {"activations": {**OFFLOAD, "loading_horizon": 2}},
    "full + offload, horizon 4": {"activations": {**OFFLOAD, "loading_horizon": 4}},
    "full + torch's save_on_cpu": {"activations": "full"},
}


class Cuda:
    """The device that is measured, and all that is asked of it and of no other."""

    backend, pinned = "nccl", True

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        self.described = torch.cuda.get_device_name(self.device)
        self.activities = [ProfilerActivity.CUDA, ProfilerActivity.CPU]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def start_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def give_back(self) -> None:
        torch.cuda.empty_cache()

    def milliseconds(self, work: Callable[[], object], times: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            work()
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end) / times


class Cpu:
    """Stands in for it, so that the rest of the program runs anywhere; its figures mean nothing."""

    backend, pinned = "gloo", False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.described = "CPU (dry run)"
        self.activities = [ProfilerActivity.CPU]

    def synchronize(self) -> None:
        pass

    def start_peak(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return 0

    def give_back(self) -> None:
        pass

    def milliseconds(self, work: Callable[[], object], times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            work()
        return 1000 * (time.perf_counter() - start) / times


class Block(nn.Module):
    """Letters: B samples, L tokens, D width, H heads, G key-value heads."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.project = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x_BLD: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x_BLD.shape
        h = self.norm_attention(x_BLD)
        q = rotated(self.query(h).view(batch, length, self.heads, -1), rotation).transpose(1, 2)
        k = rotated(self.key(h).view(batch, length, self.groups, -1), rotation).transpose(1, 2)
        v = self.value(h).view(batch, length, self.groups, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x_BLD = x_BLD + self.project(mixed.transpose(1, 2).reshape(batch, length, -1))
        h = self.norm_mlp(x_BLD)
        return x_BLD + self.down(F.silu(self.gate(h)) * self.up(h))


def rotated(x_BLHS: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    cos, sin = rotation[0, None, : x_BLHS.shape[1], None], rotation[1, None, : x_BLHS.shape[1], None]
    first, second = x_BLHS.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Llama(nn.Module):
    """Returns the next-token loss; logits are made and dropped in pieces, or they alone would fill the device."""

    def __init__(self, width: int, layers: int, heads: int, groups: int, inner: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, groups, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(length), 500000.0 ** (-torch.arange(half) / half))
        self.register_buffer("rotation", torch.stack([angles.cos(), angles.sin()]), persistent=False)
        self.around = contextlib.nullcontext

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        x_BLD = self.tokens(tokens_BL[:, :-1])
        for block in self.blocks:
            with self.around():
                x_BLD = block(x_BLD, self.rotation)
        hidden, targets = self.norm(x_BLD).flatten(0, 1), tokens_BL[:, 1:].flatten()
        pieces = zip(hidden.split(2048), targets.split(2048), strict=True)
        return sum(checkpoint(self.piece, h, t, use_reentrant=False) for h, t in pieces) / targets.numel()

    def piece(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(hidden).float(), targets, reduction="sum")


@contextlib.contextmanager
def built(name: str, sizes: Mapping[str, int], length: int, on: Cuda | Cpu) -> Iterator[tuple[Any, Any]]:
    torch.manual_seed(0)
    with on.device:
        model = Llama(**sizes, length=length).to(torch.bfloat16)
    parallel = parallelize(model, SmpConfig(shard_degree=1, **MODES[name]), device=on.device)
    if "save_on_cpu" in name:
        model.around = lambda: torch.autograd.graph.save_on_cpu(pin_memory=on.pinned)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    parallel.prepare_optimizer(optimizer)
    yield parallel, optimizer


def measure(name: str, sizes: Mapping[str, int], length: int, on: Cuda | Cpu, steps: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (1, length + 1), generator=generator).to(on.device)
    losses: list[float] = []
    with built(name, sizes, length, on) as (parallel, optimizer):

        def step() -> float:
            on.synchronize()
            start = time.perf_counter()
            loss = parallel.module(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            on.synchronize()
            seconds = time.perf_counter() - start
            losses.append(loss.item())
            return seconds

        for _ in range(2):
            step()
        on.start_peak()
        seconds = statistics.median(step() for _ in range(steps))
        found: dict[str, Any] = {"step_seconds": seconds, "peak_gib": on.peak_bytes() / GIB, "loss": losses[-1]}
        found |= beside_compute(traced(step, on))
        report = MemoryReport(parallel, [optimizer])
        with report.step():
            step()
        found["peak_by_kind_gib"] = {kind: size / GIB for kind, size in report.steps[0].device.items()}
        offloader = parallel.activations.offloader
        if offloader is not None:
            found["host_pool_gib"] = offloader.pool.n_bytes / GIB
        return found


def traced(work: Callable[[], object], on: Cuda | Cpu) -> list[dict[str, Any]]:
    """The events of a profiler trace, as they are exported for trace viewers."""
    with profile(activities=on.activities) as trace:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def beside_compute(events: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """Milliseconds of copies to and from the host in a trace, and the share of each beside which a kernel ran (None:
    there was no copy).

    Args:
        events: of the trace viewers' format: "cat" is "kernel" or "gpu_memcpy" for what ran on the device (annotations
            there are no work), "ts" and "dur" are microseconds. Kernels of communication are no compute, and copies of
            less than 64 KiB (a loss) no offloading.
    """
    kernels: list[tuple[float, float]] = []
    copies: dict[str, list[tuple[float, float]]] = {"out": [], "in": []}
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in ("kernel", "gpu_memcpy"):
            continue
        name, start = str(event["name"]).lower(), float(event["ts"])
        span = (start, start + float(event["dur"]))
        if event["cat"] == "kernel":
            if "nccl" not in name:
                kernels.append(span)
        elif event.get("args", {}).get("bytes", SMALLEST_COPY) >= SMALLEST_COPY:
            for direction, mark in (("out", "dtoh"), ("in", "htod")):
                if mark in name:
                    copies[direction].append(span)
    busy = merged(kernels)
    found: dict[str, float | None] = {}
    for direction, spans in copies.items():
        total = sum(end - start for start, end in spans)
        hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans for c, d in busy)
        found[f"copies_{direction}_ms"] = total / 1000
        found[f"copies_{direction}_beside_compute"] = hidden / total if total else None
    return found


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def copy_and_block(sizes: Mapping[str, int], length: int, on: Cuda | Cpu) -> dict[str, float]:
    """Milliseconds to copy a block's input to host memory, and of a block's forward."""
    there = torch.randn(1, length, sizes["width"], dtype=torch.bfloat16, device=on.device)
    here = torch.empty(there.shape, dtype=there.dtype, pin_memory=on.pinned)
    half = sizes["width"] // sizes["heads"] // 2
    with on.device:
        block = Block(*(sizes[key] for key in ("width", "heads", "groups", "inner"))).to(torch.bfloat16)
        rotation = torch.ones(2, length, half, dtype=torch.bfloat16)
    works = {"copy_ms": lambda: here.copy_(there, non_blocking=True), "block_ms": lambda: block(there, rotation)}
    found = {}
    with torch.no_grad():
        for name, work in works.items():
            on.milliseconds(work, 3)
            found[name] = on.milliseconds(work, 10)
    return found


def compared(found: dict[str, Any]) -> dict[str, Any]:
    """How much longer each mode's step is than "full"'s, and what that says about the goal."""
    full = found["modes"]["full"].get("step_seconds")
    for mode in found["modes"].values():
        if full and "step_seconds" in mode:
            mode["longer_than_full"] = mode["step_seconds"] / full - 1
    second = found["modes"]["full + offload, horizon 2"]
    applies = found["copy_ms"] < found["block_ms"]
    # None of either would say that the profiler saw no copies, which on a device means that it was not let to look.
    shares = [second.get(f"copies_{way}_beside_compute") for way in ("out", "in")]
    return {
        "applies": applies,
        "met": second.get("longer_than_full", 1.0) <= GOAL if applies else None,
        "copies_beside_compute": None if None in shares else min(shares),
    }


def table(length: int, found: Mapping[str, Any]) -> Table:
    title = f"{length:,} tokens; a block's input is copied in {found['copy_ms']:.2f} ms and computed with in "
    shown = Table(title=f"{title}{found['block_ms']:.2f} ms; goal: {found['goal']}")
    columns = ("peak_gib", "step_seconds", "longer_than_full", "copies_out_beside_compute", "copies_in_beside_compute")
    for heading in ("mode", *columns):
        shown.add_column(heading.replace("_", " "), justify="left" if heading == "mode" else "right")
    for name, mode in found["modes"].items():
        figures = [mode.get(column) for column in columns]
        lacking = "out of memory" if "out_of_memory" in mode else "-"
        shown.add_row(name, *(lacking if figure is None else f"{figure:.3f}" for figure in figures))
    return shown


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", choices=SIZES, default="1b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps (%(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, use with --tiny")
    parser.add_argument("--tiny", action="store_true", help="a model of six small blocks, 64 and 96 tokens, one step")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_memory.json"))
    flags = parser.parse_args(arguments)
    if flags.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu --tiny --out FILE shows that the program runs")
    if flags.tiny:
        flags.parameters, flags.tokens, flags.steps = "tiny", [64, 96], 1
    on = Cuda() if flags.device == "cuda" else Cpu()
    results: dict[str, Any] = {"device": on.described, "torch": torch.__version__, "parameters": flags.parameters}
    sizes = SIZES[flags.parameters]
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group(on.backend, init_method=store, rank=0, world_size=1)
        try:
            for length in flags.tokens:
                found: dict[str, Any] = {**copy_and_block(sizes, length, on), "modes": {}}
                for mode in MODES:
                    try:
                        found["modes"][mode] = measure(mode, sizes, length, on, flags.steps)
                    except torch.OutOfMemoryError:
                        found["modes"][mode] = {"out_of_memory": True}
                    gc.collect()  # a model's hooks point back at it
                    on.give_back()
                    print(length, mode, found["modes"][mode], flush=True)
                found["goal"] = compared(found)
                results[f"{length} tokens"] = found
                flags.out.parent.mkdir(parents=True, exist_ok=True)
                flags.out.write_text(json.dumps(results, indent=1) + "\n")
                Console().print(table(length, found))
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()

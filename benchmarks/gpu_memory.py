"""Memory and step time of the activation savers on one CUDA device.

    python benchmarks/gpu_memory.py [--parameters 1b] [--tokens 8192 32768] [--out benchmarks/results/gpu_memory.json]

A Llama of 1 to 3 billion parameters in bfloat16 (random weights, fused AdamW, one sequence), at each length: nothing
saved, full, selective, full with offloaded inputs at horizons 1, 2 and 4, and, to compare with, full with torch's own
`save_on_cpu`, which copies on the compute stream. For each: peak of the allocator, median step time, and from a
profiler trace of one step how much of the time of copies (out, in) a kernel was running beside. Whether a copy can hide
at all is in the figures "copy_ms" (a block's input at the measured rate) and "block_ms" (its forward). Runs on
torch >= 2.11 and needs nothing but torch and this project.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from smp_core.config import SmpConfig
from smp_core.mesh import SmpMesh
from smp_core.parallelize import parallelize_model
from smp_core.topology import Topology

GIB = 2**30
SIZES = {
    "1b": {"width": 2048, "layers": 16, "heads": 32, "groups": 8, "inner": 8192},
    "3b": {"width": 3072, "layers": 28, "heads": 24, "groups": 8, "inner": 8192},
    "tiny": {"width": 64, "layers": 6, "heads": 4, "groups": 2, "inner": 128},
}
VOCABULARY = 32000
OFFLOAD: dict[str, Any] = {"activation_checkpointing": "full", "activation_offloading": True}
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "full + offload, horizon 1": {**OFFLOAD, "activation_loading_horizon": 1},
    "full + offload, horizon 2": {**OFFLOAD, "activation_loading_horizon": 2},
    "full + offload, horizon 4": {**OFFLOAD, "activation_loading_horizon": 4},
    "full + torch's save_on_cpu": {"activation_checkpointing": "full"},
}


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
def built(name: str, sizes: dict[str, int], length: int, device: torch.device) -> Iterator[tuple[Any, Any]]:
    torch.manual_seed(0)
    with device:
        model = Llama(**sizes, length=length).to(torch.bfloat16)
    mesh, config = SmpMesh.build(SmpConfig(shard_degree=1, **MODES[name]), Topology.discover(), device)
    parallel = parallelize_model(model, mesh, config)
    if "save_on_cpu" in name:
        pinned = device.type == "cuda"
        model.around = lambda: torch.autograd.graph.save_on_cpu(pin_memory=pinned)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    parallel.prepare_optimizer(optimizer)
    yield parallel, optimizer
    del model, parallel, optimizer
    gc.collect()


def measure(name: str, sizes: dict[str, int], length: int, device: torch.device, steps: int) -> dict[str, Any]:
    on_cuda = device.type == "cuda"
    tokens = torch.randint(VOCABULARY, (1, length + 1), generator=torch.Generator().manual_seed(1)).to(device)
    with built(name, sizes, length, device) as (parallel, optimizer):

        def step() -> float:
            if on_cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            loss = parallel.module(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if on_cuda:
                torch.cuda.synchronize()
            step.loss = loss.item()
            return time.perf_counter() - start

        for _ in range(2):
            step()
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        seconds = statistics.median(step() for _ in range(steps))
        found: dict[str, Any] = {"step_seconds": seconds, "loss": step.loss}
        if on_cuda:
            found["peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
                step()
            found |= beside_compute(trace)
        offloader = parallel.activations.offloader
        if offloader is not None:
            found["host_pool_gib"] = offloader.pool.n_bytes / GIB
        return found


def beside_compute(trace: Any) -> dict[str, float]:
    """Milliseconds of copies to and from the host in a trace, and the share of each beside which a kernel ran."""
    on_device = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(e.name, e.time_range.start, e.time_range.end) for e in on_device]
    kernels = merged([(a, b) for name, a, b in spans if not name.lower().startswith(("memcpy", "memset"))])
    found: dict[str, float] = {}
    for direction, mark in (("out", "dtoh"), ("in", "htod")):
        copies = [(a, b) for name, a, b in spans if mark in name.lower()]
        total = sum(b - a for a, b in copies)
        hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in copies for c, d in kernels)
        found[f"copies_{direction}_ms"] = total / 1000
        found[f"copies_{direction}_beside_compute"] = hidden / total if total else 1.0
    return found


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def copy_and_block(sizes: dict[str, int], length: int, device: torch.device) -> dict[str, float]:
    """Milliseconds to copy a block's input to pinned memory, and of a block's forward."""
    if device.type != "cuda":
        return {}
    there = torch.randn(1, length, sizes["width"], dtype=torch.bfloat16, device=device)
    here = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
    with device:
        block = Block(*(sizes[key] for key in ("width", "heads", "groups", "inner"))).to(torch.bfloat16)
        rotation = torch.ones(2, length, sizes["width"] // sizes["heads"] // 2, dtype=torch.bfloat16)

    def milliseconds(work: Any) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            work()
        begin.record()
        for _ in range(10):
            work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 10

    with torch.no_grad():
        copy, forward = (
            milliseconds(lambda: here.copy_(there, non_blocking=True)),
            milliseconds(lambda: block(there, rotation)),
        )
    return {"copy_ms": copy, "block_ms": forward}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", choices=SIZES, default="1b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps (%(default)s)")
    parser.add_argument("--cpu", action="store_true", help="only to see that it runs; use with --parameters tiny")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_memory.json"))
    arguments = parser.parse_args()
    if not arguments.cpu and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --cpu --parameters tiny --tokens 64 shows that the program runs")
    device = torch.device("cpu") if arguments.cpu else torch.device("cuda", 0)
    name = "CPU" if arguments.cpu else torch.cuda.get_device_name(device)
    results: dict[str, Any] = {"device": name, "torch": torch.__version__, "parameters": arguments.parameters}
    sizes = SIZES[arguments.parameters]
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group(
            "gloo" if arguments.cpu else "nccl", init_method=f"file://{store.name}", rank=0, world_size=1
        )
        for length in arguments.tokens:
            found: dict[str, Any] = {**copy_and_block(sizes, length, device), "modes": {}}
            for mode in MODES:
                try:
                    found["modes"][mode] = measure(mode, sizes, length, device, arguments.steps)
                except torch.OutOfMemoryError:
                    found["modes"][mode] = {"out_of_memory": True}
                if not arguments.cpu:
                    torch.cuda.empty_cache()
                print(length, mode, found["modes"][mode], flush=True)
            results[f"{length} tokens"] = found
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

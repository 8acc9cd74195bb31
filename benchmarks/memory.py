"""What each memory saver holds: bytes between forward and backward, peaks by kind, host
memory, step time, and what it costs to look.

    python benchmarks/memory.py [--steps 5] [--out benchmarks/results/memory.json]

One rank, a GPT-2 of twelve blocks on a CPU. Bytes are exact (counted by
smp_core.observe.memory_report.MemoryReport), so they say the same on any machine; step
times are those of the machine named, which was doing other things too, and say little
about a GPU: there, recomputation costs about a third of a step, and benchmarks/gpu
measures what copies cost. Every second step is watched by MemoryReport, as
SmpMonitor(memory_every_n_steps=...) watches some; what that costs is the difference of
processor time (the least of all steps), which other programs disturb less than the
clock.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.observe.memory_log import MIB
from smp_core.observe.memory_report import MemoryReport

BLOCKS, WIDTH, SAMPLES, LENGTH = 12, 192, 4, 256
OFFLOAD: dict[str, Any] = {"checkpoint": "full", "offload": True}
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "every:2": {"activations": "every:2"},
    "selective": {"activations": "selective"},
    "full": {"activations": "full"},
    "full + offload, horizon 4": {"activations": {**OFFLOAD, "loading_horizon": 4}},
    "full + offload, horizon 2": {"activations": {**OFFLOAD, "loading_horizon": 2}},
    "full + offload, horizon 1": {"activations": {**OFFLOAD, "loading_horizon": 1}},
    'state_offload="optimizer"': {"state_offload": "optimizer"},
    'state_offload="all"': {"state_offload": "all"},
}


def measure(knobs: dict[str, Any], steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = {
        "n_layer": BLOCKS,
        "n_embd": WIDTH,
        "n_head": 6,
        "n_positions": LENGTH,
        "vocab_size": 1024,
    }
    model = GPT2LMHeadModel(
        GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
    )
    parallel = parallelize(model.train(), SmpConfig(shard_degree=1, **knobs))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    parallel.prepare_optimizer(optimizer)
    report = MemoryReport(parallel, [optimizer])
    tokens = torch.randint(
        1024, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    seconds: list[float] = []
    processor: dict[bool, list[float]] = {True: [], False: []}
    losses, between = [], 0
    for step in range(2 * steps + 2):
        watched = step % 2 == 1
        start, busy = time.perf_counter(), time.process_time()
        with report.step() if watched else contextlib.nullcontext():
            loss = model(input_ids=tokens, labels=tokens).loss
            between = report.activations() if watched else between
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step > 1:
            processor[watched].append(time.process_time() - busy)
            seconds += [] if watched else [time.perf_counter() - start]
    offloader = parallel.activations.offloader
    return {
        "held_between_forward_and_backward": between,
        "inputs_on_host": 0 if offloader is None else offloader.pool.n_bytes,
        "peak": dict(report.steps[-1].device),
        "host": dict(report.steps[-1].host),
        "step_seconds": statistics.median(seconds),
        "processor_seconds": min(processor[False]),
        "watched_processor_seconds": min(processor[True]),
        "last_loss": losses[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=5, help="timed steps of each mode (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/memory.json")
    )
    arguments = parser.parse_args()
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group(
            "gloo", init_method=f"file://{store.name}", rank=0, world_size=1
        )
        results = {
            name: measure(knobs, arguments.steps) for name, knobs in MODES.items()
        }
        dist.destroy_process_group()
    block_input = SAMPLES * LENGTH * WIDTH * 4
    machine = {
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
    }
    model = {
        "blocks": BLOCKS,
        "width": WIDTH,
        "samples": SAMPLES,
        "tokens": LENGTH,
        "block_input_bytes": block_input,
    }
    arguments.out.write_text(
        json.dumps({"machine": machine, "model": model, "modes": results}, indent=1)
        + "\n"
    )
    table = Table(
        title=f"GPT-2, {BLOCKS} blocks, a block's input is {block_input / MIB:.2f} MiB; MiB"
    )
    for heading in (
        "mode",
        "between",
        "peak",
        "optimizer",
        "host",
        "ms/step",
        "watched",
        "loss",
    ):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for name, found in results.items():
        table.add_row(
            name,
            f"{found['held_between_forward_and_backward'] / MIB:.2f}",
            f"{sum(found['peak'].values()) / MIB:.1f}",
            f"{found['peak']['optimizer'] / MIB:.1f}",
            f"{sum(found['host'].values()) / MIB:.1f}",
            f"{1000 * found['step_seconds']:.0f}",
            f"{found['watched_processor_seconds'] / found['processor_seconds'] - 1:+.1%}",
            f"{found['last_loss']:.6f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()

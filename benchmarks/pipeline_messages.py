"""How much of their messages pipeline stages wait for, with receives begun ahead of a
computation and without.

    python benchmarks/pipeline_messages.py [--out
    benchmarks/results/pipeline_messages.json]

Blocks that sleep, in backward twice as long as in forward, one on each of the stages,
which are nodes of the lab (benchmarks/cluster/netlab.py): a message takes about a third
of a forward pass on its link. Exposed is what a step takes beyond (m v + p - 1) / v
forward and backward passes of a stage with v chunks, the time without messages; both
orders take turns in the same processes.

Needs what netlab.py needs: Linux, root, iproute2, gcc.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from cluster.lab_model import Sleep
from machine import about
from torch import nn

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.plan import schedules

NETLAB = Path(__file__).parent / "cluster" / "netlab.py"
WIDTH, ROWS, RATE_MBIT = 1024, 400, 200  # an activation has 1.6 MB: 66 ms on the link
FORWARD = 0.2
# stages p, micro-batches m, schedule
CASES = [(2, 8, "1f1b"), (4, 8, "1f1b"), (4, 8, "interleaved:2"), (4, 8, "gpipe")]


class Block(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.norm = seconds, nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(self.norm(x), self.seconds)


class Model(nn.Module):
    def __init__(self, blocks: int, seconds: float) -> None:
        super().__init__()
        self.dummy_inputs = {"x": torch.zeros(2, WIDTH)}
        self.first = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(seconds) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def stepping(micro_batches: int, schedule: str) -> Callable[[], None]:
    """Return a function that trains one step of a model of its own."""
    stages, chunks = dist.get_world_size(), schedules.chunks_of(schedule)
    torch.manual_seed(0)
    model = Model(stages * chunks, FORWARD / chunks)
    recipe = {"microbatches": micro_batches, "schedule": schedule}
    parallel = parallelize(
        model,
        SmpConfig(shard_degree=1, pipeline_parallel_degree=stages, pipeline=recipe),
    )
    samples = torch.randn(micro_batches * ROWS, WIDTH)

    def step() -> None:
        assert parallel.pipeline is not None
        calls = [
            functools.partial(model, part) for part in samples.chunk(micro_batches)
        ]
        parallel.pipeline.train(calls, lambda loss: loss, 1 / micro_batches, samples)
        parallel.window.close()
        model.zero_grad()

    return step


def worker(micro_batches: int, schedule: str, rounds: int) -> dict[str, list[float]]:
    dist.init_process_group("gloo")
    ways = {"ahead": stepping(micro_batches, schedule)}
    with mock.patch.object(schedules, "_begun_ahead", lambda steps: steps):
        ways["behind"] = stepping(micro_batches, schedule)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, step in ways.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            dist.barrier()
            if number:  # the first one tells the forms of activations
                seconds[way].append(time.perf_counter() - began)
    return seconds


def measure(
    args: argparse.Namespace, stages: int, micro_batches: int, schedule: str
) -> dict[str, Any]:
    command = [
        sys.executable,
        str(NETLAB),
        "run",
        "--nodes",
        str(stages),
        "--ranks",
        "1",
    ]
    command += [
        "--rate",
        f"{RATE_MBIT}mbit",
        "--delay",
        "1ms",
        "--",
        sys.executable,
        __file__,
        "--worker",
    ]
    command += [
        "--micro-batches",
        str(micro_batches),
        "--schedule",
        schedule,
        "--rounds",
        str(args.rounds),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if "REPORT " in line]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    seconds = json.loads(lines[0].partition("REPORT ")[2])
    n_chunks = schedules.chunks_of(schedule)
    ideal = (micro_batches * n_chunks + stages - 1) * 3 * FORWARD / n_chunks
    medians = {way: statistics.median(each) for way, each in seconds.items()}
    exposed = {way: median - ideal for way, median in medians.items()}
    return {
        "stages": stages,
        "micro_batches": micro_batches,
        "schedule": schedule,
        "without_messages": ideal,
        "seconds": seconds,
        "exposed": exposed,
        "ratio": exposed["ahead"] / exposed["behind"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="steps of each order that count"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--micro-batches", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--schedule", default="", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        seconds = worker(args.micro_batches, args.schedule, args.rounds)
        if dist.get_rank() == 0:
            print("REPORT", json.dumps(seconds), flush=True)
        return
    result: dict[str, Any] = {
        **about("pipeline_messages"),
        "emulated": {
            "forward_ms": 1e3 * FORWARD,
            "message_ms": ROWS * WIDTH * 32 / RATE_MBIT / 1e3,
        },
        "rounds": args.rounds,
        "results": [],
    }
    for stages, micro_batches, schedule in CASES:
        row = measure(args, stages, micro_batches, schedule)
        result["results"].append(row)
        behind, ahead = (f"{row['exposed'][way]:.2f} s" for way in ("behind", "ahead"))
        print(f"{stages} stages, {micro_batches} micro-batches, {schedule}:", end=" ")
        print(
            f"exposed {behind}, begun ahead {ahead}, ratio {row['ratio']:.2f}",
            flush=True,
        )
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(args.out)


if __name__ == "__main__":
    main()

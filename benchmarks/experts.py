"""Experts divided among the ranks of a node beside experts that are gathered, and two
hops beside one, on slow links.

    python benchmarks/experts.py [--out benchmarks/results/experts.json]

A Mixtral of 23 million parameters trains on nodes of the lab
(benchmarks/cluster/netlab.py), sharded over all ranks. Its layouts take turns in the
same processes: experts gathered like other layers, divided in the node, and divided
over all ranks with tokens that travel in two hops or in one. Bytes are what the nodes'
network cards sent in a step.

Needs what netlab.py needs: Linux, root, iproute2, gcc.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from cluster.netlab import counters
from machine import about
from transformers import MixtralConfig, MixtralForCausalLM

from smp_core.config import SmpConfig
from smp_core.entry import parallelize

NETLAB = Path(__file__).parent / "cluster" / "netlab.py"
RANKS = 2  # a node
CASES = [(nodes, rate) for nodes in (2, 4) for rate in (200, 1000)]
SAMPLES, LENGTH = 2, 128  # of a rank
SHAPE: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 736, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": LENGTH,
    "attention_dropout": 0.0, "use_cache": False,
}  # fmt: skip
# What is compared, by the layouts of experts: the first beside the second.
PAIRS = {
    "divided in the node": "gathered",
    "over all ranks, two hops": "over all ranks, one hop",
}


def layouts() -> dict[str, dict[str, Any]]:
    world = dist.get_world_size()
    return {
        "gathered": {},
        "divided in the node": {"expert_parallel_degree": RANKS},
        "over all ranks, two hops": {"expert_parallel_degree": world},
        "over all ranks, one hop": {
            "expert_parallel_degree": world,
            "collectives": {"hierarchical": False},
        },
    }


def stepping(knobs: dict[str, Any]) -> Callable[[], None]:
    """Return a function that trains one step of a model of its own."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SHAPE))
    parallel = parallelize(model, SmpConfig(shard_degree="world", **knobs))
    optimizer = torch.optim.AdamW(parallel.module.parameters(), lr=1e-4)
    parallel.prepare_optimizer(optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(SHAPE["vocab_size"], (SAMPLES, LENGTH), generator=generator)

    def step() -> None:
        parallel.module(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def work(steps_of: Callable[[], dict[str, Callable[[], None]]], rounds: int) -> None:
    """Train by turns on each rank of the lab; rank 0 reports the seconds and the bytes
    of each step by name."""
    dist.init_process_group("gloo")
    steps = steps_of()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    sent: dict[str, list[int]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            before, began = counters()["tx_bytes"], time.perf_counter()
            step()
            dist.barrier()
            if number:  # the first one makes buffers
                seconds[name].append(time.perf_counter() - began)
                sent[name].append(counters()["tx_bytes"] - before)
    if dist.get_rank() == 0:
        print("REPORT", json.dumps({"seconds": seconds, "bytes": sent}), flush=True)


def in_lab(
    script: str, nodes: int, rate: int, rounds: int, *options: str
) -> dict[str, Any]:
    """Run a script's workers on nodes of the lab; return what rank 0 reports."""
    command = [
        sys.executable,
        str(NETLAB),
        "run",
        "--nodes",
        str(nodes),
        "--ranks",
        str(RANKS),
    ]
    command += [
        "--rate",
        f"{rate}mbit",
        "--delay",
        "1ms",
        "--",
        sys.executable,
        script,
        "--worker",
    ]
    done = subprocess.run(
        [*command, "--rounds", str(rounds), *options], capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if "REPORT " in line]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    found: dict[str, Any] = json.loads(lines[0].partition("REPORT ")[2])
    return found


def measure(nodes: int, rate: int, rounds: int) -> dict[str, Any]:
    found = in_lab(__file__, nodes, rate, rounds)
    medians = {name: statistics.median(each) for name, each in found["seconds"].items()}
    sent = {name: statistics.median(each) for name, each in found["bytes"].items()}
    ratios = {}
    for one, other in PAIRS.items():
        of_rounds = [
            a / b
            for a, b in zip(found["seconds"][one], found["seconds"][other], strict=True)
        ]
        ratios[one] = {
            "beside": other,
            "seconds": statistics.median(of_rounds),
            "bytes": sent[one] / sent[other],
        }
    return {
        "nodes": nodes,
        "mbit": rate,
        "seconds": medians,
        "bytes": sent,
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="steps of each layout that count"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(
            lambda: {name: stepping(knobs) for name, knobs in layouts().items()},
            args.rounds,
        )
        return
    parameters = sum(
        each.numel() for each in MixtralForCausalLM(MixtralConfig(**SHAPE)).parameters()
    )
    result: dict[str, Any] = {
        **about("experts"),
        "parameters": parameters,
        "rounds": args.rounds,
        "results": [],
    }
    for nodes, rate in CASES:
        row = measure(nodes, rate, args.rounds)
        result["results"].append(row)
        for one, ratio in row["ratios"].items():
            of_time, of_bytes = ratio["seconds"], ratio["bytes"]
            print(
                f"{nodes} x {RANKS}, {rate} Mbit/s: {one} / {ratio['beside']}:", end=" "
            )
            print(f"time {of_time:.3f}, bytes between nodes {of_bytes:.3f}", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(args.out)


if __name__ == "__main__":
    main()

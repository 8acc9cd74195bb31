"""A step of Muon beside one of AdamW on a slow link, where states are sharded in the
node.

    python benchmarks/muon.py [--out benchmarks/results/muon.json]

The transformer of the cluster benchmark trains on two nodes of the lab
(benchmarks/cluster/netlab.py) of two ranks, by both optimizers in turns. Muon's
iteration is done by the two cores here, in float32, once a step whatever the batch: it
is measured at a tiny batch and at a larger one. What its messages take, which go
between ranks of a node, is told apart by a Muon of no iterations.

Needs what netlab.py needs: Linux, root, iproute2, gcc.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from cluster.lab_model import LENGTH, VOCABULARY, Model
from experts import RANKS, in_lab, work
from machine import about

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.optim import Muon, muon_groups

NODES, RATE = 2, 200
SAMPLES = (2, 64)  # sequences of a rank in a step
OPTIMIZERS = ("AdamW", "Muon", "Muon, no iterations")


def stepping(name: str, samples: int) -> Callable[[], None]:
    """Return a function that trains one step of a model of its own."""
    torch.manual_seed(0)
    parallel = parallelize(Model(), SmpConfig(shard_degree="node"))
    if name == "AdamW":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            parallel.module.parameters(), lr=1e-4
        )
    else:
        steps = 5 if name == "Muon" else 0
        optimizer = Muon(
            muon_groups(parallel.module),
            lr=1e-4,
            ns_steps=steps,
            ns_dtype=torch.float32,
        )
    parallel.prepare_optimizer(optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)

    def step() -> None:
        parallel.module(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(samples: int, rounds: int) -> dict[str, Any]:
    """Return medians of a step's seconds and bytes for each optimizer, and times beside
    AdamW's."""
    found = in_lab(__file__, NODES, RATE, rounds, "--samples", str(samples))
    row: dict[str, Any] = {"tokens": samples * LENGTH * NODES * RANKS}
    for kind in ("seconds", "bytes"):
        row[kind] = {
            name: statistics.median(each) for name, each in found[kind].items()
        }
    row["ratios"] = {}
    for name in OPTIMIZERS[1:]:
        pairs = zip(found["seconds"][name], found["seconds"]["AdamW"], strict=True)
        row["ratios"][name] = statistics.median(own / other for own, other in pairs)
        print(
            f"{row['tokens']} tokens a step, {name} / AdamW: time {row['ratios'][name]:.3f}",
            flush=True,
        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="steps of each optimizer that count"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--samples", type=int, default=SAMPLES[0], help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.worker:
        work(
            lambda: {name: stepping(name, args.samples) for name in OPTIMIZERS},
            args.rounds,
        )
        return
    result: dict[str, Any] = {
        **about("muon"),
        "nodes": NODES,
        "mbit": RATE,
        "rounds": args.rounds,
        "goal": 1.15,
    }
    result["results"] = [measure(samples, args.rounds) for samples in SAMPLES]
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(args.out)


if __name__ == "__main__":
    main()

"""What it brings that messages of tensor ranks travel while gradients of weights, or
other pieces, are computed.

    torchrun --nproc-per-node 2 benchmarks/tensor_overlap.py [--pairs 20] [--out
    benchmarks/results/tensor_overlap.json] python benchmarks/cluster/netlab.py run
    --nodes 2 --ranks 1 --rate 1gbit -- \
        python benchmarks/tensor_overlap.py --link 1gbit --out ...

Two Llamas (float32, layers over two gloo ranks) in the same processes take turns, one
forward and backward each: one as it is, one whose weights' gradients are left to
autograd. A figure is the time without / with, of one pair; above 1.0 the overlap saves
time. "in pieces" compares `overlap="pieces"` (with) with the default (without). Results
of several links stand in one file, by `--link`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from smp_core.config import SmpConfig
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from smp_core.tensor_parallel.overlap import ColumnInputs

SAMPLES, TOKENS = 2, 512
CONFIG = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "use_cache": False,
}


def split(sequence: bool, overlaps: bool, overlap: str) -> ParallelModel:
    torch.manual_seed(0)
    add = ColumnInputs.add
    if not overlaps:
        ColumnInputs.add = lambda *_: None  # type: ignore[method-assign]
    recipe = {"sequence_parallel": sequence, "across_nodes": True, "overlap": overlap}
    try:
        model = LlamaForCausalLM(LlamaConfig(**CONFIG))
        return parallelize(
            model,
            SmpConfig(shard_degree=1, tensor_parallel_degree=2, tensor_parallel=recipe),
        )
    finally:
        ColumnInputs.add = add  # type: ignore[method-assign]


def seconds(parallel: ParallelModel, words: torch.Tensor) -> float:
    dist.barrier()
    began = time.perf_counter()
    parallel.module(input_ids=words, labels=words).loss.backward()
    dist.barrier()
    took = time.perf_counter() - began
    parallel.module.zero_grad()
    return took


def compared(pairs: int, *models: ParallelModel) -> dict[str, Any]:
    """Time the first model beside the second."""
    words = torch.randint(
        CONFIG["vocab_size"],
        (SAMPLES, TOKENS),
        generator=torch.Generator().manual_seed(1),
    )
    for parallel in models + models:
        seconds(parallel, words)
    ratios, taken = [], []
    for number in range(pairs):
        # Whoever is second finds warmer caches.
        order = (0, 1) if number % 2 else (1, 0)
        took = {each: seconds(models[each], words) for each in order}
        ratios.append(took[1] / took[0])
        taken.append(took[0])
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "without / with, median": round(statistics.median(ratios), 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "seconds with, median": round(statistics.median(taken), 4),
        "pairs": pairs,
        "load average": [round(each, 1) for each in os.getloadavg()],
        "date": datetime.date.today().isoformat(),
    }


COMPARED: dict[str, tuple[tuple[bool, bool, str], ...]] = {
    "split tokens": ((True, True, "sums"), (True, False, "sums")),
    "whole tokens": ((False, True, "sums"), (False, False, "sums")),
    "in pieces": ((True, True, "pieces"), (True, True, "sums")),
}
"""Row -> how the two models are split: tokens, sums of input gradients overlap, the
knob."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument(
        "--link",
        default="one machine",
        help="what the ranks are joined by, for the result",
    )
    parser.add_argument("--only", choices=COMPARED, help="a row; by default all")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rows = [asked.only] if asked.only else COMPARED
    found = {
        row: compared(asked.pairs, *(split(*how) for how in COMPARED[row]))
        for row in rows
    }
    if dist.get_rank() == 0:
        print(asked.link, json.dumps(found, indent=1), flush=True)
        if asked.out:
            before = json.loads(asked.out.read_text()) if asked.out.exists() else {}
            before["machine"] = (
                f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, gloo"
            )
            before.setdefault("links", {}).setdefault(asked.link, {}).update(found)
            asked.out.write_text(json.dumps(before, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Context parallelism: tokens per second, memory and balance by degree.

    python benchmarks/context_parallel.py [--length 1024] [--steps 3] [--out benchmarks/results/context-parallel.json]
    torchrun --nproc-per-node 8 benchmarks/context_parallel.py --device cuda --length 131072    # on GPUs

By degree, on four gloo ranks of this machine (or the ranks torchrun started): a small
Llama trains on one sequence per context group; tokens per second, bytes of activations
that a rank holds at most for backward (and what they would be at degree 1, divided by
the degree), bytes of gathered weights at that moment, which are model states and the
same at every degree, on CUDA also the peak of allocated memory, and the work of each
rank, counted from the kernel calls that were made (max / mean over ranks; 1 is perfect
balance). The operator alone is measured by benchmarks/gpu.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from attention_work import count_attention_work
from transformers import LlamaConfig, LlamaForCausalLM

from smp_core.config import SmpConfig
from smp_core.context_parallel.replaced_attention import enabled
from smp_core.entry import parallelize
from smp_core.observe.memory_report import MemoryReport
from smp_core.topology import Topology

RANKS = 4
MODEL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        help="timed steps of each degree; the median counts",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--out", type=Path, default=None, help="write the figures as JSON"
    )
    options = parser.parse_args()
    result: dict[str, Any] = {
        "measured_on": machine(options.device),
        "length": options.length,
        "model": MODEL,
    }
    if "RANK" in os.environ:
        found = degrees(options)
        if int(os.environ["RANK"]) != 0:
            return
        result["degrees"] = found
    elif options.device == "cuda":
        parser.error("--device cuda needs ranks: start it with torchrun")
    else:
        result["degrees"] = on_local_ranks(options)
    show(result)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n")


def machine(device: str) -> dict[str, Any]:
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or platform.machine()
    )
    return {
        "device": name,
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def on_local_ranks(options: argparse.Namespace) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        mp.spawn(_rank, (port, options, results), nprocs=RANKS)
        return list(results["degrees"])


def _rank(rank: int, port: int, options: argparse.Namespace, results: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    found = degrees(options)
    if rank == 0:
        results["degrees"] = found


def degrees(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train at every degree that divides the ranks."""
    on_cuda = options.device == "cuda"
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_cuda else "gloo")
    world = dist.get_world_size()
    found = [
        one_degree(options, degree)
        for degree in (1, 2, 4, 8, 16)
        if world % degree == 0
    ]
    for row in found:
        of_one = (
            row["activation_bytes"]
            * row["context_parallel_degree"]
            / found[0]["activation_bytes"]
        )
        row["activations_times_degree_over_those_of_one"] = of_one
    dist.destroy_process_group()
    return found


def one_degree(options: argparse.Namespace, degree: int) -> dict[str, Any]:
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if options.device == "cuda"
        else torch.device("cpu")
    )
    world = dist.get_world_size()
    config = SmpConfig(shard_degree=world, context_parallel_degree=degree)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = LlamaForCausalLM(
        LlamaConfig(**MODEL, max_position_embeddings=options.length)
    ).to(dtype)
    parallel = parallelize(
        model, config, device=device, topology=Topology.uniform(world, world)
    )
    tokens = torch.randint(MODEL["vocab_size"], (1, options.length), device=device)

    def step() -> None:
        if parallel.context is None:
            parallel.module(input_ids=tokens, labels=tokens).loss.backward()
        else:
            split = parallel.context.split({"input_ids": tokens, "labels": tokens})
            with enabled(split):
                parallel.module(**split.batch).loss.backward()
        for parameter in parallel.module.parameters():
            parameter.grad = None

    step()
    report = MemoryReport(parallel)
    with count_attention_work() as work, report.step():
        step()
    held = report.steps[0].device
    seconds = [timed(step, device) for _ in range(options.steps)]
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    everyone = torch.tensor(
        [
            work.pairs,
            statistics.median(seconds),
            held["activations"],
            held["gathered"],
            peak,
        ],
        device=device,
        dtype=torch.float64,
    )
    all_ranks = [torch.empty_like(everyone) for _ in range(world)]
    dist.all_gather(all_ranks, everyone)
    pairs, times, activations, gathered, peaks = torch.stack(all_ranks).T.tolist()
    return {
        "context_parallel_degree": degree,
        "ranks": world,
        "tokens_per_second": world // degree * options.length / max(times),
        "activation_bytes": max(activations),
        "gathered_weight_bytes": max(gathered),
        **({"peak_allocated_bytes": max(peaks)} if device.type == "cuda" else {}),
        # Without context ranks attention is Transformers' own and not counted.
        "work_max_over_mean": None
        if degree == 1
        else max(pairs) / statistics.mean(pairs),
    }


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds that ``work`` takes; on CUDA between two synchronisations."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = result["degrees"]
    table = Table(title="context parallelism by degree")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(_shown(row.get(column)) for column in columns))
    Console().print(table)


def _shown(value: Any) -> str:
    return (
        f"{value:,.3f}".rstrip("0").rstrip(".")
        if isinstance(value, float)
        else str(value)
    )


if __name__ == "__main__":
    main()

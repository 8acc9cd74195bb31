"""Checkpoint throughput: this project's against plain torch DCP and Lightning's and
Accelerate's own full saves.

    python benchmarks/checkpoint.py --ranks 2 --gigabytes 0.5 --repeats 5 --folder
    /some/disk

One FSDP2 model with AdamW states is saved and loaded by every method in turn, in one
run, round after round, so that a slow moment of the disk or the machine meets all of
them; medians are compared. All saves end with their bytes on the disk (fsync). Loads
are measured warm (page cache) and cold (the files' pages dropped before). Also
measured: how long training stalls per asynchronous save, and consolidate's peak memory.
Prints a table, writes JSON beside it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import AsyncCheckpointer, load_checkpoint, save_checkpoint
from smp_core.checkpoint.ranks import Ranks
from smp_core.checkpoint.staging import stage
from smp_core.checkpoint.tree import iterate_tensors
from smp_core.checkpoint.writer import SaveOptions, write_staged

WIDTH = 2048
PAIRS = 40  # of loads with and without a check of every byte
PACKAGES = ("torch", "torch-smp", "safetensors", "xxhash", "lightning", "accelerate")

LARGEST = 256 << 20  # bytes of the tensors that consolidate's memory is measured with

MEASURE_CONSOLIDATE = """
import sys
import torch
from smp_core.checkpoint import consolidate
def memory(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))
open("/proc/self/clear_refs", "w").write("5")  # the peak so far (imports) does not count
before = memory("VmRSS")
options = {} if sys.argv[3] == "as saved" else {"dtype": sys.argv[3]}
consolidate(sys.argv[1], sys.argv[2], max_shard_size="500MB", verify="sizes", **options)
print(memory("VmHWM") - before)
"""


class Training:
    """A sharded model with AdamW states of about the asked size, in bytes over all
    ranks."""

    def __init__(self, size: float) -> None:
        torch.manual_seed(0)
        # float32 weight, exp_avg, exp_avg_sq.
        layers = max(1, round(size / 12 / WIDTH**2))
        self.model = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        )
        mesh = init_device_mesh(
            "cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)
        )
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.bytes = 12 * layers * WIDTH**2

    def state(self) -> dict[str, Any]:
        """Return weights and optimizer states by name, as DTensors."""
        return {
            "state_dict": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }


def lightning_full_save(training: Training) -> Callable[[str], None]:
    """Return Lightning's own full save
    (ModelParallelStrategy(save_distributed_checkpoint=False))."""
    module = importlib.import_module("lightning.fabric.strategies.model_parallel")

    def save(path: str) -> None:
        state = {"state_dict": training.model, "optimizer": training.optimizer}
        module._save_checkpoint(
            Path(path), state, full_state_dict=True, rank=dist.get_rank()
        )

    return save


def accelerate_full_save(training: Training) -> Callable[[str], None]:
    """Return Accelerate's own full save (FSDP2, FULL_STATE_DICT)."""
    utils = importlib.import_module("accelerate.utils.fsdp_utils")
    utils.logger = SimpleNamespace(info=lambda *arguments: None)
    kind = importlib.import_module(
        "torch.distributed.fsdp.fully_sharded_data_parallel"
    ).StateDictType
    plugin = SimpleNamespace(
        state_dict_type=kind.FULL_STATE_DICT,
        fsdp_version=2,
        state_dict_config=SimpleNamespace(offload_to_cpu=True, rank0_only=True),
    )
    accelerator = SimpleNamespace(
        process_index=dist.get_rank(),
        num_processes=dist.get_world_size(),
        is_fsdp2=True,
    )

    def save(path: str) -> None:
        utils.save_fsdp_model(plugin, accelerator, training.model, path)
        utils.save_fsdp_optimizer(
            plugin, accelerator, training.optimizer, training.model, path
        )

    return save


def fsync_tree(path: str) -> None:
    """Bring a file or folder to the disk: Lightning and Accelerate do not, and the
    comparison should be of equals."""
    for file in filter(Path.is_file, [Path(path), *Path(path).rglob("*")]):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def drop_pages(path: str) -> None:
    """Let the next read of a folder come from the disk."""
    for file in Path(path).rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def timed(action: Callable[[], None]) -> float:
    """Return the seconds until the last rank is done."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begin


def on_first(action: Callable[[], Any]) -> None:
    """Run something on rank 0 while the others wait."""
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def measure(folder: str, size: float, repeats: int) -> dict[str, Any]:
    """Measure everything at one size; seconds by what was measured and method."""
    training = Training(size)
    saves: dict[str, Callable[[str], None]] = {
        "DCP": lambda path: dcp.save(training.state(), checkpoint_id=path),
        "torch-smp": lambda path: save_checkpoint(path, training.state()),
        "torch-smp sha256": lambda path: save_checkpoint(
            path, training.state(), digest="sha256"
        ),
    }
    for name, maker in (
        ("Lightning full", lightning_full_save),
        ("Accelerate full", accelerate_full_save),
    ):
        try:
            saves[name] = maker(training)
        except ImportError:
            print(f"{name}: not installed, left out", file=sys.stderr)
    loads: dict[str, Callable[[str], None]] = {
        "DCP": lambda path: dcp.load(training.state(), checkpoint_id=path),
        "torch-smp": lambda path: load_checkpoint(path, training.state()),
        "torch-smp sizes": lambda path: load_checkpoint(
            path, training.state(), verify="sizes"
        ),
        "torch-smp digests": lambda path: load_checkpoint(
            path, training.state(), verify="digests"
        ),
    }
    seconds: dict[str, dict[str, list[float]]] = {
        "save": {},
        "load warm": {},
        "load cold": {},
    }
    for number in range(repeats + 1):  # the first round warms up and is not counted
        for name, save in saves.items():
            path = f"{folder}/{name.replace(' ', '-')}"
            on_first(
                lambda path=path: (
                    shutil.rmtree(path, ignore_errors=True)
                    or Path(path).unlink(missing_ok=True)
                )
            )  # type: ignore[misc]
            on_first(os.sync)
            took = timed(
                lambda save=save, path=path: (
                    save(path),
                    on_first(lambda: fsync_tree(path)),
                )[0]
            )  # type: ignore[misc]
            if number:
                seconds["save"].setdefault(name, []).append(took)
        for name, load in loads.items():
            # Digests and sizes are ways to check the same checkpoint.
            path = f"{folder}/{name.split()[0]}"
            for kind in ("load warm", "load cold"):
                if kind == "load cold":
                    on_first(lambda path=path: drop_pages(path))  # type: ignore[misc]
                took = timed(lambda load=load, path=path: load(path))  # type: ignore[misc]
                if number:
                    seconds[kind].setdefault(name, []).append(took)
    return {
        "bytes": training.bytes,
        "seconds": seconds,
        "check": measure_check(training, f"{folder}/torch-smp"),
        "async": measure_async(training, folder),
    }


def measure_check(training: Training, path: str) -> dict[str, list[list[float]]]:
    """Measure loads that check every byte and loads that do not, in pairs, each kind
    first in every other one: seconds, and those of the processor on rank 0, where
    waiting for others on a busy machine does not count."""
    measured: dict[str, list[list[float]]] = {"seconds": [], "processor seconds": []}
    for number in range(PAIRS + 1):
        seconds, of_processor = [0.0, 0.0], [0.0, 0.0]
        for place in (0, 1) if number % 2 else (1, 0):
            verify = ("auto", "sizes")[place]
            begin = time.process_time()
            seconds[place] = timed(
                lambda verify=verify: load_checkpoint(
                    path, training.state(), verify=verify
                )
            )  # type: ignore[misc]
            of_processor[place] = time.process_time() - begin
        if number:
            measured["seconds"].append(seconds)
            measured["processor seconds"].append(of_processor)
    return measured


def measure_async(training: Training, folder: str) -> dict[str, list[float]]:
    """Measure for how many seconds an asynchronous save stalls training, until it is
    committed, and a bare copy of the bytes."""
    saver = AsyncCheckpointer()
    room = [torch.zeros_like(tensor) for tensor in local_tensors(training.state())]
    measured: dict[str, list[float]] = {
        "stall": [],
        "until committed": [],
        "bare copy": [],
    }
    for number in range(4):
        dist.barrier()
        begin = time.perf_counter()
        for target, source in zip(room, local_tensors(training.state()), strict=True):
            target.copy_(source)
        copied = time.perf_counter() - begin
        dist.barrier()
        begin = time.perf_counter()
        saver.save(f"{folder}/async", training.state())
        stall = time.perf_counter() - begin
        saver.wait()
        if number:  # the first one allocates the host buffers
            measured["bare copy"].append(copied)
            measured["stall"].append(stall)
            measured["until committed"].append(time.perf_counter() - begin)
    saver.close()
    return measured


def local_tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    """List this rank's slices."""
    return [
        tensor.to_local()
        for _, tensor in iterate_tensors(state)
        if isinstance(tensor, DTensor)
    ]


def large_state() -> dict[str, torch.Tensor]:
    """Make four large tensors."""
    return {
        f"w{number}": torch.full((LARGEST // 4,), float(number)) for number in range(4)
    }


def measure_consolidate(folder: str, dtype: str) -> dict[str, float]:
    """Measure the peak memory of consolidate above start-up, with its bound, and its
    time, for a checkpoint of large tensors, which are converted to a dtype or left as
    they are."""
    source, out = f"{folder}/large", f"{folder}/consolidated"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-c", MEASURE_CONSOLIDATE, source, out, dtype]
    options = SaveOptions({}, {}, True, "xxh3")
    write_staged(
        source,
        lambda: stage({"state_dict": large_state()}, None, 0, False),
        options,
        Ranks(alone=True),
    )
    begin = time.perf_counter()
    environ = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE")
    }
    peak = int(
        subprocess.run(
            command, check=True, capture_output=True, text=True, env=environ
        ).stdout
    )
    took = time.perf_counter() - begin
    return {
        "peak bytes": peak,
        "bound bytes": 2 * LARGEST + 200e6,
        "seconds": took,
        "bytes": 4 * LARGEST,
    }


def report(results: list[dict[str, Any]]) -> list[Table]:
    """Make tables of medians: MB/s and the ratio to DCP."""
    tables = []
    for result in results:
        size = result["bytes"] / 1e6
        table = Table(
            "method",
            "what",
            "MB/s",
            "of DCP",
            "seconds",
            title=f"{size:.0f} MB of states",
        )
        for kind, methods in result["seconds"].items():
            baseline = statistics.median(methods["DCP"])
            for name, values in methods.items():
                median = statistics.median(values)
                spread = f"{median:.3f} ({min(values):.3f} to {max(values):.3f})"
                table.add_row(
                    name,
                    kind,
                    f"{size / median:.0f}",
                    f"{baseline / median:.2f}",
                    spread,
                )
        for kind, pairs in result["check"].items():
            low, middle, high = statistics.quantiles(
                checked / unchecked for checked, unchecked in pairs
            )
            table.add_row(
                "every byte checked",
                "load warm, of sizes",
                "",
                "",
                f"{middle:.2f} ({low:.2f} to {high:.2f}) {kind}",
            )
        stall = statistics.median(result["async"]["stall"])
        sync = statistics.median(result["seconds"]["save"]["torch-smp"])
        table.add_row(
            "torch-smp async",
            "stall",
            "",
            "",
            f"{stall:.3f} ({stall / sync:.0%} of a synchronous save)",
        )
        table.add_row(
            "a bare copy",
            "",
            "",
            "",
            f"{statistics.median(result['async']['bare copy']):.3f}",
        )
        tables.append(table)
    return tables


def worker(options: argparse.Namespace) -> None:
    """Run one rank of the measurement."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=30))
    folder = os.path.join(options.folder, "smp-checkpoint-benchmark")
    on_first(lambda: os.makedirs(folder, exist_ok=True))
    load_before = os.getloadavg()[0]
    results = [
        measure(folder, size * 1e9, options.repeats) for size in options.gigabytes
    ]
    memory: dict[str, dict[str, float]] = {}
    for dtype in ("as saved", "bf16"):
        on_first(
            lambda dtype=dtype: memory.update(
                {dtype: measure_consolidate(folder, dtype)}
            )
        )  # type: ignore[misc]
    on_first(lambda: shutil.rmtree(folder, ignore_errors=True))
    if dist.get_rank() == 0:
        for table in report(results):
            Console(width=110).print(table)
        for dtype, seen in memory.items():
            peak, bound = seen["peak bytes"] / 1e6, seen["bound bytes"] / 1e6
            size = f"4 tensors of {LARGEST / 1e6:.0f} MB, {dtype}"
            print(
                f"consolidate of {size}: peak memory {peak:.0f} MB, bound {bound:.0f} MB"
            )
        record = {
            "date": datetime.date.today().isoformat(),
            "ranks": dist.get_world_size(),
            "cpus": os.cpu_count(),
            "load average": [load_before, os.getloadavg()[0]],
            "versions": {"python": platform.python_version(), **versions()},
            "results": results,
            "consolidate": memory,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"written to {options.out}")
    dist.destroy_process_group()


def versions() -> dict[str, str]:
    """Return the installed versions of what took part."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--gigabytes",
        type=float,
        nargs="+",
        default=[0.5],
        help="sizes of the states, over all ranks",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", default=tempfile.gettempdir(), help="the disk that is measured"
    )
    default_out = Path(__file__).parent / "results" / "checkpoint.json"
    parser.add_argument("--out", type=Path, default=default_out)
    options = parser.parse_args()
    if "RANK" in os.environ:
        worker(options)
        return
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={options.ranks}",
        *sys.argv,
    ]
    raise SystemExit(
        subprocess.call(
            [sys.executable, *launch], env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    )


if __name__ == "__main__":
    main()

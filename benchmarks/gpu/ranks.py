"""Parts 5 and 6: several devices with an NCCL rank each. `make gpu-check RANKS=8` runs
the items, each case in processes of its own; one case by itself, as a user starts it:

    torchrun --nproc-per-node 8 benchmarks/gpu/ranks.py memory "one partition group"

Half of the ranks pose as a node, so that replicas and collectives in two stages are
there too. In a rehearsal two gloo ranks on the CPU run everything, tiny; figures mean
nothing then.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.gpu.items import ITEMS, Rows  # noqa: E402

if TYPE_CHECKING:
    from benchmarks.gpu.device import Device

HALF, WORLD = "half", "world"  # of the ranks, as a shard degree
MEMORY: dict[str, dict[str, Any]] = {
    "one partition group": {
        "shard_degree": WORLD,
        "collectives": {"hierarchical": False},
    },
    "one partition group, in two stages": {"shard_degree": WORLD},
    "two replicas": {"shard_degree": HALF},
    "two replicas, states over the world": {
        "shard_degree": HALF,
        "optimizer_shard": "world",
    },
    "two replicas, bfloat16 between them": {
        "shard_degree": HALF,
        "compression": "bf16",
    },
}
HOPS: dict[str, dict[str, Any]] = {
    "exact": {"shard_degree": HALF},
    "bfloat16": {"shard_degree": HALF, "compression": "bf16"},
    "states over the world": {"shard_degree": HALF, "optimizer_shard": "world"},
    "whole parameters, in two stages": {"shard_degree": 1},
}
# float64 on both sides; sums in another order, or in half precision.
EXACT, LOOSE = 1e-7, 0.02
# float32 on both sides, sums in another order.
ROUNDED = 1e-5
ENDINGS = ("apart", "killed", "stopped")
# Seconds that collectives have; fewer where they are to run out.
TIMEOUT, SOON = 20.0, 10.0


# In the item's process: rows, and the ranks of each


def memory(on: Device) -> Rows:
    for name in MEMORY:
        yield name, partial(_figures, on, "memory", name, cases=len(MEMORY))


def first_window(on: Device) -> Rows:
    for name in HOPS:
        yield name, partial(_figures, on, "first_window", name, cases=len(HOPS))


def endings(on: Device) -> Rows:
    for name in ENDINGS:
        yield name, partial(_ending, on, name)


def symmetric(on: Device) -> Rows:
    yield "the same losses with and without", partial(_figures, on, "symmetric", "")


def scaling(on: Device) -> Rows:
    counts = [count for count in (1, 2, 4, 8) if count <= _count(on)]
    for count in counts:
        yield (
            f"{count} devices",
            partial(_figures, on, "scaling", "", cases=len(counts), ranks=count),
        )


def recipe(on: Device) -> Rows:
    """Yield SageMaker SMP's own measurement: Llama 3.1 8B, 16,384 tokens on all
    devices, four samples at once."""
    for name, walk, published in (("bfloat16", "context", 2.03), ("FP8", "fp8", 3.05)):
        yield name, partial(_samples_per_second, on, walk, published)


def _samples_per_second(on: Device, walk: str, published: float) -> dict[str, Any]:
    from benchmarks.gpu.device import NotHere

    if on.rehearsal:
        options = ["--tiny", "--steps", "4"]
    else:
        on.needs(fp8=walk == "fp8")
        if _count(on) != 8:
            raise NotHere("eight devices")
        options = ["--batch", "4", "--steps", "12"]
    arguments = ["examples/recipes/llama_8b_16k.py", "--walk", walk, *options]
    ended = _run(arguments, _count(on), _limit(on, "recipe", 2))
    found = re.search(r"([\d.]+) samples/s at the end", ended.said)
    if found is None:
        raise RuntimeError(ended.without_figures)
    return {"samples/s": float(found[1]), "SMP published, on one p5": published}


@dataclass
class Ended:
    """The end of a world of ranks.

    Attributes:
        figures: rank 0's; None: it wrote none.
        statuses: exit statuses by rank; None: ended by this process, at the limit.
    """

    figures: dict[str, Any] | None
    statuses: list[int | None]
    said: str
    seconds: float

    @property
    def without_figures(self) -> str:
        return f"statuses {self.statuses} after {self.seconds:.0f} s: {' | '.join(self.said.strip().splitlines()[-4:])}"


def _limit(on: Device, function: str, cases: int) -> float:
    """Return the seconds that one of the cases has, of the item's: one that hangs
    leaves the others theirs."""
    [item] = (item for item in ITEMS if item.where == f"ranks:{function}")
    # A busy CPU is no device.
    return 0.95 * item.limit / cases * (10 if on.rehearsal else 1)


def _count(on: Device) -> int:
    if on.rehearsal:
        return 2
    return int(os.environ.get("RANKS") or torch.cuda.device_count())


def _figures(
    on: Device, item: str, name: str, cases: int = 1, ranks: int | None = None
) -> dict[str, Any]:
    ended = _started(on, item, name, cases, ranks)
    if ended.figures is None:
        raise RuntimeError(ended.without_figures)
    return ended.figures


def _ending(on: Device, name: str) -> dict[str, Any]:
    """Judge a world in which rank 1 goes another way, or is lost: all end, and somebody
    says why."""
    ended = _started(on, "endings", name, len(ENDINGS))
    named = {
        "apart": "rank 1: all_gather of 'right.0'",
        "killed": "rank 1 was lost",
        "stopped": "rank 1 was lost",
    }[name]
    others = [status for rank, status in enumerate(ended.statuses) if rank != 1]
    ok = named in ended.said and None not in others and 0 not in others
    return {
        "ok": ok,
        "named": named in ended.said,
        "statuses": ended.statuses,
        "until all ended": ended.seconds,
    }


def _started(
    on: Device, item: str, name: str, cases: int, ranks: int | None = None
) -> Ended:
    """Start the ranks of one of an item's cases and wait until they have ended, but a
    stopped one."""
    from benchmarks.gpu.device import NotHere

    count = ranks or _count(on)
    if count < 2 and item != "scaling":
        raise NotHere("a second device")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures")
        arguments = [
            __file__,
            item,
            name,
            "--device",
            on.device.type,
            "--out",
            str(out),
        ]
        ended = _run(
            arguments,
            count,
            _limit(on, item, cases),
            without=1 if name == "stopped" else None,
        )
        figures = json.loads(out.read_text()) if out.exists() else None
        return replace(ended, figures=figures)


def _run(
    arguments: list[str], count: int, limit: float, without: int | None = None
) -> Ended:
    """Run a program on ranks of this host, and wait for all of them but one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
    }
    # Of torch's watchdog over NCCL: the seconds until it ends a process, and whether it
    # does so where a device stops.
    watchdog = {
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    }
    environment = {**os.environ, **world, **watchdog, "MASTER_PORT": str(port)}
    began, children = time.perf_counter(), []
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            # In this process's group, which ends with its limit.
            for rank in range(count):
                own = {**environment, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
                command = [sys.executable, *arguments]
                children.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=own, stdout=said, stderr=said
                    )
                )
            _await_all(children, limit, without)
            statuses = [child.poll() for child in children]
        finally:
            for child in children:
                child.kill()  # a stopped one too
                child.wait()
        seconds = time.perf_counter() - began
        said.seek(0)
        return Ended(None, statuses, said.read(), seconds)


def _await_all(
    children: list[subprocess.Popen[bytes]], limit: float, without: int | None
) -> None:
    """Wait for all but one, to the limit at most."""
    deadline = time.monotonic() + limit
    waited = [child for rank, child in enumerate(children) if rank != without]
    while any(child.poll() is None for child in waited) and time.monotonic() < deadline:
        time.sleep(0.05)


# In a rank's process


@dataclass
class Here:
    """A rank's place and device."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_rehearsal(self) -> bool:
        return self.device.type == "cpu"

    @property
    def per_node(self) -> int:
        """The most that divide the ranks into two nodes or more; of one rank,
        itself."""
        return max(
            count
            for count in (1, *range(1, self.world // 2 + 1))
            if self.world % count == 0
        )

    def topology(self) -> Any:
        from smp_core.topology import Topology

        return Topology.uniform(self.world, self.per_node)

    def knobs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        degree = given["shard_degree"]
        return {**given, "shard_degree": self.per_node if degree == HALF else degree}

    def begin(self, *, with_cpu: bool = False, timeout: float = TIMEOUT) -> None:
        """Make the world: bound to the device as under Lightning, or with gloo beside
        for the CPU."""
        backend, bound = "nccl", None if with_cpu else self.device
        if with_cpu:
            backend = "cpu:gloo,cuda:nccl"
        if self.is_rehearsal:
            backend, bound = "gloo", None
        dist.init_process_group(
            backend, timeout=timedelta(seconds=timeout), device_id=bound
        )

    def taken_gib(self) -> float:
        """Return what is taken on the device beside torch's own allocator, GiB: the
        context and NCCL."""
        if self.is_rehearsal:
            return 0.0
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(self.device)
        return float((total - free - torch.cuda.memory_reserved(self.device)) / 2**30)


def _memory(here: Here, name: str) -> dict[str, Any]:
    """Show what communicators take, after each phase."""
    from benchmarks.gpu.training import small_llama
    from smp_core.config import SmpConfig
    from smp_core.entry import build_mesh, parallelize

    # Kernels of the model and of AdamW are loaded on a device once: that is of no
    # communicator.
    bare = small_llama(here.device)
    _two_steps(
        bare,
        torch.optim.AdamW(bare.parameters(), lr=1e-3),
        torch.nn.utils.clip_grad_norm_,
    )
    taken = {"context": here.taken_gib()}
    here.begin()
    taken["world"] = here.taken_gib()
    mesh, config = build_mesh(
        SmpConfig(**here.knobs(MEMORY[name])), here.topology(), here.device
    )
    taken["mesh"] = here.taken_gib()
    parallel = parallelize(small_llama(here.device), config, mesh=mesh)
    optimizer = torch.optim.AdamW(parallel.module.parameters(), lr=1e-3)
    parallel.prepare_optimizer(optimizer)
    taken["model"] = here.taken_gib()
    _two_steps(
        parallel.module, optimizer, lambda _, limit: parallel.clip_grad_norm_(limit)
    )
    taken["two steps"] = here.taken_gib()
    each = (taken["two steps"] - taken["context"]) / len(mesh.communicators)
    return {
        "GiB taken after": taken,
        "communicators": mesh.communicators,
        "GiB a communicator": each,
    }


def _two_steps(
    model: Any, optimizer: torch.optim.Optimizer, clip: Callable[[Any, float], Any]
) -> None:
    device = next(model.parameters()).device
    for _ in range(2):
        model(torch.ones(2, 17, dtype=torch.int64, device=device)).backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _first_window(here: Here, name: str) -> dict[str, Any]:
    """Let replicas take other ways in the very first window: what NCCL connects then,
    ranks must not wait for."""
    here.begin(with_cpu=True)
    knobs = here.knobs(HOPS[name])
    expected, found = (
        _branching(here, knobs, device) for device in (torch.device("cpu"), here.device)
    )
    off = torch.tensor(
        max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    )
    dist.all_reduce(off, op=dist.ReduceOp.MAX)
    off = off.item()
    return {"ok": off <= (LOOSE if name == "bfloat16" else EXACT), "losses off": off}


def _branching(
    here: Here, knobs: dict[str, Any], device: torch.device, steps: int = 3
) -> list[float]:
    """Train a model of which replicas call other blocks. Returns losses by step."""
    from smp_core.config import SmpConfig
    from smp_core.entry import parallelize
    from tests.core.branching import Branching, batch_of, loss_of

    torch.manual_seed(0)
    model = Branching().to(device)
    asked = SmpConfig(units=["Block"], **knobs)
    parallel = parallelize(model, asked, device=device, topology=here.topology())
    optimizer = torch.optim.AdamW(parallel.module.parameters(), lr=0.01)
    parallel.prepare_optimizer(optimizer)
    losses = []
    for step in range(steps):
        way = ("lr", "r")[(parallel.mesh.replicate_rank + step) % 2]
        loss = loss_of(parallel.module, batch_of(here.rank, step, 0).to(device), way)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _endings(here: Here, name: str) -> dict[str, Any]:
    """Lose rank 1 in the third step, or let it call other units than the ranks that
    share parameters with it."""
    from smp_core.config import SmpConfig
    from smp_core.entry import parallelize
    from smp_core.watch import rank_watch
    from tests.core.branching import Branching, batch_of, loss_of

    here.begin(timeout=SOON)
    rank_watch._LOOK_EVERY = 4  # two seconds instead of twenty
    rank_watch.watch_ranks(timedelta(seconds=SOON))
    torch.manual_seed(0)
    asked = SmpConfig(units=["Block"], shard_degree=WORLD)
    parallel = parallelize(
        Branching().to(here.device), asked, device=here.device, topology=here.topology()
    )
    for step in range(1000):
        way = "lr"
        if here.rank == 1 and step == 2:
            if name == "apart":
                way = "rl"
            else:
                os.kill(
                    os.getpid(), signal.SIGKILL if name == "killed" else signal.SIGSTOP
                )
        loss_of(
            parallel.module, batch_of(here.rank, step, 0).to(here.device), way
        ).backward()
    return {}


def _symmetric(here: Here, _: str) -> dict[str, Any]:
    """Train with NCCL's symmetric memory and without."""
    from benchmarks.gpu.training import train

    here.begin(with_cpu=True)
    found, seconds = [], []
    for on in (False, not here.is_rehearsal):
        knobs = {
            "shard_degree": here.per_node,
            "collectives": {"hierarchical": False, "symmetric_memory": on},
        }
        began = time.perf_counter()
        # In float32, which NVLink switches add up too: in another order, so that last
        # bits differ.
        found.append(
            train(
                knobs,
                here.device,
                dtype=torch.float32,
                topology=here.topology(),
                rank=here.rank,
            )
        )
        seconds.append(time.perf_counter() - began)
    losses, weights = found[0].off(found[1])
    return {
        "ok": losses <= ROUNDED,
        "losses off": losses,
        "weights off": weights,
        "seconds without, with": seconds,
    }


def _scaling(here: Here, _: str) -> dict[str, Any]:
    """Measure a step of 1.2 billion parameters beside bare FSDP2, by turns in the same
    processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from benchmarks.gpu.device import Device
    from benchmarks.gpu.steps import built

    here.begin(with_cpu=True)
    on, length = Device(here.device.type), 64 if here.is_rehearsal else 4096
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )

    def bare(model: Any) -> None:
        mesh = init_device_mesh(here.device.type, (here.world,))
        for unit in (*model.blocks, model):
            fully_shard(unit, mesh=mesh, mp_policy=policy)

    ours = {"shard_degree": WORLD, "param_dtype": "bfloat16", "reduce_dtype": "float32"}
    seconds: dict[str, list[float]] = {"FSDP2": [], "torch-smp": []}
    for _ in range(2):
        for side, knobs, shard in (("FSDP2", None, bare), ("torch-smp", ours, None)):
            with built(on, knobs, length, shard) as run:
                seconds[side].append(run.median_seconds())
    best = {side: min(each) for side, each in seconds.items()}
    rate = {f"tokens/s a device, {side}": length / each for side, each in best.items()}
    return {
        "seconds a step": best,
        **rate,
        "times FSDP2's": best["torch-smp"] / best["FSDP2"],
    }


CASES: dict[str, Callable[[Here, str], dict[str, Any]]] = {
    "memory": _memory,
    "first_window": _first_window,
    "endings": _endings,
    "symmetric": _symmetric,
    "scaling": _scaling,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("item", choices=CASES)
    parser.add_argument(
        "name",
        nargs="?",
        default="",
        help=f"memory: {[*MEMORY]}; first_window: {[*HOPS]}; {ENDINGS}",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--out", type=Path, help="rank 0's figures as JSON; default: printed"
    )
    flags = parser.parse_args()
    torch.set_num_threads(1)
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device(flags.device, *((local,) if flags.device == "cuda" else ()))
    if flags.device == "cuda":
        torch.cuda.set_device(device)
    figures = CASES[flags.item](
        Here(rank, int(os.environ["WORLD_SIZE"]), device), flags.name
    )
    dist.barrier()
    if rank == 0:
        text = json.dumps(figures)
        print(text) if flags.out is None else flags.out.write_text(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

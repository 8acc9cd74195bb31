"""Part 4: four NCCL ranks. On one device each poses as a host of its own (NCCL refuses
two ranks of one host on a device), and what they send goes through sockets: right or
wrong is the same as between hosts, speed is not. Where there are four devices each rank
has its own.

Each case is trained on the CPU by gloo, on the device by NCCL, and there once more with
every collective kept waiting by a random time on the stream that it is launched on: the
second has to equal the first, the third the second bit by bit. Layers are split, stages
made and sequences cut as in the tests of the core, whose models these are.
"""

from __future__ import annotations

import faulthandler
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.gpu.items import Rows

if TYPE_CHECKING:
    from benchmarks.gpu.device import Device  # it loads the core

WORLD, RANKS_PER_NODE = 4, 2
SHARDED: dict[str, dict[str, Any]] = {
    "nodes": {"shard_degree": 2},
    "two stages": {"shard_degree": 4},
    "one stage": {"shard_degree": 4, "collectives": {"hierarchical": False}},
    "bfloat16 parameters": {"shard_degree": 2, "param_dtype": "bfloat16"},
    "bfloat16 between replicas": {"shard_degree": 2, "compression": "bf16"},
    "int8 both ways": {"shard_degree": 4, "compression": "int8"},
    "int4 with feedback": {
        "shard_degree": 2,
        "compression": {"reduce": "int4", "error_feedback": True},
    },
    "states over the world": {"shard_degree": 2, "optimizer_shard": "world"},
    "plain replicas, states over the world": {
        "shard_degree": 1,
        "optimizer_shard": "world",
    },
    "a secondary shard": {"shard_degree": 4, "reshard_after_forward": 2},
    "once a step": {"shard_degree": 4, "keep_between_micro_batches": "gradients"},
    "gathered ahead": {"shard_degree": 2, "collectives": {"forward_prefetch": 2}},
    "reductions apart": {
        "shard_degree": 2,
        "collectives": {
            "separate_reduce_scatter_group": True,
            "reduce_scatter_buffers": 2,
        },
    },
}
# float64 on both, but sums and products in another order; codes are those of float32
# and may round the other way.
EXACT, LOOSE = 1e-7, 0.02
ROUGH = (
    "bfloat16 parameters",
    "bfloat16 between replicas",
    "int8 both ways",
    "int4 with feedback",
)
ACROSS = {"across_nodes": True}
# Of tests/core: kind of model and what its layout is like.
TENSOR: dict[str, dict[str, Any]] = {
    "tensor 2 x shard 2": {"kind": "llama", "shard": 2},
    "tensor 2, fused weights": {"kind": "gpt2"},
    "tensor 4, heads shared by ranks": {
        "kind": "llama",
        "tensor": 4,
        "knobs": (("tensor_parallel", ACROSS),),
    },
    "tensor 2, whole tokens": {"kind": "llama", "sequence": False},
    "tensor 2, products in pieces": {
        "kind": "llama",
        "knobs": (("tensor_parallel", {"overlap": "pieces"}),),
    },
}
PIPELINE: dict[str, dict[str, Any]] = {
    "stages 2 x shard 2": {"kind": "llama_tied", "shard": 2},
    "stages 4": {"kind": "llama_deep", "stages": 4, "micro_batches": 4},
    "stages 2, interleaved": {
        "kind": "llama_deep",
        "micro_batches": 4,
        "schedule": "interleaved:2",
    },
    "stages 2 x tensor 2": {"kind": "llama", "knobs": (("tensor_parallel_degree", 2),)},
    "stages 2 x context 2": {
        "kind": "llama",
        "shard": 2,
        "knobs": (("context_parallel_degree", 2),),
    },
}
EXPERTS: dict[str, dict[str, Any]] = {
    "experts 2 x shard 2": {"kind": "Mixtral"},
    "experts 4, over both nodes": {"kind": "Qwen3Moe", "expert": 4},
    "experts 2 x replicas 2": {"kind": "own experts", "shard": 2},
}
REHEARSED = (
    "nodes",
    "experts 2 x shard 2",
    "tensor 2 x shard 2",
    "stages 2 x context 2",
)
HOST = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def replicas(on: Device) -> Rows:
    return _rows(on, SHARDED)


def axes(on: Device) -> Rows:
    return _rows(on, {**PIPELINE, **TENSOR})


def experts(on: Device) -> Rows:
    return _rows(on, EXPERTS)


def _rows(on: Device, cases: Iterable[str]) -> Rows:
    """Yield the cases, which run in one world."""
    names = tuple(name for name in cases if not on.rehearsal or name in REHEARSED)
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(
            _rank, (folder, on.device.type, names), nprocs=WORLD, join=False
        )
        for name in names:
            yield name, partial(_result, ranks, Path(folder, name), name)
        while not ranks.join():
            pass


def _result(ranks: Any, path: Path, name: str) -> dict[str, Any]:
    """Wait for rank 0's figures of a case; a rank that fails raises here."""
    while not path.exists():
        if ranks.join(timeout=0.1) and not path.exists():
            raise RuntimeError(f"the ranks ended before {name}")
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def _rank(rank: int, folder: str, kind: str, names: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["SMP_RANKS_PER_NODE"] = str(RANKS_PER_NODE)
    apart = kind == "cuda" and torch.cuda.device_count() >= WORLD
    if not apart:
        os.environ.update({**HOST, "NCCL_HOSTID": f"host-{rank}"})
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(WORLD),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(WORLD),
    )
    delays = _Delays()
    delays.put_in()
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", rank if apart else 0)
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    for name in names:
        found: dict[str, Any] = {}
        # Where a rank hangs, for who runs the item by itself.
        faulthandler.dump_traceback_later(100)
        try:
            found = _compared(name, device, rank, delays)
        except Exception as error:
            # The other ranks meet it too, or wait in vain: the item's limit ends that.
            found = {"ok": False, "failed": f"{type(error).__name__}: {error}"[:300]}
        delays.on = False
        if rank == 0:
            torch.save(found, Path(folder, f"{name}.part"))
            Path(folder, f"{name}.part").rename(Path(folder, name))
    dist.destroy_process_group()


def _compared(
    name: str, device: torch.device, rank: int, delays: _Delays
) -> dict[str, Any]:
    train = _training_of(name, rank)
    on_cpu = train(torch.device("cpu"))
    began = time.perf_counter()
    plain = train(device)
    seconds = time.perf_counter() - began
    delays.on = device.type == "cuda"
    delayed = train(device)
    limit = LOOSE if name in ROUGH else EXACT
    losses = max(abs(a - b) / abs(b) for a, b in zip(plain[0], on_cpu[0], strict=True))
    weights = max(
        ((value - on_cpu[1][key]).abs().max() / on_cpu[1][key].abs().max()).item()
        for key, value in plain[1].items()
    )
    same = all(torch.equal(value, delayed[1][key]) for key, value in plain[1].items())
    ok = losses <= limit and same
    return {
        "ok": ok,
        "losses off": losses,
        "parameters off": weights,
        "equal delayed": same,
        "trained in": seconds,
    }


Trained = tuple[list[float], dict[str, torch.Tensor]]


def _training_of(name: str, rank: int) -> Callable[[torch.device], Trained]:
    """Return what trains a case on a device: losses by step, and parameters at the end
    on the CPU."""
    # Only now: the core takes functions of torch.distributed as they are when it is
    # imported.
    from benchmarks.gpu.training import train
    from smp_core.topology import Topology
    from tests.core.expert_parallel import cases as expert_cases
    from tests.core.pipeline import cases as pipeline_cases
    from tests.core.tensor_parallel import model_cases

    def sharded(device: torch.device) -> Trained:
        topology = Topology.uniform(WORLD, RANKS_PER_NODE)
        found = train(SHARDED[name], device, topology=topology, rank=rank)
        return found.losses, found.parameters

    def split(device: torch.device) -> Trained:
        found = together(case, device=device)
        return found.losses, {key: value.cpu() for key, value in found.weights.items()}

    if name in SHARDED:
        return sharded
    together: Callable[..., Any] = model_cases.together
    case: Any
    if name in PIPELINE:
        together, case = pipeline_cases.together, pipeline_cases.Case(**PIPELINE[name])
    elif name in TENSOR:
        case = model_cases.Case(**TENSOR[name])
    else:
        case = expert_cases.Case(**EXPERTS[name])
    return split


class _Delays:
    """Kernels that do nothing for a random time, before and after every collective."""

    def __init__(self) -> None:
        self.on = False
        self._random = random.Random(os.getpid())

    def put_in(self) -> None:
        for name in (
            "all_reduce",
            "all_to_all_single",
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "all_gather_single",
            "reduce_scatter_single",
        ):
            if hasattr(dist, name):
                setattr(dist, name, self._around(getattr(dist, name)))

    def _around(self, collective: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self._wait()
            work = collective(*args, **kwargs)
            self._wait()
            return work

        return called

    def _wait(self) -> None:
        if self.on:
            torch.cuda._sleep(int(self._random.random() * 3e6))

"""Part 4: four ranks on the one device. gloo carries CUDA tensors by the collectives that NCCL would be asked for.

Each case is trained on the CPU, on the device, and on the device once more while every collective is kept waiting by a
random time on the stream that it is launched on: the second has to equal the first, the third the second bit by bit.
"""

from __future__ import annotations

import os
import random
import tempfile
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
KNOBS: dict[str, dict[str, Any]] = {
    "nodes": {"shard_degree": 2},
    "two stages": {"shard_degree": 4},
    "one stage": {"shard_degree": 4, "collectives": {"hierarchical": False}},
    "bfloat16 parameters": {"shard_degree": 2, "param_dtype": "bfloat16"},
    "bfloat16 between replicas": {"shard_degree": 2, "compression": "bf16"},
    "int8 both ways": {"shard_degree": 4, "compression": "int8"},
    "int4 with feedback": {"shard_degree": 2, "compression": {"reduce": "int4", "error_feedback": True}},
    "states over the world": {"shard_degree": 2, "optimizer_shard": "world"},
    "plain replicas, states over the world": {"shard_degree": 1, "optimizer_shard": "world"},
    "a secondary shard": {"shard_degree": 4, "reshard_after_forward": 2},
    "once a step": {"shard_degree": 4, "keep_between_micro_batches": "gradients"},
    "gathered ahead": {"shard_degree": 2, "collectives": {"forward_prefetch": 2}},
}
# float64 on both, but sums and products in another order; codes are those of float32 and may round the other way.
EXACT, LOOSE = 1e-7, 0.02
ROUGH = ("bfloat16 parameters", "bfloat16 between replicas", "int8 both ways", "int4 with feedback")
REHEARSED = ("nodes", "int8 both ways")


def rows(on: Device) -> Rows:
    """Yield all cases, which run in one world: it takes longer to start than to train."""
    names = REHEARSED if on.rehearsal else tuple(KNOBS)
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(_rank, (folder, on.device.type, names), nprocs=WORLD, join=False)
        for name in names:
            yield name, partial(result_of, ranks, Path(folder, name), name)
        while not ranks.join():
            pass


def result_of(ranks: Any, path: Path, name: str) -> dict[str, Any]:
    """Wait for rank 0's figures of a case; a rank that fails raises here."""
    while not path.exists():
        if ranks.join(timeout=0.1) and not path.exists():
            raise RuntimeError(f"the ranks ended before {name}")
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def _rank(rank: int, folder: str, kind: str, names: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    delays = Delays()
    delays.put_in()
    # Only now: the core takes functions of torch.distributed as they are when it is imported.
    from benchmarks.gpu.training import train
    from smp_core.topology import Topology

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(WORLD))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    topology = Topology.uniform(WORLD, RANKS_PER_NODE)
    device = torch.device(kind, *((0,) if kind == "cuda" else ()))
    for name in names:
        found: dict[str, Any] = {}
        try:
            on_cpu, plain = (
                train(KNOBS[name], where, topology=topology, rank=rank) for where in (torch.device("cpu"), device)
            )
            delays.on = kind == "cuda"
            delayed = train(KNOBS[name], device, topology=topology, rank=rank)
            losses, parameters = plain.off(on_cpu)
            same = all(torch.equal(value, delayed.parameters[key]) for key, value in plain.parameters.items())
            right = losses <= (LOOSE if name in ROUGH else EXACT)
            found = {"ok": right and same, "losses off": losses, "parameters off": parameters, "equal delayed": same}
        except Exception as error:  # the other ranks meet it too, or wait in vain: the item's limit ends that
            found = {"ok": False, "failed": f"{type(error).__name__}: {error}"[:300]}
        delays.on = False
        if rank == 0:
            torch.save(found, Path(folder, f"{name}.part"))
            Path(folder, f"{name}.part").rename(Path(folder, name))
    dist.destroy_process_group()


class Delays:
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

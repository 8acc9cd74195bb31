#!/usr/bin/env python3
"""Step time, bytes and losses of data-parallel schemes on one small transformer. A rank
program; runs under netlab:

    netlab.py run --delay 1ms -- python schemes.py --schemes fsdp-ring,ours-world
    --micro 1

All schemes see the same initial weights and the same data. They take turns, one warm-up
step of one micro-batch and one measured step a turn, ``--rounds`` turns, so that what
disturbs the machine disturbs all. Rank 0 prints one line of JSON.

    ddp, fsdp, fsdp-ring, hsdp, hsdp-two-hop    torch's own; ring: with the traffic of NCCL's reduce-scatter (gloo's is
                                                a whole all-reduce); two-hop: replicas are reduced in the last
                                                micro-batch only
    alone                                       the same steps without communication: what the arithmetic takes
    ds3, mics                                   DeepSpeed ZeRO-3 and MiCS (in the node); need DeepSpeed installed
    ours-...                                    this project: sharded over the world, over the node, or not at all;
                                                tensor: layers split over two ranks of a node, between nodes replicas,
                                                or world: shards;
                                                pipeline: each node a stage of the blocks, sharded or replicated in it

``--compute-ms`` sleeps that long in each block's forward and twice that in its backward
instead of computing much: overlap shows on few cores.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import torch
import torch.distributed as dist
from deepspeed_run import DeepSpeedRun, start_deepspeed
from lab_model import LENGTH, RATE, WIDTH, Block, Model, batch
from netlab import counters
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

KEPT = {"keep_between_micro_batches": "parameters"}
ONCE = {"keep_between_micro_batches": "gradients"}
ROLES = {
    "*.qkv": "column:3",
    "*.up": "column",
    **dict.fromkeys(("*.out", "*.down"), "row"),
    "embed": "vocabulary",
    "head": "column_gather",
}
# Attention is a part of the block's own forward, whose tokens are not split then. Bytes
# are the same.
IN_NODE = {
    "tensor_parallel_degree": 2,
    "tensor_parallel": {"plan": ROLES, "sequence_parallel": False},
}
OURS: dict[str, dict[str, Any]] = {
    "ours-world": {"shard_degree": "world"},
    "ours-world-int8": {"shard_degree": "world", "compression": {"gather": "int8"}},
    "ours-world-int8-both": {"shard_degree": "world", "compression": "int8"},
    "ours-world-secondary": {"shard_degree": "world", "reshard_after_forward": "node"},
    "ours-world-once": {"shard_degree": "world", **ONCE},
    "ours-node": {"shard_degree": "node"},
    "ours-node-kept": {"shard_degree": "node", **KEPT},
    "ours-node-once": {"shard_degree": "node", **ONCE},
    "ours-node-bf16": {"shard_degree": "node", "compression": "bf16"},
    "ours-node-int8": {"shard_degree": "node", "compression": {"reduce": "int8"}},
    "ours-node-optimizer": {"shard_degree": "node", "optimizer_shard": "world"},
    "ours-replicas": {"shard_degree": 1},
    "ours-tensor": {"shard_degree": 1, **IN_NODE},
    "ours-tensor-world": {"shard_degree": "world", **IN_NODE},
    "ours-pipeline": {"shard_degree": "node", **KEPT},
    "ours-pipeline-replicas": {"shard_degree": 1},
}
PIPELINE = "ours-pipeline"
ALONE = "alone"
PEERS = ("ddp", "fsdp", "fsdp-ring", "hsdp", "hsdp-two-hop")
DEEPSPEED = ("ds3", "mics")
EXACT = (*PEERS, *DEEPSPEED, *(n for n in OURS if "int8" not in n and "bf16" not in n))
SETTLE = 0.03


class RingReduceScatter:
    """The flat ring that NCCL runs: one chunk to the next rank, g - 1 times. For FSDP2
    on gloo, which has none."""

    def allocate(
        self, size: Any, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Any,
        input_tensor: Any,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        from smp_core.comm.exchange import exchange

        ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
        n = len(ranks)
        chunks = input_tensor.view(n, -1)
        total, got = chunks[(me - 1) % n].clone(), torch.empty_like(chunks[0])
        for step in range(n - 1):
            exchange(
                [(total, ranks[(me + 1) % n])], [(got, ranks[(me - 1) % n])], group
            )
            total, got = got.add_(chunks[(me - 2 - step) % n]), total
        output_tensor.copy_(total)


def stages_of(micro_batches: int) -> dict[str, Any]:
    """Return the knobs of one stage on each node."""
    stages = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    return {
        "pipeline_parallel_degree": stages,
        "pipeline": {"microbatches": micro_batches},
    }


class Run:
    """One scheme: ``step(number, micro_batches) -> this rank's mean loss``."""

    def __init__(
        self,
        scheme: str,
        micro_batches: int,
        param_dtype: str | None,
        compute: float,
        width: int,
    ) -> None:
        self.scheme, self.rank, self.metered = scheme, dist.get_rank(), None
        torch.manual_seed(0)
        self.before: Callable[[bool], Any] = contextlib.nullcontext
        self.after: Callable[[], None] = int  # nothing
        model: Any = Model(compute, width)
        self.read = [self.rank]
        if scheme in OURS:
            # Here and not above: DeepSpeed's environment runs this file too, without
            # what smp_core needs.
            from smp_core.config import SmpConfig
            from smp_core.entry import parallelize

            knobs = {
                **OURS[scheme],
                **(stages_of(micro_batches) if scheme.startswith(PIPELINE) else {}),
            }
            config = SmpConfig(
                **knobs, param_dtype=param_dtype, collectives={"forward_prefetch": 1}
            )
            self.parallel = parallel = parallelize(model, config)
            mesh = parallel.mesh
            # Ranks that hold parts of one model read the samples of all of them.
            sharing = mesh.tensor_degree * mesh.pipeline_degree
            self.read = [mesh.data_rank * sharing + place for place in range(sharing)]
            self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            parallel.prepare_optimizer(self.optimizer)
            self.before = lambda last: parallel.window.accumulate(not last)
            self.metered, self.after = parallel.meter, parallel.meter.close_step
        elif scheme == ALONE:
            model.to(getattr(torch, param_dtype or "float32"))
            self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        elif scheme == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
            self.before = lambda last: (
                contextlib.nullcontext() if last else self.model.no_sync()
            )
            self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        else:
            world, k = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
            shape = (world // k, k) if scheme.startswith("hsdp") else (world,)
            names = ("replicate", "shard")[-len(shape) :]
            half = torch.bfloat16 if param_dtype == "bfloat16" else None
            policy = MixedPrecisionPolicy(
                param_dtype=half, reduce_dtype=torch.float32 if half else None
            )
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            for module in [*model.blocks, model]:
                fully_shard(module, mesh=mesh, mp_policy=policy)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no average
                if scheme == "fsdp-ring":
                    module.set_custom_reduce_scatter(RingReduceScatter())
            if scheme == "hsdp-two-hop":
                self.before = self._two_hop
            self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        self.model = model

    def _two_hop(self, last: bool) -> Any:
        self.model.set_requires_all_reduce(last)
        return contextlib.nullcontext()

    def step(self, number: int, micro_batches: int) -> float:
        if self.scheme.startswith(PIPELINE):
            total = self.in_stages(number, micro_batches)
        else:
            total = self.one_after_the_other(number, micro_batches)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after()
        return total

    def in_stages(self, number: int, micro_batches: int) -> float:
        pipeline, window = self.parallel.pipeline, self.parallel.window
        parts = []
        for micro in range(micro_batches):
            rows = [batch(number, micro, rank) for rank in self.read]
            parts.append(torch.cat(rows))
        calls = [functools.partial(self.model, part) for part in parts]
        losses = pipeline.train(
            calls, lambda loss: loss, 1 / micro_batches, torch.cat(parts)
        )
        window.close()
        return float(pipeline.share(torch.stack(losses).mean() if losses else None))

    def one_after_the_other(self, number: int, micro_batches: int) -> float:
        total = 0.0
        for micro in range(micro_batches):
            with self.before(micro == micro_batches - 1):
                loss = self.model(
                    torch.cat([batch(number, micro, rank) for rank in self.read])
                )
                (loss / micro_batches).backward()
            total += loss.item() / micro_batches
        return total


def lower_bound(
    scheme: str, nodes: int, k: int, micro_batches: int, half: bool, width: int
) -> float:
    """Return the bytes that have to leave a node per optimizer step in the scheme, with
    float32 sums (DeepSpeed: in the dtype of the parameters): every unit's gathers and
    reductions, each byte once over the link; peers by the ring over ranks in order."""
    model = Model(width=width)
    if scheme.startswith(PIPELINE):
        # Each stage sends its activations on, and their gradients back, but the first
        # and the last, which do one.
        activations = k * nodes * LENGTH * width * (2.0 if half else 4.0)
        return micro_batches * activations * (1 if nodes == 2 else 2)
    m = sum(p.numel() for p in model.parameters()) * 4.0
    root = m - sum(p.numel() for p in model.blocks.parameters()) * 4.0
    world, gathered = nodes * k, (root + 2 * (m - root)) * (0.5 if half else 1.0)
    if scheme == ALONE:
        return 0.0
    code = (1 + 4 / 256) / 4
    across = (nodes - 1) / nodes
    if scheme in ("ddp", "fsdp", "fsdp-ring"):
        ring = (world - 1) / world
        if scheme == "ddp":
            return 2 * ring * m
        return micro_batches * ring * (gathered + m * (2 if scheme == "fsdp" else 1))
    if scheme in DEEPSPEED and half:
        m /= 2
    if scheme == "ds3":
        return micro_batches * (world - 1) / world * 4 * m
    if scheme in ("hsdp", "hsdp-two-hop", "mics"):
        times = 1 if scheme != "hsdp" else micro_batches
        return 2 * across * m * times
    if scheme.startswith("ours-world") or scheme == "ours-tensor-world":
        gather = reduction = 1.0
        if "int8" in scheme:
            gather = code * (2 if half else 1)
        if "both" in scheme:
            reduction = code
        if "secondary" in scheme or "once" in scheme:
            gathered = m * (0.5 if half else 1.0)
        if "once" in scheme:
            micro_batches = 1
        return micro_batches * across * (gathered * gather + m * reduction)
    share = 1.0
    if "bf16" in scheme:
        share = 0.5
    elif "int8" in scheme:
        share = code
    return 2 * across * m * share


def calibrate(k: int) -> dict[str, float]:
    """Measure what the machine does inside a node, for a block's parameters in float32
    and with all ranks at work, as bytes of the block per second. The links inside a
    node are loopback here, and share the cores with everything else.

    Returns:
        inside: what a rank sends to the others of its node (shards); copying: into
            memory just allocated;
        coding: of the world's int8 gathers, a rank's shard compressed and its part of
            the block decompressed.
    """
    from smp_core.codecs.codec import codec
    from smp_core.comm.exchange import exchange

    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(range(first, first + k)) for first in range(0, world, k)]
    group, first = groups[rank // k], rank // k * k
    n = sum(p.numel() for p in Block(0.0, WIDTH).parameters())
    block, mine = torch.zeros(n), torch.zeros(n // k)
    others = [other for other in range(first, first + k) if other != rank]
    theirs = [torch.empty_like(mine) for _ in others]
    int8, shard = codec("int8"), torch.zeros(n // world)
    payload = torch.empty(int8.size(len(shard)), dtype=torch.uint8)
    payloads = payload.expand(world // k, -1).contiguous()
    part = torch.empty(world // k, len(shard))

    def code() -> None:
        int8.encode(shard, payload)
        int8.decode(payloads, part)

    def seconds(work: Callable[[], Any], times: int = 5) -> float:
        taken = []
        for _ in range(7):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(times):
                work()
            dist.barrier()
            taken.append((time.perf_counter() - began) / times)
        return statistics.median(taken)

    def send() -> None:
        exchange(
            [(mine, other) for other in others],
            list(zip(theirs, others, strict=True)),
            group,
        )

    return {
        "inside": len(others) * mine.nbytes / seconds(send, 1) if others else 0.0,
        "copying": block.nbytes / seconds(block.clone),
        "coding": block.nbytes / seconds(code),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemes", required=True, help="separated by commas")
    parser.add_argument(
        "--micro", type=int, default=1, help="micro-batches of an optimizer step"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--param-dtype", choices=["float32", "bfloat16"], default="float32"
    )
    parser.add_argument("--compute-ms", type=float, default=0.0)
    parser.add_argument(
        "--width", type=int, default=WIDTH, help="of the transformer; not for DeepSpeed"
    )
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    names, k = asked.schemes.split(","), int(os.environ["LOCAL_WORLD_SIZE"])
    half = asked.param_dtype == "bfloat16"
    with_deepspeed = any(name in DEEPSPEED for name in names)
    if with_deepspeed:
        start_deepspeed()
    else:
        dist.init_process_group("gloo")
    watch = dist.new_group()  # measuring never touches the schemes' groups
    runs: dict[str, Any] = {}
    for name in names:
        if name in DEEPSPEED:
            runs[name] = DeepSpeedRun(name, asked.micro, half)
        else:
            dtype = "bfloat16" if half else None
            runs[name] = Run(
                name, asked.micro, dtype, asked.compute_ms / 1e3, asked.width
            )
    rank, world = dist.get_rank(), dist.get_world_size()
    machine = calibrate(k) if ALONE in names else {}
    found: dict[str, dict[str, Any]] = {
        n: {"seconds": [], "node_bytes": [], "metered": [], "losses": []} for n in names
    }
    for turn in range(asked.rounds):
        for name, run in runs.items():
            run.step(
                2 * turn,
                asked.micro if name in DEEPSPEED or name.startswith(PIPELINE) else 1,
            )
            dist.barrier(group=watch)
            time.sleep(SETTLE)
            sent = counters("eth0")["tx_bytes"]
            dist.barrier(group=watch)
            began = time.perf_counter()
            loss = run.step(2 * turn + 1, asked.micro)
            dist.barrier(group=watch)
            seconds = time.perf_counter() - began
            time.sleep(SETTLE)
            metered = (
                run.metered.per_step()["inter_bytes"]
                if run.metered is not None
                else 0.0
            )
            row = torch.tensor(
                [loss, counters("eth0")["tx_bytes"] - sent, metered],
                dtype=torch.float64,
            )
            rows = [torch.empty_like(row) for _ in range(world)]
            dist.all_gather(rows, row, group=watch)
            nodes = range(world // k)
            found[name]["seconds"].append(seconds)
            found[name]["losses"].append(
                statistics.fmean(float(each[0]) for each in rows)
            )
            found[name]["node_bytes"].append(
                max(float(rows[node * k][1]) for node in nodes)
            )
            metered = [float(row[2]) for row in rows]
            of_nodes = [sum(metered[node * k : (node + 1) * k]) for node in nodes]
            found[name]["metered"].append(max(of_nodes))
    if rank == 0:
        for name in names:
            bound = (
                lower_bound(name, world // k, k, asked.micro, half, asked.width)
                if world > k
                else 0.0
            )
            found[name]["lower_bound"] = bound
            if name == ALONE:
                found[name].update(machine)
        print(json.dumps(found), flush=True)
    dist.barrier(group=watch)
    sys.stdout.flush()
    os._exit(0)  # gloo's teardown sometimes aborts


if __name__ == "__main__":
    main()

"""Part 1, in one process with NCCL: every knob against the same steps on the CPU,
float16, resume, "auto"."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device import Device
from benchmarks.gpu.items import Rows
from benchmarks.gpu.training import STEPS, batches, small_llama, train
from smp_core.checkpoint import AsyncCheckpointer, load_checkpoint, read_per_rank
from smp_core.checkpoint.optimizers import (
    load_named_optimizer_state,
    named_optimizer_state,
)
from smp_core.checkpoint.random_state import random_state, set_random_state
from smp_core.cluster.mesh import _Groups
from smp_core.comm import exchange
from smp_core.config import SmpConfig
from smp_core.entry import build_mesh, parallelize
from smp_core.plan.memory import estimate
from smp_core.plan.shapes import Cluster
from smp_core.topology import Topology

# Units of FSDP2 exist with one rank where parameters are gathered in another dtype;
# float32 keeps the comparison tight.
UNITS: dict[str, Any] = {"shard_degree": 1, "param_dtype": "float32"}
OFFLOADED = {"checkpoint": "full", "offload": True, "offload_min_bytes": 0}
KNOBS: dict[str, dict[str, Any]] = {
    "no units": {"shard_degree": 1},
    "units": UNITS,
    "bfloat16": {**UNITS, "param_dtype": "bfloat16"},
    "bfloat16 reductions": {**UNITS, "reduce_dtype": "bfloat16"},
    "kept until backward": {**UNITS, "reshard_after_forward": False},
    "once a step": {**UNITS, "keep_between_micro_batches": "gradients"},
    "gathered ahead": {
        **UNITS,
        "collectives": {"forward_prefetch": 2, "backward_prefetch": 2},
    },
    "non-finite steps skipped": {**UNITS, "on_nonfinite_grad_norm": "skip"},
    "FP8": {**UNITS, "param_dtype": "bfloat16", "fp8": True},
    "recomputed": {**UNITS, "activations": "full"},
    "selective": {**UNITS, "activations": "selective"},
    **{
        f"offloaded, horizon {h}": {
            **UNITS,
            "activations": {**OFFLOADED, "loading_horizon": h},
        }
        for h in (1, 2, 4)
    },
    "optimizer on the host": {**UNITS, "state_offload": "optimizer"},
    "everything on the host": {**UNITS, "state_offload": "all"},
    "more buffers": {**UNITS, "collectives": {"reduce_scatter_buffers": 2}},
    "reductions apart": {
        **UNITS,
        "collectives": {"separate_reduce_scatter_group": True},
    },
    "symmetric memory": {**UNITS, "collectives": {"symmetric_memory": True}},
}
# Waits of the host for the device in a step; by default none.
WAITS = {"non-finite steps skipped": 1, "FP8": 2}
# Largest relative difference of losses: what is computed in half precision, or in FP8.
LOOSE = {"bfloat16": 0.01, "bfloat16 reductions": 0.01, "FP8": 0.05}
EXACT = 1e-4
# CUDA only, the first three with torch >= 2.13: refused elsewhere, which is an answer.
MAY_BE_REFUSED = ("more buffers", "reductions apart", "symmetric memory")
# These copy between host and device and wait for it, as they say.
HOST_STEPS = ("optimizer on the host", "everything on the host")


def knobs(on: Device) -> Rows:
    with on.one_rank():
        for name in KNOBS:
            yield name, partial(_against_cpu, on, name)
        yield "compiled blocks", partial(_against_cpu, on, "units", compiled=True)


def split_groups(on: Device) -> Rows:
    """Yield what a process that had another world before cannot do: torch 2.11 crashes
    in its next split_group."""
    with on.one_rank(bound=True):
        yield "groups by one split, stages in one launch", partial(_one_launch, on)


def _one_launch(on: Device) -> dict[str, Any]:
    """Measure what NCCL is asked in no other item: groups that are split off, and
    several collectives in one launch."""
    mesh, _ = build_mesh(SmpConfig(shard_degree=1), Topology.uniform(1, 1), on.device)
    groups = _Groups(mesh.rank, on.device)
    group = groups.make([(0,)])
    groups.connect()
    inputs = [torch.randn(1000 + size, device=on.device) for size in range(3)]
    gathered, reduced = ([torch.zeros_like(each) for each in inputs] for _ in range(2))
    exchange.gather_each(gathered, inputs, group)
    exchange.reduce_each(reduced, inputs, group)
    own = inputs[0].clone()
    exchange.sum_rows(own, own[None], group)  # in place
    pairs = [
        *zip(gathered, inputs, strict=True),
        *zip(reduced, inputs, strict=True),
        (own, inputs[0]),
    ]
    return {
        "ok": all(torch.equal(seen, right) for seen, right in pairs),
        "split": groups._splits,
    }


def _against_cpu(on: Device, name: str, compiled: bool = False) -> dict[str, Any]:
    if name in MAY_BE_REFUSED:
        on.needs()
    try:
        seen = train(KNOBS[name], on.device, compiled=compiled)
    except ValueError as refused:
        if name in MAY_BE_REFUSED:
            return {"refused": str(refused).splitlines()[0]}
        raise
    on_cpu = KNOBS["units" if name in MAY_BE_REFUSED else name]
    losses, parameters = seen.off(train(on_cpu, torch.device("cpu")))
    waits = sum(seen.waits.values()) / (STEPS - 1)
    ok = losses <= LOOSE.get(name, EXACT)
    if name not in HOST_STEPS and not compiled:
        ok = ok and waits <= WAITS.get(name, 0)
    lines = {line: count / (STEPS - 1) for line, count in seen.waits.items()}
    return {
        "ok": ok,
        "losses off": losses,
        "parameters off": parameters,
        "waits a step": waits,
        "by line": lines,
    }


def float16(on: Device) -> Rows:
    with on.one_rank():
        for start in (2.0**10, 2.0**40):
            yield f"scale from {start:g}", partial(_scaled, on, start)


def _scaled(on: Device, start: float) -> dict[str, Any]:
    """Check that a scale that overflows falls, and that steps that overflow change
    nothing."""
    seen = train(
        {"shard_degree": 1, "param_dtype": "float16"},
        on.device,
        dtype=torch.float32,
        scale=start,
    )
    assert seen.scale is not None
    overflows = start > 2.0**30
    finite = all(bool(value.isfinite().all()) for value in seen.parameters.values())
    ok = finite and (
        seen.scale < start if overflows else seen.losses[-1] < seen.losses[0]
    )
    waits = sum(seen.waits.values()) / (STEPS - 1)
    # torch's scaler asks once for the optimizer; more would be ours.
    return {
        "ok": ok and waits <= 1,
        "losses": seen.losses,
        "scale at the end": seen.scale,
        "waits a step": waits,
    }


def resume(on: Device) -> Rows:
    with on.one_rank():
        for name in ("no units", "units"):
            yield name, partial(_resumed, on, KNOBS[name])


def _resumed(on: Device, knobs: dict[str, Any]) -> dict[str, Any]:
    """Compare steps with dropout after an asynchronous save, and again after a resume:
    the same bits."""
    steps = batches(on.device)

    def built() -> tuple[Any, torch.optim.Optimizer]:
        parallel = parallelize(
            small_llama(on.device, torch.float32, dropout=0.2),
            SmpConfig(**knobs),
            device=on.device,
        )
        optimizer = torch.optim.AdamW(parallel.module.parameters(), lr=1e-3)
        parallel.prepare_optimizer(optimizer)
        return parallel, optimizer

    def go_on(
        parallel: Any, optimizer: torch.optim.Optimizer, some: list[list[torch.Tensor]]
    ) -> list[float]:
        losses = []
        for tokens, *_ in some:
            loss = parallel.module(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses).tolist()

    parallel, optimizer = built()
    go_on(parallel, optimizer, steps[:2])
    with tempfile.TemporaryDirectory() as folder:
        path, saver = Path(folder, "saved"), AsyncCheckpointer()
        state = {
            "model": parallel.model_state(),
            "optimizer": named_optimizer_state(parallel.module, optimizer),
            "random": random_state(),
        }
        saver.save(
            path,
            {key: state[key] for key in ("model", "optimizer")},
            per_rank=state["random"],
        )
        stalled = saver.stall_seconds
        expected = go_on(parallel, optimizer, steps[2:])  # while it is being written
        saver.close()
        parallel, optimizer = built()
        model_state = {"model": parallel.model_state()}
        load_checkpoint(path, model_state)
        parallel.take_model_state(model_state["model"])
        load_named_optimizer_state(path, ("optimizer",), parallel.module, optimizer)
        set_random_state(read_per_rank(path)[0])
        seen = go_on(parallel, optimizer, steps[2:])
    return {
        "ok": seen == expected,
        "losses": seen,
        "expected": expected,
        "stalled seconds": stalled,
    }


def auto(on: Device) -> Rows:
    with on.one_rank():
        yield "device memory", partial(_device_memory, on)
        yield "model states against the plan", partial(_states, on)


def _device_memory(on: Device) -> dict[str, Any]:
    asked = Cluster.observer(Topology.uniform(1, 1), on.device)().device_memory
    if on.rehearsal:
        return {"ok": asked is None}
    total = torch.cuda.get_device_properties(on.device).total_memory
    return {"ok": asked == total, "GiB": total / 2**30}


def _states(on: Device) -> dict[str, Any]:
    """Compare what is allocated after a step with the estimate that "auto" decides
    with."""
    model = small_llama(on.device, torch.float32)
    # cuBLAS takes its workspace, 64 MiB, in the first product.
    model(batches(on.device)[0][0]).backward()
    model.zero_grad()
    before = on.allocated_bytes() - sum(
        parameter.nbytes for parameter in model.parameters()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    parallel = parallelize(model, SmpConfig(), device=on.device, optimizers=[optimizer])
    parallel.prepare_optimizer(optimizer)
    parallel.module(batches(on.device)[0][0]).backward()
    optimizer.step()
    planned, seen = estimate(parallel.plan).model_states, on.allocated_bytes() - before
    degree = parallel.plan.shard_degree
    # Blocks of a small model round up.
    ok = degree == 1 and (on.rehearsal or abs(seen / planned - 1) <= 0.2)
    return {
        "ok": ok,
        "degree": degree,
        "planned bytes": planned,
        "allocated bytes": seen,
    }

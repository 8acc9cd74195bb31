"""Training steps that are played on streams of a CPU, with and without what keeps them
in order.

    python -m tests.core.streamed_cases CASES(JSON)

runs the real code under :mod:`tests.core.stream_sanitizer`, on one rank of torch's fake
process group, and prints as JSON what it did wrong in each case, and how often the host
waited for the device.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

# Torch's only way to the fake backend.
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.core.stream_sanitizer import RANKS_PER_NODE, WORLD, play_a_device, sanitizer
from tests.core.streamed_models import MODELS, WIDTH, loss_of


@dataclass
class Case:
    """Training steps of a small model.

    Args:
        knobs: SmpConfig's; with ``frozen_storage`` all blocks but the last are frozen.
        model: one of ``MODELS``.
        thaws: one parameter of the last block is frozen in the first micro-batch of a
            step.
        skips: forward ends before the last block, which is gathered ahead all the same.
        evaluates: before each step a forward like that is evaluated, and what was
            gathered given up.
        twice: backward runs through the last micro-batch's graph once more.
        scales: the loss is scaled, as for float16.
        saves: after each step model and optimizer are staged for a checkpoint, which
            the host reads.
        without: one of ``WITHOUT``.
        steps: how many; what the host is asked in the first is not counted.
    """

    knobs: dict[str, Any]
    dtype: str = "float32"
    micro_batches: int = 2
    thaws: bool = False
    skips: bool = False
    evaluates: bool = False
    twice: bool = False
    scales: bool = False
    saves: bool = False
    without: str | None = None
    steps: int = 3
    model: str = "chain"


def run(case: Case) -> dict[str, Any]:
    """What was wrong, and per line how often a step made the host wait (the first step
    not counted)."""
    from smp_core.checkpoint.staging import HostBuffers
    from smp_core.config import SmpConfig
    from smp_core.entry import build_mesh, parallelize
    from smp_core.sharding.optimizer.grad_scaler import ShardedGradScaler
    from smp_core.topology import Topology

    sanitizer.begin()
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    model: Any = MODELS[case.model]().to(dtype)
    if "frozen_storage" in case.knobs:
        model.blocks[:-1].requires_grad_(False)
    mesh, config = build_mesh(
        SmpConfig(**case.knobs), Topology.uniform(WORLD, RANKS_PER_NODE), "cpu"
    )
    parallel = parallelize(model, config, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    parallel.prepare_optimizer(optimizer)
    buffers = HostBuffers()
    scaler = ShardedGradScaler("cpu", enabled=case.scales)
    sanitizer.found.clear()
    with sanitizer:
        for step in range(case.steps):
            if step == 1:
                sanitizer.asked.clear()
            if case.evaluates:
                with torch.no_grad():
                    parallel.module(torch.randn(8, WIDTH, dtype=dtype), True)
                parallel.reshard()
            for micro in range(case.micro_batches):
                if case.thaws:
                    model.blocks[-1][0].weight.requires_grad_(micro > 0)
                last = micro == case.micro_batches - 1
                with parallel.window.accumulate(enabled=not last):
                    loss = loss_of(parallel, case.model, dtype, case.skips)
                    if last and case.twice:
                        with parallel.window.accumulate():
                            loss.backward(retain_graph=True)
                    scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            parallel.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            parallel.meter.close_step()
            if case.saves:
                _save(parallel.model_state(), buffers)
    asked = {line: count / (case.steps - 1) for line, count in sanitizer.asked.items()}
    return {"found": dict(sanitizer.found), "asked": asked}


def _save(state: dict[str, Any], buffers: Any) -> None:
    for staged in buffers.fill(state).values():
        for host_copy in staged.slices.values():
            host_copy.clone()


def _holds_nothing(recorded: Any, event: Any, run: Any) -> None:
    recorded.event, recorded.run = event, None


def _dropped_at_once(group: Any) -> None:
    group._group._all_gather_result = None


def _given_up_at_once(offloader: Any, packed: Any) -> Any:
    if not isinstance(packed, torch.Tensor) and packed.device_tensor is not None:
        packed.copied_out = None
    return _kept["_unpack"](offloader, packed)


def _indices_made_anew(rows: Any, rank: int, degree: int, weight: torch.Tensor) -> Any:
    from smp_core.tensor_parallel.operators import _RowExchange

    (n_sent, places), (n_received, order) = (
        rows.sent(rank, degree),
        rows.received(rank, degree),
    )
    there = (torch.tensor(indices, device=weight.device) for indices in (places, order))
    return _RowExchange(n_sent, next(there), n_received, next(there))


_kept: dict[str, Any] = {}
"""What a mutation calls in the end."""


# Mends, taken out again: what is exchanged for what.
WITHOUT: dict[str, tuple[str, Any]] = {
    "what was launched behind is held until somebody waits": (
        "smp_core.comm.background._Recorded.__init__",
        _holds_nothing,
    ),
    "streams that read another's memory are told": (
        "smp_core.torch_facts.streams.used_here",
        lambda tensor: None,
    ),
    "nobody asks whether terms are finite": (
        "smp_core.comm.encoded_sum.streams",
        SimpleNamespace(run_behind=lambda device: False),
    ),
    "a gather that nobody used is waited for": (
        "smp_core.sharding.fsdp.param_group.ParamGroup.drop_gather",
        _dropped_at_once,
    ),
    "an input that never left is held until its copy out is done": (
        "smp_core.activations.offloading.Offloader._unpack",
        _given_up_at_once,
    ),
    "a save waits for its copies": ("torch.accelerator.synchronize", lambda *_: None),
    "numbers go to the device from pinned memory": (
        "smp_core.torch_facts.streams.on_device",
        lambda values, dtype, device: torch.tensor(values, dtype=dtype, device=device),
    ),
    "which rows travel is on the device once": (
        "smp_core.tensor_parallel.operators.RowsInUse.exchange",
        _indices_made_anew,
    ),
}


def main(cases: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    play_a_device()
    from smp_core.activations.offloading import Offloader

    _kept["_unpack"] = Offloader._unpack
    results = []
    for case in (Case(**each) for each in json.loads(cases)):
        with (
            mock.patch(*WITHOUT[case.without])
            if case.without
            else contextlib.nullcontext()
        ):
            results.append(run(case))
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])

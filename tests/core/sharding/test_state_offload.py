"""State offload moves where things are and not what they become: weights equal to the
last bit after some steps with the same fused optimizer, because the same CPU kernel
steps the same numbers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import load_checkpoint, save_checkpoint
from smp_core.checkpoint.optimizers import (
    load_named_optimizer_state,
    named_optimizer_state,
)
from smp_core.config import SmpConfig
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from smp_core.observe.memory_report import MemoryReport
from smp_core.sharding.optimizer import host as host_optimizer
from smp_core.sharding.optimizer.shards import MASTER
from tests.core.activations.models import (
    DroppingGpt,
    assert_equal_bits,
    build,
    tokens,
    whole,
)
from tests.core.equivalence import train_together
from tests.core.sharding.state_offload_runs import (
    adamw,
    bfloat16_parameters,
    gradients,
    master_steps,
    offloaded,
)
from tests.harness import run_ranks

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=1e-1, momentum=0.9, fused=True
    ),
    # torch has no fused SGD for sharded parameters.
    "unfused SGD with momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=1e-1, momentum=0.9, foreach=False
    ),
}


def train(
    parallel: ParallelModel, optimizer: torch.optim.Optimizer, steps: range
) -> list[torch.Tensor]:
    """Two micro-batches a step, clipped, with a schedule that changes the rate each
    step."""
    losses = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        for micro in range(2):
            with parallel.window.accumulate(micro == 0):
                loss = parallel.module(
                    tokens(100 * step + 10 * micro + parallel.mesh.data_rank)
                )
                loss.backward()
            losses.append(loss.detach())
        parallel.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights_of(parallel: ParallelModel) -> dict[str, torch.Tensor]:
    return {
        name: whole(parameter) for name, parameter in parallel.module.named_parameters()
    }


def compare(cases: list[tuple[str, str, dict[str, Any]]], steps: int) -> int:
    for offload, name, layout in cases:
        seen = []
        for knobs in ({}, {"state_offload": offload}):
            parallel = build(layers=2, **layout, **knobs)
            optimizer = OPTIMIZERS[name](parallel.module.parameters())
            # A handful of parameters, so that there are many chunks.
            with mock.patch.object(host_optimizer, "CHUNK_BYTES", 5000):
                parallel.prepare_optimizer(optimizer)
            losses = train(parallel, optimizer, range(steps))
            seen.append((losses, weights_of(parallel)))
        assert_equal_bits(seen[1], seen[0], f"{offload}, {name}, {layout}")
    return len(cases)


SOME: list[tuple[str, str, dict[str, Any]]] = [
    ("optimizer", "SGD with momentum", {"shard_degree": 1}),
    ("all", "unfused SGD with momentum", {"shard_degree": 2}),
]
MORE: list[tuple[str, str, dict[str, Any]]] = [
    ("optimizer", "AdamW", {"shard_degree": 2}),
    ("all", "AdamW", {"shard_degree": 1}),
    ("optimizer", "unfused SGD with momentum", {"shard_degree": 2}),
]


@pytest.mark.parametrize(
    "cases", [SOME, pytest.param(MORE, marks=pytest.mark.slow)], ids=["some", "more"]
)
def test_the_same_weights(cases: list[tuple[str, str, dict[str, Any]]]) -> None:
    run_ranks(compare, 2, cases, 3)


@pytest.mark.slow
def test_the_same_weights_in_two_stages_and_with_replicas() -> None:
    cases = [
        ("all", "AdamW", {"shard_degree": 4, "collectives": {"hierarchical": True}}),
        (
            "optimizer",
            "AdamW",
            {"shard_degree": 4, "collectives": {"hierarchical": True}},
        ),
        ("all", "AdamW", {"shard_degree": 2, "activations": "full"}),
    ]
    run_ranks(compare, 4, cases, 5, ranks_per_node=2)


@pytest.mark.slow
def test_states_of_world_slices_on_the_host_give_the_same_weights() -> None:
    world = {"optimizer_shard": "world"}
    cases = [
        ("optimizer", "AdamW", {"shard_degree": 2, **world}),
        (
            "optimizer",
            "SGD with momentum",
            {"shard_degree": 1, "collectives": {"hierarchical": False}, **world},
        ),
    ]
    run_ranks(compare, 4, cases, 20, ranks_per_node=2)


WORLD_IN_BFLOAT16: dict[str, Any] = {"shard_degree": 2, "optimizer_shard": "world"}


def in_bfloat16(**knobs: Any) -> tuple[ParallelModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    parallel = parallelize(DroppingGpt(2).bfloat16(), SmpConfig(**knobs))
    optimizer = torch.optim.AdamW(parallel.module.parameters(), lr=1e-3, fused=True)
    parallel.prepare_optimizer(optimizer)
    return parallel, optimizer


def half_precision_slices() -> dict[str, Any]:
    """Weights after three steps with and without offload, and what the offloaded
    optimizer has on the device."""
    found: dict[str, Any] = {}
    for offload in (None, "optimizer"):
        parallel, optimizer = in_bfloat16(**WORLD_IN_BFLOAT16, state_offload=offload)
        report = MemoryReport(parallel, [optimizer])
        train(parallel, optimizer, range(2))
        with report.step():
            train(parallel, optimizer, range(2, 3))
        found[str(offload)] = (weights_of(parallel), report.steps[0])
    stepped = parallel.stepped()
    shards = {
        each.to_local().untyped_storage().data_ptr()
        for each in parallel.module.parameters()
    }
    found["share memory with parameters"] = all(
        each.untyped_storage().data_ptr() in shards for each in stepped
    )
    found["elements"] = sum(each.numel() for each in stepped)
    found["all"] = sum(parameter.numel() for parameter in parallel.module.parameters())
    return found


def test_half_precision_world_slices_have_their_masters_on_the_host() -> None:
    ranks = run_ranks(half_precision_slices, 4, ranks_per_node=2)
    for found in ranks:
        (plain, before), (offloaded, after) = found["None"], found["optimizer"]
        assert all(
            torch.equal(offloaded[name], value.to(offloaded[name].dtype))
            for name, value in plain.items()
        )
        assert found["share memory with parameters"]
        # Two states and a master in float32; the host has the gradient, the rounded
        # weight and the same three.
        elements = found["elements"]
        assert before.device["optimizer"] == 3 * 4 * elements and before.host == {}
        assert (
            after.device["optimizer"] == 0
            and after.host["optimizer"] == (4 * 4 + 2) * elements
        )
        assert after.device["gradients"] == before.device["gradients"] > 0
    assert sum(found["elements"] for found in ranks) == ranks[0]["all"]


def computed_in_bfloat16() -> list[str]:
    """Float32 weights over the world that are computed with in bfloat16: what differs
    from the run without offload, which stores parameters in bfloat16."""
    seen = []
    for offload in (None, "optimizer"):
        parallel = build(
            layers=2,
            shard_degree=2,
            optimizer_shard="world",
            param_dtype="bfloat16",
            state_offload=offload,
        )
        optimizer = OPTIMIZERS["AdamW"](parallel.module.parameters())
        parallel.prepare_optimizer(optimizer)
        losses = train(parallel, optimizer, range(3))
        stored = {parameter.dtype for parameter in parallel.module.parameters()}
        seen.append((losses, stored, optimizer))
    (plain, in_half, _), (offloaded, in_full, optimizer) = seen
    wrong = [] if all(map(torch.equal, plain, offloaded)) else ["losses"]
    if in_half != {torch.bfloat16} or in_full != {torch.float32}:
        wrong.append(f"stored in {in_half} and {in_full}")
    if any(MASTER in entry for entry in optimizer.state.values()):
        wrong.append("the weights are their own masters")
    return wrong


def test_float32_weights_computed_with_in_bfloat16() -> None:
    assert run_ranks(computed_in_bfloat16, 4, ranks_per_node=2) == [[]] * 4


def masters_cross_over(folder: str) -> list[str]:
    """Masters saved by one kind of run and loaded by another; what does not come out
    equal."""
    offloaded = {**WORLD_IN_BFLOAT16, "state_offload": "optimizer"}
    plain, not_world = (
        {**WORLD_IN_BFLOAT16},
        {"shard_degree": 2, "state_offload": "optimizer"},
    )
    wrong = []
    for number, (before, after) in enumerate(
        [
            (offloaded, plain),
            (plain, offloaded),
            (offloaded, not_world),
            (not_world, offloaded),
            (offloaded, {}),
        ]
    ):
        path = f"{folder}/{number}"
        parallel, optimizer = in_bfloat16(**before)
        train(parallel, optimizer, range(3))
        state = named_optimizer_state(parallel.module, optimizer)
        masters = {name: whole(entry[MASTER]) for name, entry in state["state"].items()}
        save_checkpoint(
            path, {"model": dict(parallel.module.state_dict()), "optimizer": state}
        )
        again, its_optimizer = in_bfloat16(**(after or {"shard_degree": 4}))
        load_checkpoint(path, {"model": dict(again.module.state_dict())}, strict=False)
        load_named_optimizer_state(path, ("optimizer",), again.module, its_optimizer)
        if not after:
            if any(MASTER in entry for entry in its_optimizer.state.values()):
                wrong.append(
                    "masters stay in the states of an optimizer that steps none"
                )
            continue
        loaded = named_optimizer_state(again.module, its_optimizer)["state"]
        if any(
            not torch.equal(whole(loaded[name][MASTER]), value)
            for name, value in masters.items()
        ):
            wrong.append(f"masters: {before} to {after}")
        # Elsewhere sums have another precision.
        if {"optimizer_shard", "shard_degree"} <= before.keys() & after.keys():
            for run, steps in ((parallel, optimizer), (again, its_optimizer)):
                train(run, steps, range(3, 6))
            expected = weights_of(parallel)
            if any(
                not torch.equal(value, expected[name])
                for name, value in weights_of(again).items()
            ):
                wrong.append(f"weights: {before} to {after}")
    return wrong


@pytest.mark.slow
def test_masters_cross_over_between_host_and_device(tmp_path: Any) -> None:
    assert run_ranks(masters_cross_over, 4, str(tmp_path), ranks_per_node=2) == [[]] * 4


@pytest.mark.parametrize(
    "offload", [pytest.param("optimizer", marks=pytest.mark.slow), "all"]
)
def test_plain_and_sharded_parameters_of_one_group(offload: str) -> None:
    """A tied, a 0-d, a frozen and an unused parameter. Without offload such a group is
    stepped one by one: in float64 that is another rounding of the same step."""
    expected = run_ranks(train_together, 2, torch.float64, 2, shard_degree=2)[0]
    for seen in run_ranks(
        train_together, 2, torch.float64, 2, shard_degree=2, state_offload=offload
    ):
        assert seen.losses == pytest.approx(expected.losses, abs=1e-12)
        for name, value in expected.weights.items():
            torch.testing.assert_close(seen.weights[name], value, atol=1e-12, rtol=0)


def resume(folder: str, offload_before: str | None, offload_after: str | None) -> None:
    def fresh(offload: str | None) -> tuple[ParallelModel, torch.optim.Optimizer]:
        parallel = build(layers=2, shard_degree=2, state_offload=offload)
        optimizer = OPTIMIZERS["AdamW"](parallel.module.parameters())
        parallel.prepare_optimizer(optimizer)
        return parallel, optimizer

    parallel, optimizer = fresh(offload_before)
    train(parallel, optimizer, range(3))
    state = named_optimizer_state(parallel.module, optimizer)
    for entry in state["state"].values():
        assert all(
            isinstance(value, DTensor) for key, value in entry.items() if key != "step"
        )
    save_checkpoint(
        folder, {"model": dict(parallel.module.state_dict()), "optimizer": state}
    )
    train(parallel, optimizer, range(3, 6))
    expected = weights_of(parallel)

    again, its_optimizer = fresh(offload_after)
    with torch.no_grad():
        for parameter in again.module.parameters():
            parameter.mul_(0)
    load_checkpoint(folder, {"model": dict(again.module.state_dict())}, strict=False)
    load_named_optimizer_state(folder, ("optimizer",), again.module, its_optimizer)
    train(again, its_optimizer, range(3, 6))
    found = weights_of(again)
    different = [
        name for name, value in expected.items() if not torch.equal(found[name], value)
    ]
    assert not different, different


@pytest.mark.parametrize(
    ("before", "after"),
    [("all", None), pytest.param("optimizer", "all", marks=pytest.mark.slow)],
)
def test_resume_from_a_folder_with_other_offloading(
    before: Any, after: Any, tmp_path: Any
) -> None:
    run_ranks(resume, 2, str(tmp_path), before, after)


def test_half_precision_parameters_have_float32_masters_on_the_host() -> None:
    expected, masters = master_steps(12)
    parameters = bfloat16_parameters()
    optimizer = offloaded(parameters, adamw)
    for step in range(12):
        gradients(step, parameters)
        optimizer.step()
    assert all(map(torch.equal, parameters, expected))
    assert all(
        torch.equal(optimizer.state[p][MASTER], master)
        for p, master in zip(parameters, masters, strict=True)
    )
    assert all(optimizer.state[p]["exp_avg"].dtype == torch.float32 for p in parameters)
    # A step of 1e-3 is less than bfloat16 resolves near 1: without masters the small
    # steps would be lost.
    plain = bfloat16_parameters()
    lossy = adamw(plain)
    for step in range(12):
        gradients(step, plain)
        lossy.step()
    assert not all(map(torch.equal, plain, expected))

"""A window that does not come to its end: abandoned, failed, or zeroed in the middle.

Nothing of it may reach the next step, which is compared with one that saw nothing else,
to 1e-12 in float64.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.engine.parallel_model import ParallelModel
from smp_core.watch import rank_watch, stop_watching, watch_ranks
from tests.core.equivalence import BOTH, HELD, KEPT, full_weights
from tests.core.scenarios import (
    SCENARIOS,
    Gradients,
    Net,
    Scenario,
    alone,
    by_path,
    differences,
    freeze,
    gradients,
    net_on_ranks,
    parallel_model,
    run_window,
)
from tests.harness import run_ranks

PLAIN = SCENARIOS["everything is used"]


def same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), other in zip(
        ours.named_parameters(), theirs.parameters(), strict=True
    ):
        mine, other = (
            p.to_local() if isinstance(p, DTensor) else p for p in (mine, other)
        )
        assert torch.allclose(mine, other, rtol=0, atol=1e-12), name


def step_after(disturbance: str, **knobs) -> None:
    """A disturbed window, ``abandon()``, and a step; beside it the same step of a model
    that saw nothing else."""
    disturbed, fresh = net_on_ranks(PLAIN, **knobs), net_on_ranks(PLAIN, **knobs)
    optimizers = [
        torch.optim.AdamW(parallel.module.parameters(), lr=0.1)
        for parallel in (disturbed, fresh)
    ]
    for parallel, optimizer in zip((disturbed, fresh), optimizers, strict=True):
        parallel.prepare_optimizer(optimizer)
    for parallel, optimizer in zip((disturbed, fresh), optimizers, strict=True):
        run_window(parallel, PLAIN)
        optimizer.step()
        optimizer.zero_grad()
    disturb(disturbed, disturbance)
    disturbed.window.abandon()
    assert not disturbed.window.is_open
    assert disturbed.window.micro_batches == 0
    assert all(parameter.grad is None for parameter in disturbed.module.parameters())
    for parallel, optimizer in zip((disturbed, fresh), optimizers, strict=True):
        run_window(parallel, PLAIN)
        norm = parallel.clip_grad_norm_(0.1)
        optimizer.step()
    assert torch.isfinite(norm)
    same_weights(disturbed.module, fresh.module)


class Deliberate(Exception):
    pass


def disturb(parallel: ParallelModel, disturbance: str) -> None:
    """Leave a window in the middle, in one of many ways."""
    kind, _, where = disturbance.partition(" at ")
    named = {"root": parallel.module, "enter": parallel.module.enter}
    target = named[where] if where in named else parallel.module.cells[int(where or 0)]
    other = Scenario(by_path(lambda micro, rank: "0lr 1lr 2lr 0r"))
    if kind == "open window":
        with parallel.window.accumulate():
            run_window(parallel, other)
        assert parallel.window.is_open
    elif kind == "closed window":
        run_window(parallel, other)
    elif kind == "forward without backward":
        other.loss(parallel.module, 5, 0)
    elif kind == "failed forward":

        def refuse(*_: object) -> None:
            raise Deliberate

        handle = target.register_forward_hook(refuse)
        with pytest.raises(Deliberate):
            run_window(parallel, other)
        handle.remove()
    elif kind == "failed backward of other cells on each replica":
        ways = "0lr 1lr 2lr" if parallel.mesh.replicate_rank else "0lr 2lr"
        # It would keep all sums until the end of the pass.
        freeze(parallel.module, "never", False)
        fail_in_backward(
            parallel,
            target,
            last=True,
            failing=Scenario(by_path(lambda micro, rank: ways)),
        )
        freeze(parallel.module, "never", True)
    else:
        fail_in_backward(parallel, target, last=kind == "failed last backward")


def fail_in_backward(
    parallel: ParallelModel, target: nn.Module, last: bool, failing: Scenario = PLAIN
) -> None:
    """A first micro-batch, then one whose backward raises where the gradient of
    ``target``'s output arrives."""

    def refuse(gradient: torch.Tensor) -> None:
        raise Deliberate

    with parallel.window.accumulate():
        PLAIN.loss(parallel.module, 7, parallel.mesh.data_rank).backward()
    handle = target.register_forward_hook(
        lambda module, inputs, output: output.register_hook(refuse) and None
    )
    with pytest.raises(Deliberate), parallel.window.accumulate(not last):
        failing.loss(parallel.module, 8, parallel.mesh.data_rank).backward()
    handle.remove()


DISTURBANCES = [
    "open window",
    "closed window",
    "forward without backward",
    *(f"failed forward at {where}" for where in (0, 2, "root")),
    *(
        f"failed {which} backward at {where}"
        for which in ("first", "last")
        for where in (0, 1, 2, "root")
    ),
]


# One of each kind, and of each place where passes fail.
SAMPLE = [
    "open window",
    "forward without backward",
    "failed forward at root",
    "failed first backward at 1",
    "failed last backward at 0",
    "failed last backward at root",
]
assert set(SAMPLE) < set(DISTURBANCES)


def steps_after(disturbances: list[str], **knobs) -> None:
    for disturbance in disturbances:
        try:
            step_after(disturbance, **knobs)
        except Exception as error:
            raise RuntimeError(disturbance) from error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degree", "knobs"),
    [(1, {}), (2, {}), (4, {}), (2, BOTH), (4, BOTH), (4, KEPT), (4, HELD)],
    ids=str,
)
def test_nothing_of_an_abandoned_window_reaches_the_next_step(
    degree: int, knobs: dict
) -> None:
    run_ranks(
        steps_after,
        4,
        DISTURBANCES,
        shard_degree=degree,
        ranks_per_node=2,
        timeout=600,
        **knobs,
    )


def test_nothing_of_an_abandoned_window_of_each_kind_reaches_the_next_step() -> None:
    run_ranks(steps_after, 4, SAMPLE, shard_degree=2, ranks_per_node=2, **BOTH)


def steps_after_different_sums(cases: list[dict[str, Any]]) -> None:
    for knobs in cases:
        step_after("failed backward of other cells on each replica at enter", **knobs)


DIFFERENT_SUMS: list[dict[str, Any]] = [
    {"shard_degree": 2},
    {"shard_degree": 1, "state_offload": "all", "collectives": {"hierarchical": False}},
    {"shard_degree": 2, **HELD},
    {"shard_degree": 2, "optimizer_shard": "world"},
]


@pytest.mark.parametrize(
    "cases",
    [DIFFERENT_SUMS[:2], pytest.param(DIFFERENT_SUMS[2:], marks=pytest.mark.slow)],
    ids=["some", "more"],
)
def test_an_abandoned_window_of_which_replicas_had_sent_different_sums(
    cases: list[dict[str, Any]],
) -> None:
    """One replica had sent the sums of three units, the other of one."""
    run_ranks(steps_after_different_sums, 4, cases, ranks_per_node=2)


def go_on_after_failure(**knobs) -> list[str]:
    refused = []
    for where in (0, 1, 2, "root"):
        parallel = net_on_ranks(PLAIN, **knobs)
        run_window(parallel, PLAIN)
        target = parallel.module if where == "root" else parallel.module.cells[where]
        fail_in_backward(parallel, target, last=True)
        try:
            run_window(parallel, PLAIN)
        except RuntimeError as error:
            refused.append(str(error))
        parallel.window.abandon()
    return refused


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_going_on_after_a_failed_backward_without_abandon_is_refused(
    degree: int,
) -> None:
    for refused in run_ranks(
        go_on_after_failure, 4, shard_degree=degree, ranks_per_node=2
    ):
        assert len(refused) == 4
        assert all(
            "window.abandon()" in message and "failed" in message for message in refused
        )


def zero_in_the_middle(which: str, **knobs) -> Gradients:
    parallel = net_on_ranks(PLAIN, **knobs)
    optimizers = left_and_others(parallel.module)
    for optimizer in optimizers.values():
        parallel.prepare_optimizer(optimizer)
    with parallel.window.accumulate():
        PLAIN.loss(parallel.module, 0, parallel.mesh.data_rank).backward()
    for name, optimizer in optimizers.items():
        if which in (name, "both"):
            optimizer.zero_grad()
    assert parallel.window.is_open == (which != "both")
    PLAIN.loss(parallel.module, 1, parallel.mesh.data_rank).backward()
    return gradients(parallel.module)


def left_and_others(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    left = [
        parameter
        for name, parameter in model.named_parameters()
        if "left" in name or "gain" in name
    ]
    ids = {id(parameter) for parameter in left}
    others = [parameter for parameter in model.parameters() if id(parameter) not in ids]
    return {
        "left": torch.optim.SGD(left, lr=0.1),
        "others": torch.optim.SGD(others, lr=0.1),
    }


def zero_in_the_middle_alone(which: str) -> Gradients:
    torch.manual_seed(0)
    model = Net().double()
    optimizers = left_and_others(model)
    for micro in range(2):
        for name, optimizer in optimizers.items():
            if micro == 1 and which in (name, "both"):
                optimizer.zero_grad()
        (sum(PLAIN.loss(model, micro, rank) for rank in range(4)) / 4).backward()
    return gradients(model)


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({"shard_degree": 1}, marks=pytest.mark.slow),
        {"shard_degree": 2},
        pytest.param({"shard_degree": 4}, marks=pytest.mark.slow),
        {"shard_degree": 2, **BOTH},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "which", ["left", pytest.param("both", marks=pytest.mark.slow)]
)
def test_zero_grad_in_the_middle_drops_what_the_window_holds_of_its_parameters(
    which: str, knobs: dict
) -> None:
    expected = zero_in_the_middle_alone(which)
    for seen in run_ranks(zero_in_the_middle, 4, which, ranks_per_node=2, **knobs):
        assert differences(seen, expected) == []


class Pair(nn.Module):
    """Two units; rank 1 uses the second one and gets no gradient of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Linear(3, 4, bias=False),
            nn.Linear(3, 4, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        second = self.second(x)
        return (
            self.first(x).sum()
            + (second.detach() if dist.get_rank() == 1 else second).sum()
        )


def zeroed_where_a_rank_has_nothing_else(**knobs) -> Gradients:
    parallel = parallel_model(Pair().double(), units=("Linear",), **knobs)
    first, second = (
        torch.optim.SGD(part.parameters(), lr=0.1)
        for part in parallel.module.children()
    )
    for optimizer in (first, second):
        parallel.prepare_optimizer(optimizer)
    with parallel.window.accumulate():
        parallel.module(torch.ones(1, 3, dtype=torch.float64)).backward()
    first.zero_grad()
    assert parallel.window.is_open
    parallel.window.close()
    return gradients(parallel.module)


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({"shard_degree": 1}, marks=pytest.mark.slow),
        {"shard_degree": 2},
        pytest.param({"shard_degree": 2, **HELD}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_window_stays_open_on_a_rank_that_has_nothing_left_in_it(knobs: dict) -> None:
    for seen in run_ranks(
        zeroed_where_a_rank_has_nothing_else, 4, ranks_per_node=2, **knobs
    ):
        assert seen["first.weight"] is None
        assert seen["second.weight"] is not None and seen[
            "second.weight"
        ].unique().tolist() == [0.75]


def stepped_while_open(every_knobs: list[dict]) -> list[Gradients]:
    """What the weights moved by, at a rate of 1."""
    found = []
    for knobs in every_knobs:
        parallel = net_on_ranks(PLAIN, **knobs)
        optimizer = torch.optim.SGD(parallel.module.parameters(), lr=1.0)
        parallel.prepare_optimizer(optimizer)
        before = full_weights(parallel.module)
        with parallel.window.accumulate():
            run_window(parallel, PLAIN)
        assert parallel.window.is_open
        optimizer.step()
        found.append(
            {
                name: before[name] - value
                for name, value in full_weights(parallel.module).items()
            }
        )
    return found


def test_a_step_closes_an_open_window() -> None:
    """As one process steps what was accumulated, whoever forgot to say which
    micro-batch is the last."""
    every_knobs = [
        {"shard_degree": 1},
        {"shard_degree": 2, **HELD},
        {"shard_degree": 2, "optimizer_shard": "world"},
    ]
    expected = {
        name: 0.0 * Net().get_parameter(name) if g is None else g
        for name, g in alone(PLAIN, 4).items()
    }
    for found in run_ranks(stepped_while_open, 4, every_knobs, ranks_per_node=2):
        for moved in found:
            assert differences(moved, expected) == []


def go_on_after_a_failed_call() -> str:
    """A call that failed on all ranks, which go on; and then rank 1 alone goes on."""
    watch_ranks()
    parallel = net_on_ranks(PLAIN, shard_degree=2)

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("of this rank")

    for is_together in (True, False):
        handle = parallel.module.register_forward_pre_hook(refuse)
        with pytest.raises(torch.OutOfMemoryError):
            run_window(parallel, PLAIN)
        handle.remove()
        said = ""
        if is_together:
            # A call inside of `except:` is none that failed.
            try:
                raise ArithmeticError
            except ArithmeticError:
                run_window(parallel, PLAIN)
            run_window(parallel, PLAIN)
        elif dist.get_rank() == 1:
            with (
                mock.patch.object(rank_watch, "_SOON", 0.2),
                pytest.raises(RuntimeError) as refused,
            ):
                run_window(parallel, PLAIN)
            said = str(refused.value)
        dist.barrier()
    stop_watching()
    return said


def test_a_rank_that_goes_on_alone_after_a_failed_call_is_told_so() -> None:
    """What it would send next is of another call than the one that others wait in."""
    said = run_ranks(go_on_after_a_failed_call, 2)[1]
    assert "failed on this rank with OutOfMemoryError: of this rank" in said
    assert "leave the batch out on all ranks" in said

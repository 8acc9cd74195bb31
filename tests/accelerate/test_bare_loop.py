"""A bare Accelerate loop trains like one process on the same global batch, whatever the
partitioning.

float64 is the proof: 1e-12 is a few hundred rounding errors of sums in another order.
The model has a tied, a frozen, an unused, an uneven and a 0-d parameter, and every rank
another seed.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from smp_core.comm.replica_hop import ReplicaHop
from tests.accelerate.running import (
    SAMPLES,
    STEPS,
    fresh_accelerator,
    full_weights,
    make_loader,
    prepared,
    train_alone,
    train_together,
)
from tests.core.equivalence import assert_close
from tests.core.models import Trajectory, loss_of
from tests.harness import run_ranks

# Degree, micro-batches.
SAMPLE = [(2, 3), (4, 1)]
MORE = [case for case in itertools.product((1, 2, 4), (1, 3)) if case not in SAMPLE]


def several(cases: list[tuple[int, dict[str, Any]]]) -> list[Trajectory]:
    return [
        train_together(torch.float64, micro_batches, **knobs)
        for micro_batches, knobs in cases
    ]


def assert_equal_to_one_process(cases: list[tuple[int, dict[str, Any]]]) -> None:
    expected = {
        micro_batches: train_alone(torch.float64, micro_batches)
        for micro_batches, _ in cases
    }
    for trajectories in run_ranks(several, 4, cases, ranks_per_node=2):
        for (micro_batches, knobs), seen in zip(cases, trajectories, strict=True):
            assert len(seen.losses) == STEPS, knobs
            assert_close(seen, expected[micro_batches], lambda step: 1e-12, 1e-12)


@pytest.mark.parametrize(
    "cases", [SAMPLE, pytest.param(MORE, marks=pytest.mark.slow)], ids=str
)
def test_float64_loop_equals_one_process(cases: list[tuple[int, int]]) -> None:
    assert_equal_to_one_process(
        [(micro_batches, {"shard_degree": degree}) for degree, micro_batches in cases]
    )


EXACT_SCHEMES: list[dict[str, Any]] = [
    {
        "shard_degree": 4,
        "reshard_after_forward": "node",
        "collectives": {"backward_prefetch": 2},
    },
    {"shard_degree": 4, "compression": {"gather": "fp8", "gather_after_steps": STEPS}},
    {"shard_degree": 2, "optimizer_shard": "world"},
    {"shard_degree": 2, "keep_between_micro_batches": "parameters"},
    {
        "shard_degree": 4,
        "keep_between_micro_batches": "gradients",
        "reshard_after_forward": True,
    },
]


@pytest.mark.parametrize(
    "schemes",
    [EXACT_SCHEMES[:2], pytest.param(EXACT_SCHEMES[2:], marks=pytest.mark.slow)],
    ids=["some", "more"],
)
def test_schemes_that_save_bytes_exactly_equal_one_process(
    schemes: list[dict[str, Any]],
) -> None:
    assert_equal_to_one_process([(2, knobs) for knobs in schemes])


def watch_the_window(**arguments: Any) -> dict[str, Any]:
    """Train with 3 micro-batches; what ``.grad`` shows between them and how often
    replicas talk."""
    accelerator, optimizer, model, loader, _ = prepared(torch.float32, 3, **arguments)
    handle = accelerator.parallel
    hops: list[int] = []
    hop = ReplicaHop.__call__

    def counted(this: ReplicaHop, *arguments: Any) -> Any:
        hops.append(dist.get_world_size(this.group))
        return hop(this, *arguments)

    ReplicaHop.__call__ = counted  # type: ignore[method-assign]
    held, per_step = [], []
    try:
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch["tokens"]))
                if not accelerator.sync_gradients:
                    held.append(
                        [
                            name
                            for name, p in model.named_parameters()
                            if p.grad is not None
                        ]
                    )
                    assert not hops, f"replicas talked in micro-batch {number}"
                else:
                    per_step.append(len(hops))
                    hops.clear()
                    whole = [
                        n
                        for n, p in model.named_parameters()
                        if p.grad is not None and p.numel() > 1
                    ]
                    kinds = {
                        isinstance(dict(model.named_parameters())[n].grad, DTensor)
                        for n in whole
                    }
                optimizer.step()
                optimizer.zero_grad()
    finally:
        ReplicaHop.__call__ = hop  # type: ignore[method-assign]
    units = sum(
        any(p.requires_grad for p in unit.parameters()) for unit in handle.units
    )
    return {"held": held, "per_step": per_step, "units": units, "kinds": kinds}


def test_two_hops_one_window() -> None:
    """Between micro-batches no ``.grad`` is there, sharded or not; replicas talk once
    per unit and optimizer step, and once more for the plain (0-d) parameter."""
    for seen in run_ranks(watch_the_window, 4, ranks_per_node=2, shard_degree=2):
        assert seen["held"] == [[]] * (2 * STEPS)
        assert seen["per_step"] == [seen["units"] + 1] * STEPS
        assert seen["kinds"] == {True}


def evaluations(degree: int, ranks: int = 2) -> list[torch.Tensor]:
    """What a model with batch norm gives on the first ``ranks`` ranks for the same
    samples before training, behind an epoch on samples that only this rank has, and
    behind a second one."""
    accelerator = fresh_accelerator(shard_degree=degree)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    own = torch.randn(8, 4) + 3 * dist.get_rank()
    found = []
    for _ in range(3):
        model.eval()
        with torch.no_grad():
            if dist.get_rank() < ranks:
                found.append(model(torch.ones(2, 4)))
        model.train()
        accelerator.backward(model(own).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_evaluations_have_rank_0s_statistics_on_all_ranks() -> None:
    """Each rank evaluated with those of its own samples."""
    first, second = run_ranks(evaluations, 2, 2)
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(first[0], first[1])


def test_rank_0_of_replicas_evaluates_alone() -> None:
    assert [len(found) for found in run_ranks(evaluations, 2, 1, 1, timeout=60)] == [
        3,
        0,
    ]


def metered(
    evaluate: bool, **knobs: Any
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """What is sent in each optimizer step, with an evaluation in the middle of its
    window or without, and what is sent outside of steps."""
    accelerator, optimizer, model, loader, _ = prepared(
        torch.float32, 2, shard_degree=2, **knobs
    )
    meter = accelerator.parallel.meter
    steps = []
    for batch in loader:
        if evaluate:
            model.eval()
            with torch.no_grad():
                loss_of(model, batch["tokens"])
            model.train()
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch["tokens"]))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            steps.append(
                {
                    name: value
                    for name, value in meter.per_step().items()
                    if "seconds" not in name
                }
            )
    return steps, meter.outside()


def test_an_evaluation_is_no_part_of_a_steps_bytes() -> None:
    alone, between = (run_ranks(metered, 2, evaluate) for evaluate in (False, True))
    for (steps, nothing), (same_steps, outside) in zip(alone, between, strict=True):
        assert steps == same_steps
        assert sum(nothing.values()) == 0 < outside["all_gather/calls"]


def test_a_unit_is_gathered_and_reduced_once_per_optimizer_step_where_that_is_asked() -> (
    None
):
    calls = {}
    for kept, held in ((False, False), (True, False), (True, True)):
        knobs = {
            "reshard_after_forward": False,
            "keep_between_micro_batches": "gradients"
            if held
            else "parameters"
            if kept
            else "shards",
        }
        for steps, _ in run_ranks(metered, 2, False, **knobs):
            calls[kept, held] = [
                (step["all_gather/calls"], step["reduce_scatter/calls"])
                for step in steps
            ]
    for (gathers, reductions), (fewer, as_many), once in zip(
        *calls.values(), strict=True
    ):
        assert gathers == 2 * fewer > 0 and reductions == as_many > 0
        assert once == (fewer, as_many / 2)
    assert len(calls[True, True]) == STEPS


def evaluated_halved(**knobs: Any) -> list[float]:
    """Losses of other weights than those that are trained, after each micro-batch: as
    who averages weights has them."""
    accelerator, optimizer, model, loader, _ = prepared(
        torch.float64, 2, shard_degree=2, **knobs
    )
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch["tokens"]))
            optimizer.step()
            optimizer.zero_grad()
        trained = list(model.parameters())
        with torch.no_grad():
            for parameter in trained:
                parameter.mul_(0.5)
            losses.append(loss_of(model, batch["tokens"]).item())
            for parameter in trained:
                parameter.mul_(2.0)
    return losses


def test_weights_that_are_put_in_place_for_an_evaluation_are_evaluated() -> None:
    kept = {"keep_between_micro_batches": "parameters"}
    freed, gathered = (run_ranks(evaluated_halved, 2, **knobs) for knobs in ({}, kept))
    assert gathered == freed and len(set(freed[0])) == 2 * STEPS


def schedule(**arguments: Any) -> list[float]:
    accelerator, optimizer, model, loader, scheduler = prepared(
        torch.float32, 2, **arguments
    )
    rates = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch["tokens"]))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                rates.append(scheduler.get_last_lr()[0])
    return rates


@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_schedules_counted_in_optimizer_steps_step_once_with_each(degree: int) -> None:
    for rates in run_ranks(schedule, 2, shard_degree=degree):
        assert rates == pytest.approx(
            [1e-2 * 0.9**step for step in range(1, STEPS + 1)], rel=1e-12
        )


def scheduled(alone: bool, kind: str, **arguments: Any) -> list[float]:
    """Rates of a schedule counted in batches of the unprepared loader, as nlp_example
    counts, and of one by epochs."""
    loader = DataLoader(torch.randn(32, 4), batch_size=2)
    if not alone:
        accelerator = fresh_accelerator(gradient_accumulation_steps=2, **arguments)
    model = torch.nn.Linear(4, 4)
    optimizer, other = (torch.optim.SGD([p], lr=1.0) for p in model.parameters())
    total = 2 * len(loader) // 2  # two epochs, two batches for an optimizer step
    schedule: Any = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1.0, total_steps=total
    )
    if kind == "linear":
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: max(0.0, 1 - step / total)
        )
    by_epoch = torch.optim.lr_scheduler.StepLR(other, step_size=1)
    if alone:
        for _ in range(total):
            schedule.optimizer.step()
            schedule.step()
        return [*schedule.get_last_lr(), 0.01]
    prepared = accelerator.prepare(model, optimizer, other, loader, schedule, by_epoch)
    model, optimizer, other, loader, schedule, by_epoch = prepared
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                optimizer.step()
                other.step()
                schedule.step()
                optimizer.zero_grad()
        by_epoch.step()
    return [*schedule.get_last_lr(), *by_epoch.get_last_lr()]


@pytest.mark.parametrize(
    "kind", ["linear", pytest.param("one cycle", marks=pytest.mark.slow)]
)
def test_schedules_end_where_they_end_on_one_process(kind: str) -> None:
    expected = scheduled(True, kind)
    for rates in run_ranks(scheduled, 2, False, kind, ranks_per_node=2, shard_degree=2):
        assert rates == pytest.approx(expected, abs=1e-12)


def gathered(samples: int, **arguments: Any) -> tuple[list[float], list[float]]:
    """Evaluate ``samples`` samples in batches of 3 per rank: per-sample losses as
    gather_for_metrics gives them."""
    accelerator, _, model, _, _ = prepared(torch.float64, 1, **arguments)
    loader = accelerator.prepare(
        torch.utils.data.DataLoader(
            make_loader(STEPS, 1, 1).dataset[:samples], batch_size=3
        )
    )
    seen, mine = [], []
    with torch.no_grad():
        for batch in loader:
            losses = torch.stack(
                [loss_of(model, tokens[None]) for tokens in batch["tokens"]]
            )
            mine += losses.tolist()
            seen += accelerator.gather_for_metrics(losses).tolist()
    return seen, mine


def test_gather_for_metrics_counts_each_sample_once() -> None:
    samples = 29  # 2 rounds of 12, and 5 left for ranks 0 and 1
    results = run_ranks(gathered, 2, samples, ranks_per_node=2, shard_degree=2)
    for seen, _ in results:
        assert len(seen) == samples
        assert seen == results[0][0]
    assert sum(len(mine) for _, mine in results) > samples, (
        "no padding samples that could be counted twice"
    )


def clip_by_value(**arguments: Any) -> float:
    accelerator, _, model, loader, _ = prepared(torch.float64, 1, **arguments)
    accelerator.backward(loss_of(model, next(iter(loader))["tokens"]))
    before = accelerator.grad_norm(model.parameters(), float("inf")).item()
    accelerator.clip_grad_value_(model.parameters(), before / 3)
    return accelerator.grad_norm(model.parameters(), float("inf")).item() / before


@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_clip_grad_value_limits_every_element(degree: int) -> None:
    for ratio in run_ranks(clip_by_value, 4, ranks_per_node=2, shard_degree=degree):
        assert ratio == pytest.approx(1 / 3, rel=1e-12)


def test_batches_are_what_the_reference_sees() -> None:
    """The reference reads the samples in the order in which the ranks share them
    out."""
    together = torch.cat([batch["tokens"] for batch in make_loader(1, 3, 2)])
    alone = torch.cat([batch["tokens"] for batch in make_loader(1, 3, SAMPLES)])
    assert torch.equal(together, alone)


RAGGED = [(3, 1), (2, 2), (1, 4)]
"""Samples of both ranks in each step."""


def ragged(on_ranks: bool) -> dict[str, torch.Tensor]:
    """Steps of batches of unlike sizes, in whose mean every sample counts alike."""
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    ).double()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    accelerator = (
        fresh_accelerator(smp_config={"shard_degree": 2}) if on_ranks else None
    )
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    for sizes in RAGGED:
        batch = torch.randn(
            sum(sizes),
            4,
            generator=torch.Generator().manual_seed(sizes[0]),
            dtype=torch.float64,
        )
        if accelerator is None:
            model(batch).square().mean().backward()
        else:
            losses = model(batch.split(sizes)[accelerator.process_index]).square()
            samples = accelerator.reduce(torch.tensor(len(losses)), "sum")
            accelerator.backward(losses.sum() * accelerator.num_processes / samples)
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


def test_batches_of_unlike_sizes_may_count_by_their_samples() -> None:
    expected = ragged(False)
    for weights in run_ranks(ragged, 2, True):
        assert all(
            torch.allclose(weights[name], expected[name], rtol=0, atol=1e-12)
            for name in expected
        )

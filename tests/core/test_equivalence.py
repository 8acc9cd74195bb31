"""Any partitioning trains like one process on the same global batch.

float64 is the proof: 1e-12 is a few hundred rounding errors of sums in another order,
and any wrong factor, missing reduction or stale weight is many orders larger. Every
case has other seeds on each rank and a tied, a frozen, an unused, an uneven and a 0-d
parameter.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from tests.core.equivalence import (
    BOTH,
    HELD,
    KEPT,
    SAMPLES,
    STEPS,
    assert_close,
    full_weights,
    train_together,
)
from tests.core.gpt import SmallGpt
from tests.core.models import Trajectory, global_batches, train_alone
from tests.harness import run_ranks

CASES = [
    {
        "shard_degree": degree,
        "collectives": {"hierarchical": hierarchical},
        "reshard_after_forward": reshard,
        "micro_batches": micro,
    }
    for degree, hierarchical, reshard, micro in itertools.product(
        (1, 2, 4), ("auto", False), (True, False), (1, 2, 3)
    )
    if degree == 4 or hierarchical == "auto"
]
GATHERING = [
    {"shard_degree": 4, "reshard_after_forward": "node", "micro_batches": 2},
    {
        "shard_degree": 4,
        "reshard_after_forward": 2,
        "collectives": {"hierarchical": False},
        "micro_batches": 1,
    },
    {
        "shard_degree": 4,
        "collectives": {"forward_prefetch": 1, "backward_prefetch": 3},
        "micro_batches": 2,
    },
    {
        "shard_degree": 2,
        "collectives": {"forward_prefetch": 2, "backward_prefetch": 2},
        "micro_batches": 2,
    },
    {
        "shard_degree": 4,
        "reshard_after_forward": "node",
        "collectives": {"forward_prefetch": 2},
        "micro_batches": 2,
    },
]
SAMPLE = [
    case
    for case in CASES
    if case["reshard_after_forward"] and case["micro_batches"] == 2
]


def train_several(cases: list[dict]) -> list[Trajectory]:
    return [train_together(torch.float64, **case) for case in cases]


@pytest.mark.slow
def test_secondary_shards_and_prefetch_train_like_one_process() -> None:
    for trajectories in run_ranks(
        train_several, 4, GATHERING, ranks_per_node=2, timeout=600
    ):
        for case, seen in zip(GATHERING, trajectories, strict=True):
            expected = train_alone(
                torch.float64, global_batches(STEPS, case["micro_batches"], SAMPLES)
            )
            assert_close(seen, expected, lambda step: 1e-12, 1e-12)


KEPT_CASES = [
    {"shard_degree": degree, "micro_batches": micro, "disturbed": disturbed, **KEPT}
    for degree, micro, disturbed in ((4, 1, False), (2, 3, True), (4, 3, True))
]
KEPT_CASES += [
    {"shard_degree": 2, "micro_batches": 3, "disturbed": True, **HELD},
    {
        "shard_degree": 4,
        "micro_batches": 3,
        "disturbed": True,
        **HELD,
        "reshard_after_forward": "node",
    },
    {"shard_degree": 4, "micro_batches": 3, "disturbed": True, **BOTH},
]


@pytest.mark.parametrize(
    "cases",
    [KEPT_CASES[1::2], pytest.param(KEPT_CASES[::2], marks=pytest.mark.slow)],
    ids=len,
)
def test_what_stays_gathered_or_is_held_through_a_window_trains_like_one_process(
    cases: list[dict[str, Any]],
) -> None:
    for trajectories in run_ranks(
        train_several, 4, cases, ranks_per_node=2, timeout=600
    ):
        for case, seen in zip(cases, trajectories, strict=True):
            expected = train_alone(
                torch.float64, global_batches(STEPS, case["micro_batches"], SAMPLES)
            )
            assert_close(seen, expected, lambda step: 1e-12, 1e-12)


COMPOSED = [
    {"shard_degree": 4, "compression": "int8"},
    {
        "shard_degree": 4,
        "collectives": {"forward_prefetch": 2, "backward_prefetch": 2},
        "activations": "full",
    },
    {"shard_degree": 2, "optimizer_shard": "world", "param_dtype": "bfloat16"},
    {"shard_degree": 2, "state_offload": "all"},
    {"shard_degree": 2, "state_offload": "optimizer", "delayed_init": True},
    {"shard_degree": 1, "param_dtype": "bfloat16"},
]
# What rounds reductions, or steps with rounded weights, is no measure for sums in
# another order.
EXACT = [
    case for case in COMPOSED if "compression" not in case and "param_dtype" not in case
]


def train_prepared(cases: list[dict]) -> list[Trajectory]:
    """Steps of 3 micro-batches with an optimizer that is prepared; initial values of
    ``delayed_init`` by name."""
    found = []
    for knobs in cases:
        torch.manual_seed(0)
        with torch.device("meta" if knobs.get("delayed_init") else "cpu"):
            model = SmallGpt(layers=2)
        parallel = parallelize(model, SmpConfig(**knobs))
        mesh = parallel.mesh
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        parallel.prepare_optimizer(optimizer)
        seen = Trajectory()
        generator = torch.Generator().manual_seed(mesh.data_rank)
        for _ in range(3):
            for number in range(3):
                with parallel.window.accumulate(number < 2):
                    loss = model(torch.randint(101, (2, 9), generator=generator))
                    loss.backward()
                seen.losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        seen.weights = full_weights(model)
        found.append(seen)
    return found


@pytest.mark.slow
def test_parameters_that_stay_gathered_change_no_bit_whatever_else_is_asked() -> None:
    cases = [
        {"reshard_after_forward": False, **case, **kept}
        for case in COMPOSED
        for kept in ({}, KEPT)
    ]
    for found in run_ranks(train_prepared, 4, cases, ranks_per_node=2, timeout=600):
        for case, freed, kept in zip(COMPOSED, found[::2], found[1::2], strict=True):
            assert freed.losses == kept.losses, case
            assert len(set(freed.losses)) > 5, case  # bfloat16 losses may meet
            for name, value in freed.weights.items():
                assert torch.equal(kept.weights[name], value), (case, name)


@pytest.mark.slow
def test_whole_gradients_that_are_held_change_no_more_than_the_order_of_sums_whatever_else_is_asked() -> (
    None
):
    """float32, nine micro-batches of AdamW with lr 1e-2, which divides noise by noise
    where a gradient is zero up to rounding (the key's bias): losses to 1e-5; a factor
    or a missing micro-batch is orders more."""
    cases = [{**held, **case} for case in EXACT for held in ({}, HELD)]
    for found in run_ranks(train_prepared, 4, cases, ranks_per_node=2, timeout=600):
        for case, reduced, held in zip(EXACT, found[::2], found[1::2], strict=True):
            assert reduced.losses != held.losses, case
            torch.testing.assert_close(
                held.losses, reduced.losses, rtol=0, atol=1e-5, msg=str(case)
            )


def check_float64(case: dict) -> None:
    expected = train_alone(
        torch.float64, global_batches(STEPS, case["micro_batches"], SAMPLES)
    )
    for seen in run_ranks(train_together, 4, torch.float64, ranks_per_node=2, **case):
        assert_close(seen, expected, lambda step: 1e-12, 1e-12)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_float64_training_equals_one_process(case: dict) -> None:
    check_float64(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64_training_equals_one_process_everywhere(case: dict) -> None:
    check_float64(case)


@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_ranks_equal_one_process(degree: int) -> None:
    expected = train_alone(torch.float64, global_batches(STEPS, 2, SAMPLES))
    for seen in run_ranks(train_together, 2, torch.float64, 2, shard_degree=degree):
        assert_close(seen, expected, lambda step: 1e-12, 1e-12)


def reordered_alone(dtype: torch.dtype, batches: torch.Tensor) -> Trajectory:
    """One process again, samples in another order: what float32 itself leaves open."""
    order = list(range(batches.shape[2]))
    random.Random(3).shuffle(order)
    return train_alone(dtype, batches[:, :, order])


@pytest.mark.parametrize(
    "degree",
    [
        pytest.param(1, marks=pytest.mark.slow),
        2,
        pytest.param(4, marks=pytest.mark.slow),
    ],
)
def test_float32_training_stays_within_summation_order(degree: int) -> None:
    """Losses and norms to 1e-6 + 2e-7 per step; weights to 5x what one process differs
    from itself by when it adds up in another order (AdamW divides noise by noise where
    a gradient is zero up to rounding)."""
    batches = global_batches(STEPS, 2, SAMPLES)
    expected, other = (
        train_alone(torch.float32, batches),
        reordered_alone(torch.float32, batches),
    )
    noise = max(
        (expected.weights[n] - other.weights[n]).abs().max().item()
        for n in expected.weights
    )
    for seen in run_ranks(
        train_together, 4, torch.float32, 2, ranks_per_node=2, shard_degree=degree
    ):
        assert_close(seen, expected, lambda step: 1e-6 + 2e-7 * step, 5 * noise)


@pytest.mark.parametrize(
    "mutation",
    [
        "no replica hop",
        pytest.param("one parameter left out", marks=pytest.mark.slow),
        pytest.param("gathered for ever", marks=pytest.mark.slow),
        pytest.param("held for ever", marks=pytest.mark.slow),
    ],
)
def test_the_proof_fails_for_a_broken_engine(mutation: str) -> None:
    expected = train_alone(torch.float64, global_batches(STEPS, 2, SAMPLES))
    knobs = {"shard_degree": 2, **(BOTH if mutation == "held for ever" else KEPT)}
    disturbed = mutation == "held for ever"
    results = run_ranks(
        train_together,
        4,
        torch.float64,
        2,
        mutation,
        ranks_per_node=2,
        disturbed=disturbed,
        **knobs,
    )
    with pytest.raises(AssertionError):
        for seen in results:
            assert_close(seen, expected, lambda step: 1e-12, 1e-12)

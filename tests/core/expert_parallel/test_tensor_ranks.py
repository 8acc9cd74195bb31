"""Experts beside tensor ranks, which have parts of each expert, and on stages of them:
the training of one process."""

from __future__ import annotations

import pytest

from tests.core.expert_parallel import staged
from tests.core.expert_parallel.cases import RATE, with_biases
from tests.core.pipeline.cases import Case as Staged
from tests.core.tensor_parallel.model_cases import (
    STEPS,
    Case,
    alone,
    differences,
    together,
)
from tests.core.tensor_parallel.models import PLANS
from tests.harness import run_ranks

EXPERTS, FOUR = ("expert_parallel_degree", 2), ("expert_parallel_degree", 4)
# Tensor ranks have all of it, and every other rank no token.
WHOLE = "one expert takes all"
# Families with plans that split more than experts; the rest of them is whole.
PLANNED = (
    "Mixtral",
    "Qwen3Moe",
    "Olmoe",
    "DeepseekV3",
    "GraniteMoe",
    "Glm4Moe",
    "Jamba",
    "Phimoe",
    "MiniMax",
)
OTHERS = [
    (("optimizer_shard", "world"),),
    (("activations", "full"),),
    (("state_offload", "all"),),
]


def problems(cases: list[Case]) -> list[str]:
    """What is further off than 1e-12 from one process; run by each rank."""
    PLANS[WHOLE] = {"head": "column_gather"}  # type: ignore[assignment]
    found = []
    for case in cases:
        lines = differences(
            together(case), alone(case.kind, case.micro_batches, case.steps)
        )
        found += [f"{case}: {line}" for line in lines]
    return found


def assert_like_one_process(cases: list[Case], world: int = 4) -> None:
    assert (
        run_ranks(problems, world, cases, ranks_per_node=world, timeout=900)
        == [[]] * world
    )


def test_experts_beside_tensor_ranks_train_like_one_process() -> None:
    """1e-12: sums in another order, in float64; auxiliary losses too."""
    whole = Case(WHOLE, shard=2, sequence=False, knobs=(EXPERTS,))
    assert_like_one_process([Case("balanced", shard=2, knobs=(EXPERTS,)), whole])


def in_fp8() -> tuple[list[str], list[str]]:
    """What is further off than 1e-12 from FP8 on tensor ranks that have all experts;
    the weights in FP8."""
    knobs = (("fp8", {"scaling": "delayed"}),)
    cases = [
        Case("wide experts", shard=2, knobs=more, steps=3)
        for more in (knobs, (*knobs, EXPERTS))
    ]
    whole, split = (together(case) for case in cases)
    fp8 = cases[1].parallel().fp8
    assert fp8 is not None
    return differences(split, whole), list(fp8.state.names)


@pytest.mark.slow
def test_experts_in_fp8_beside_tensor_ranks_have_the_same_digits() -> None:
    """1e-12: sums in another order; what is cast is the same."""
    for found, names in run_ranks(in_fp8, 4, ranks_per_node=4, timeout=600):
        assert any(name.endswith("experts.down_proj") for name in names)
        assert found == []


def biased() -> list[str]:
    """What is further off than 1e-12 of weights and of biases, which the routers'
    choices move."""
    case = Case(
        "DeepseekV3", shard=2, knobs=(EXPERTS, ("router_bias_update_rate", RATE))
    )
    seen, expected = together(case).weights, with_biases(1, STEPS)
    return [
        name
        for name, value in seen.items()
        if not (value - expected[name]).abs().max() <= 1e-12
    ]


@pytest.mark.slow
def test_biases_beside_tensor_ranks_move_by_the_choices_of_all_ranks() -> None:
    assert run_ranks(biased, 4, timeout=600) == [[]] * 4


@pytest.mark.slow
def test_families_beside_tensor_ranks_train_like_one_process() -> None:
    """1e-12, as above."""
    assert_like_one_process([Case(kind, shard=2, knobs=(EXPERTS,)) for kind in PLANNED])


@pytest.mark.slow
def test_experts_beside_tensor_ranks_and_replicas_train_like_one_process() -> None:
    """1e-12, as above. With 4 x 2 x 2 two ranks of a partition group have parts of the
    same experts."""
    replicas = [
        Case("Mixtral", shard=2, micro_batches=2, knobs=(EXPERTS, *knobs))
        for knobs in OTHERS
    ]
    groups = [Case("Mixtral", shard=4, knobs=(degree,)) for degree in (EXPERTS, FOUR)]
    assert_like_one_process([*replicas, *groups], world=8)


@pytest.mark.slow
def test_experts_on_stages_of_tensor_ranks_train_like_one_process() -> None:
    """1e-12, as above. 2 stages x 2 expert ranks x 2 tensor ranks."""
    both = (EXPERTS, ("tensor_parallel_degree", 2))
    cases = [
        Staged(kind, shard=2, knobs=both)
        for kind in ("Mixtral", "Qwen3Moe", "DeepseekV3")
    ]
    staged.assert_like_one_process(cases, world=8)


def refused() -> str:
    roles = dict.fromkeys(("*.q_proj", "*.k_proj", "*.v_proj"), "column")
    PLANS["Mixtral"] = {**roles, "*.o_proj": "row"}  # type: ignore[assignment]
    try:
        with pytest.raises(ValueError) as error:
            Case("Mixtral", shard=2, knobs=(EXPERTS,)).parallel()
    finally:
        del PLANS["Mixtral"]
    return str(error.value)


def test_experts_that_tensor_ranks_give_parts_of_the_tokens_are_refused() -> None:
    for told in run_ranks(refused, 4, ranks_per_node=4):
        assert "model.layers.0.mlp.experts is whole on tensor ranks" in told

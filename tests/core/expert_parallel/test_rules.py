"""Degrees that are settled, and models and values that are refused, with what to
write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from tests.core.expert_parallel.cases import plan_of
from tests.core.expert_parallel.models import OwnExperts, OwnModel, adapted
from tests.core.tensor_parallel.model_cases import build
from tests.harness import run_ranks
from tests.older_transformers import needs_experts_choice


class Dbrx(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = DbrxExperts()


class DbrxExperts(nn.Module):
    """Poses as a class of Transformers without the mark."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))


class Normed(OwnModel):
    """Experts with a parameter that is not one expert's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].experts.norm = nn.LayerNorm(16)


class Tied(OwnModel):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].experts.matrices = self.blocks[1].experts.matrices


class Odd(OwnModel):
    """Experts of 3 x 3."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].experts.matrices = nn.Parameter(torch.zeros(4, 3, 3))


@pytest.mark.parametrize(
    ("asked", "knobs", "degree"),
    [
        ("node", {}, 4),
        ("node", {"shard_degree": 2}, 2),
        ("auto", {}, 4),
        ("auto", {"compile": True}, 4),
        ("auto", {"compile": {"fullgraph": True}}, 1),
        (2, {}, 2),
        ("2", {}, 2),
        (1, {"compile": {"fullgraph": True}}, 1),
    ],
)
def test_degrees_are_settled(asked: Any, knobs: dict[str, Any], degree: int) -> None:
    plan = plan_of(OwnModel(), expert_parallel_degree=asked, **knobs)
    assert plan.knobs.expert_parallel_degree == degree


@pytest.mark.parametrize(
    ("knobs", "ahead"),
    [
        ({"expert_parallel_degree": 1}, 1),
        ({"expert_parallel_degree": "auto"}, 2),
        ({"expert_parallel_degree": 2}, 2),
        ({"expert_parallel_degree": 2, "collectives": {"backward_prefetch": 1}}, 1),
        ({"expert_parallel_degree": 2, "collectives": {"backward_prefetch": 3}}, 3),
    ],
)
def test_backward_gathers_a_layer_ahead_which_is_two_units(
    knobs: dict[str, Any], ahead: int
) -> None:
    config = plan_of(OwnModel(), **knobs).knobs
    assert config.collectives.backward_prefetch == ahead
    asked = "collectives" in knobs or ahead == 1
    assert asked or "a layer is two units" in config.why(
        "collectives.backward_prefetch"
    )


def test_a_model_without_experts_is_one_for_auto_and_refused_otherwise() -> None:
    plain = nn.Sequential(nn.Linear(4, 4))
    assert (
        plan_of(plain, expert_parallel_degree="auto").knobs.expert_parallel_degree == 1
    )
    with pytest.raises(
        ValueError,
        match=r"expert_parallel_degree='node': Sequential has no experts .*ExpertSite",
    ):
        plan_of(plain, expert_parallel_degree="node")


def test_experts_across_nodes_are_said() -> None:
    plan = plan_of(OwnModel(), per_node=2, expert_parallel_degree=4)
    assert any(
        "expert_parallel_degree=4 is more than the 2 ranks of a node" in line
        for line in plan.warnings
    )


@pytest.mark.parametrize(
    ("model", "knobs", "message"),
    [
        (
            OwnModel,
            {"expert_parallel_degree": 3},
            r"shard_degree=8 and the 4 experts of a layer; allowed: 1, 2, 4",
        ),
        (OwnModel, {"expert_parallel_degree": 8}, "allowed: 1, 2, 4"),
        (
            OwnModel,
            {"expert_parallel_degree": 4, "shard_degree": 2},
            "shard_degree=2.*allowed: 1, 2$",
        ),
        (
            OwnModel,
            {"expert_parallel_degree": "nodes"},
            "an integer of at least 1, 'node', 'auto'",
        ),
        (Dbrx, {}, "DbrxExperts is not of one tensor.*write expert_parallel_degree=1"),
        (
            Normed,
            {},
            r"norm.weight \(16,\) of OwnExperts does not have one row for each",
        ),
        (Tied, {}, "shares parameters with another|shared with another"),
        (OwnModel, {"units": {"optional": ["*.experts"]}}, "is in units.optional"),
        (
            Odd,
            {"expert_parallel_degree": 4},
            "2 ranks of shard_degree hold the same experts and divide no dimension",
        ),
        (
            OwnModel,
            {"compile": {"fullgraph": True}},
            "write compile={'fullgraph': false}",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(
    model: Any, knobs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(model(), **{"expert_parallel_degree": 2, **knobs})


@pytest.mark.parametrize(
    ("knobs", "merged", "message"),
    [
        (
            {"tensor_parallel_degree": 2, "shard_degree": 4},
            False,
            "not built together with tensor_parallel_degree",
        ),
        ({"fp8": True}, False, "not built together with fp8"),
        ({}, True, r"are merged into its weights \(call unmerge_adapter\(\) first\)"),
    ],
)
def test_adapters_of_experts_are_refused_with_what_to_write(
    knobs: dict[str, Any], merged: bool, message: str
) -> None:
    pytest.importorskip("peft")
    model: Any = adapted(["q_proj"], ["mlp.experts.down_proj"])
    assert plan_of(model, expert_parallel_degree=2).knobs.expert_parallel_degree == 2
    if merged:
        model.merge_adapter()
    with pytest.raises(
        ValueError,
        match=f"adapters of MixtralExperts .*{message}.*write expert_parallel_degree=1",
    ):
        plan_of(model, **{"expert_parallel_degree": 2, **knobs})


def in_grouped_products() -> str:
    model: Any = build("Mixtral")
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(ValueError) as error:
        parallelize(
            model, SmpConfig(shard_degree=2, expert_parallel_degree=2), device="cpu"
        )
    return str(error.value)


@needs_experts_choice
def test_grouped_products_of_float64_are_refused_with_what_to_call() -> None:
    for said in run_ranks(in_grouped_products, 2, timeout=120):
        assert "layers.0.mlp.experts is of float64" in said
        assert "call model.set_experts_implementation('eager')" in said


def test_experts_without_parameters_of_their_own_are_refused() -> None:
    model = OwnModel()
    nn.utils.parametrize.register_parametrization(
        model.blocks[0].experts, "matrices", nn.Identity()
    )
    assert isinstance(model.blocks[0].experts, OwnExperts)
    with pytest.raises(ValueError, match="no parameters of its own"):
        plan_of(model, expert_parallel_degree=2)

"""Tokens that DeepEP carries: with a stand-in of its interface. Nothing here has run
with the package itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smp_core.config import SmpConfig
from smp_core.engine.decide import decide
from smp_core.plan import Cluster, Plan, Shapes
from smp_core.topology import Topology
from tests.core.expert_parallel import deep_ep_stand_in as stand_in
from tests.core.expert_parallel.cases import (
    CHOICES,
    HIDDEN,
    WIDE,
    Case,
    bytes_of,
    problems,
    sent,
)
from tests.core.expert_parallel.models import EXPERTS, OwnModel
from tests.harness import run_ranks

DEEP_EP, AGAIN = (
    ("collectives", {"expert_transport": "deep_ep"}),
    ("activations", "full"),
)
LAYERS = 2


def trained(cases: list[Case]) -> tuple[list[list[str]], bool]:
    with stand_in.installed() as buffer:
        return problems(cases), bool(buffer.calls)


def test_tokens_that_deep_ep_carries_train_like_one_process() -> None:
    """1e-12: sums in another order, of losses of about 4 and gradients of up to 0.1 in
    float64. On one node and over two; where one expert takes all, other ranks get no
    token."""
    cases = [
        Case("Mixtral", 4, 2, 2, knobs=(DEEP_EP,)),
        Case("Mixtral", 4, 4, knobs=(DEEP_EP, AGAIN)),
    ]
    few = [
        Case("one expert takes all", 4, 4, knobs=(DEEP_EP,)),
        Case("frozen words", 4, 2, knobs=(DEEP_EP,)),
    ]
    for found, was_called in run_ranks(
        trained, 4, [*cases, *few], ranks_per_node=2, timeout=900
    ):
        assert [line for lines in found for line in lines] == []
        assert was_called


def counted(case: Case) -> tuple[dict[str, Any], tuple[str, ...]]:
    with stand_in.installed() as buffer:
        return sent([case])[0], buffer.calls


def expected(
    rank: int, degree: int, choices: list[list[torch.Tensor]]
) -> dict[str, dict[str, int]]:
    """The bytes of both directions by kind and link, on nodes of two ranks: a row for
    each token and rank, with the number and the weight of each expert; and how many
    (int32)."""
    total = {kind: {"intra": 0, "inter": 0} for kind in ("dispatch", "combine")}
    first = rank // degree * degree
    row, weights = HIDDEN * WIDE, CHOICES * WIDE
    for peer in {*range(first, first + degree)} - {rank}:
        link = "intra" if peer // 2 == rank // 2 else "inter"
        for layer in range(LAYERS):
            owners = [each[layer] // (EXPERTS // degree) + first for each in choices]
            leaving, arriving = (
                int((owners[rank] == peer).any(1).sum()),
                int((owners[peer] == rank).any(1).sum()),
            )
            total["dispatch"][link] += (
                leaving * (row + weights + CHOICES * 8) + arriving * (row + weights) + 4
            )
            total["combine"][link] += (leaving + arriving) * row
    return total


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("more", [(), (AGAIN,)], ids=["kept", "again"])
def test_what_leaves_is_metered_and_recomputation_sends_nothing_again(
    degree: int, more: Any
) -> None:
    case = Case("Mixtral", 4, degree, knobs=(DEEP_EP, *more))
    for rank, (figures, calls) in enumerate(
        run_ranks(counted, 4, case, ranks_per_node=2)
    ):
        told = {kind: bytes_of(figures, kind) for kind in ("dispatch", "combine")}
        assert told == expected(rank, degree, figures["choices"])
        assert (
            list(calls)
            == ["dispatch", "combine"] * LAYERS + ["dispatch again", "combine"] * LAYERS
        )


def plan_of(device: str = "cuda", per_node: int = 4, **knobs: Any) -> Plan:
    given = {
        "shard_degree": 8,
        "expert_parallel_degree": 4,
        **dict((DEEP_EP,)),
        **knobs,
    }
    model, asked = OwnModel().bfloat16(), SmpConfig(**given)
    return decide(
        Shapes.of(model, asked), asked, Cluster(Topology.uniform(8, per_node), device)
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"device": "cpu"},
            "its kernels are for CUDA, and devices here are of type cpu",
        ),
        (
            {
                "tensor_parallel_degree": 2,
                "shard_degree": 4,
                "expert_parallel_degree": 2,
            },
            "tensor_parallel_degree=1",
        ),
        (
            {"per_node": 2},
            "no kernels for 4 expert ranks on nodes of 2; write expert_parallel_degree=2, 4 or 8",
        ),
        (
            {"param_dtype": "float32"},
            "take bfloat16, and blocks.0.experts.matrices computes in torch.float32",
        ),
    ],
)
def test_what_its_kernels_do_not_fit_is_refused_with_what_to_write(
    given: dict[str, Any], message: str
) -> None:
    with stand_in.importable():
        assert (
            plan_of(expert_parallel_degree="auto").knobs.collectives.expert_transport
            == "deep_ep"
        )
        with pytest.raises(
            ValueError,
            match=f"collectives.expert_transport='deep_ep': .*{message}.*; or leave it out",
        ):
            plan_of(**given)


@pytest.mark.parametrize(
    "more",
    [
        {"expert_parallel_degree": 1},
        {"expert_parallel_degree": "auto", "shard_degree": 1},
    ],
)
def test_without_expert_ranks_it_has_no_effect_and_that_is_said(
    more: dict[str, Any],
) -> None:
    plan = plan_of(**more)
    assert plan.knobs.collectives.expert_transport == "all_to_all"
    assert any(
        "expert_transport='deep_ep' has no effect: expert_parallel_degree=1" in line
        for line in plan.warnings
    )


class Another(stand_in.Buffer):
    def combine(self, x: torch.Tensor, handle: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


def test_no_package_or_another_is_refused_with_what_to_install() -> None:
    with pytest.raises(
        ValueError,
        match=r"deep_ep cannot be imported .*install .*deepseek-ai/DeepEP at v1.2.1; or",
    ):
        plan_of()
    with (
        stand_in.importable(Another),
        pytest.raises(ValueError, match=r"another Buffer.combine than release 1.2.1"),
    ):
        plan_of()


def refused() -> str:
    with stand_in.installed(torch.bfloat16), pytest.raises(ValueError) as error:
        problems([Case("Mixtral", 2, 2, knobs=(DEEP_EP,))])
    return str(error.value)


def test_rows_that_its_kernels_do_not_take_are_refused_in_the_first_forward() -> None:
    for said in run_ranks(refused, 2, timeout=120):
        assert (
            "kernels take bfloat16 with a multiple of 16 features up to 8176, and experts get torch.float64"
            in said
        )

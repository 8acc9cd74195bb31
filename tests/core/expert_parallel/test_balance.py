"""Routers learn from all ranks' tokens: auxiliary losses and biases of one process, to
1e-12 in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from smp_core.comm import CommMeter
from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.expert_parallel import Sums, auxiliary_loss
from smp_core.topology import Topology
from tests.core.expert_parallel.cases import (
    BIAS,
    RATE,
    Case,
    assert_like_one_process,
    with_biases,
)
from tests.core.expert_parallel.models import EXPERTS, written_out
from tests.core.tensor_parallel.model_cases import (
    alone,
    build,
    differences,
    together,
)
from tests.harness import run_ranks

CONTEXT = (("context_parallel_degree", 2),)
BALANCED = [
    Case("balanced", 2, 1, micro_batches=2),
    Case("balanced", 4, 2, knobs=CONTEXT),
]
MORE_BALANCED = [Case("balanced", shard, 2, micro_batches=3) for shard in (4, 2)]


@pytest.mark.parametrize(
    "cases",
    [BALANCED, pytest.param(MORE_BALANCED, marks=pytest.mark.slow)],
    ids=["some", "more"],
)
def test_auxiliary_losses_are_those_of_one_process(cases: list[Case]) -> None:
    """1e-12: sums in another order, in float64. Of all ranks, also where experts are
    gathered."""
    assert_like_one_process(cases)


def with_transformers_own() -> list[list[str]]:
    """What is further off than 1e-6 from Transformers' own function, and than 1e-3 with
    each rank's own loss."""
    expected = alone("balanced in float32", 1)
    found = [differences(together(Case("balanced in float32", 2, 2)), expected, 1e-6)]  # type: ignore[arg-type]
    own = Case("balanced in float32", 2, 2, knobs=(("router_balance", "rank"),))
    return [*found, differences(together(own), expected, 1e-3)]  # type: ignore[arg-type]


@pytest.mark.slow
def test_ranks_own_losses_are_others() -> None:
    """1e-6: Transformers counts and adds up in float32."""
    for found, own in run_ranks(with_transformers_own, 4, ranks_per_node=2):
        assert found == []
        assert any(".gate.weight" in line for line in own)


def masked() -> tuple[float, torch.Tensor, bytes]:
    """The mean over ranks of a loss with padding, unevenly much on each, its gradient,
    and what was sent."""
    meter = CommMeter(Topology.uniform(4, 2), dist.get_rank(), "cpu")
    logits, mask = case_of(dist.get_rank())
    loss = auxiliary_loss(list(logits), EXPERTS, 2, mask, Sums(dist.group.WORLD, meter))
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    meter.close_step()
    return float(mean / 4), logits.grad / 4, meter.per_step()  # type: ignore[return-value]


def case_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    logits = torch.randn(
        3, 10, EXPERTS, dtype=torch.float64, generator=generator, requires_grad=True
    )
    return logits, torch.arange(10).view(2, 5) <= 2 * rank


def test_padding_counts_nowhere() -> None:
    """1e-12: sums in another order. Rank 0 has one token, rank 3 seven."""
    logits, masks = zip(*map(case_of, range(4)), strict=True)
    expected = written_out(torch.cat(logits, 1), EXPERTS, 2, torch.cat(masks))
    expected.backward()
    for rank, (loss, gradient, sent) in enumerate(
        run_ranks(masked, 4, ranks_per_node=2)
    ):
        assert loss == pytest.approx(float(expected.detach()), abs=1e-12)
        assert (gradient - logits[rank].grad).abs().max() < 1e-12
        assert (
            sum(
                value
                for name, value in sent.items()
                if name.startswith("router_all_reduce")
            )
            > 0
        )


def biased(cases: list[Case]) -> list[list[str]]:
    found = []
    for case in cases:
        seen = together(case)  # type: ignore[arg-type]
        expected = with_biases(case.micro_batches, case.steps)
        assert seen.weights.keys() == expected.keys()
        biases = [value for name, value in expected.items() if name.endswith(BIAS)]
        assert biases and all(value.abs().max() > 0 for value in biases)
        worst = {
            name: (value - expected[name]).abs().max()
            for name, value in seen.weights.items()
        }
        found.append(
            [
                f"{case}: {name} is {value:.3g} off"
                for name, value in worst.items()
                if not value <= 1e-12
            ]
        )
    return found


RATED = ("router_bias_update_rate", RATE)
RECOMPUTED = Case(
    "DeepseekV3", 4, 1, micro_batches=2, knobs=(RATED, ("activations", "full")), steps=3
)


@pytest.mark.parametrize(
    "case",
    [
        RECOMPUTED,
        pytest.param(
            Case("DeepseekV3", 2, 2, knobs=(RATED,), steps=3), marks=pytest.mark.slow
        ),
    ],
    ids=["gathered, recomputed", "dealt out"],
)
def test_biases_move_by_the_choices_of_all_ranks(case: Case) -> None:
    """1e-12: sums in another order. Recomputation sends tokens through routers
    twice."""
    for found in run_ranks(biased, 4, [case], ranks_per_node=2, timeout=600):
        assert [line for lines in found for line in lines] == []


def refusals() -> list[str]:
    """What is refused of models, and which lines are said of one."""
    told = []
    for kind, knobs in [
        ("own experts", {"router_balance": "global"}),
        ("Mixtral", {"router_bias_update_rate": RATE}),
    ]:
        with pytest.raises(ValueError) as error:
            Case(kind, 2, 1, knobs=tuple(knobs.items())).parallel()
        told.append(str(error.value))
    half: Any = build("DeepseekV3")
    for gate in [module for module in half.modules() if hasattr(module, BIAS)]:
        gate.register_buffer(BIAS, getattr(gate, BIAS).bfloat16())
    with pytest.raises(ValueError) as error:
        parallelize(half, SmpConfig(shard_degree=2, router_bias_update_rate=RATE))
    told.append(str(error.value))
    model = Case(
        "DeepseekV3", 2, 1, knobs=(("router_bias_update_rate", RATE),)
    ).parallel()
    return [
        *told,
        model.describe(),
        Case("balanced", 2, 1).parallel().describe(),
        Case("Mixtral", 2, 1).parallel().describe(),
    ]


def test_what_has_no_effect_is_refused_and_what_has_is_said() -> None:
    no_loss, no_bias, half, biases, losses, neither = run_ranks(refusals, 2)[0]
    assert (
        "router_balance='global': OwnModel holds no Transformers model whose auxiliary loss"
        in no_loss
    )
    assert (
        f"router_bias_update_rate={RATE}: no router of MixtralForCausalLM has a bias"
        in no_bias
    )
    assert (
        f"router_bias_update_rate={RATE}: " in half
        and f"{BIAS} is torch.bfloat16, in which small steps are lost" in half
    )
    assert f"biases of 1 routers move by {RATE} in a step" in biases
    assert "auxiliary losses of routers over all ranks' tokens" in losses
    assert "router" not in neither

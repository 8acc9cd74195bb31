"""Experts with a capacity take the same tokens at every layout, those that one process
would choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from smp_core.engine.parallel_model import ParallelModel
from smp_core.observe.router_loads import RouterLoads
from tests.core.expert_parallel import deep_ep_stand_in as stand_in
from tests.core.expert_parallel.cases import Case, plan_of
from tests.core.expert_parallel.models import EXPERTS
from tests.core.expert_parallel.staged import in_micro_batches
from tests.core.pipeline.cases import Case as Staged, together as together_on_stages
from tests.core.tensor_parallel.model_cases import (
    alone,
    batches,
    build,
    differences,
    loss_of,
    together,
)
from tests.core.tensor_parallel.models import MODELS
from tests.harness import run_ranks

FACTOR = 0.75


def limited(kind: str, dropped: list[int]) -> nn.Module:
    """A model of one process whose experts leave out what is beyond their capacity;
    ``dropped`` gets how many."""
    model = MODELS[kind]()
    for module in model.modules():
        if hasattr(module, "num_experts") and any(
            True for _ in module.parameters(recurse=False)
        ):
            module.register_forward_pre_hook(
                lambda _, args: without_the_rest(args, dropped)
            )
    return model


def without_the_rest(
    args: tuple[torch.Tensor, ...], dropped: list[int]
) -> tuple[torch.Tensor, ...] | None:
    if len(args) != 3:  # a router
        return None
    hidden, chosen, weights = args
    capacity = math.ceil(FACTOR * chosen.numel() / EXPERTS)
    taken = torch.zeros_like(chosen, dtype=torch.bool)
    for expert in range(EXPERTS):
        wanted = weights.detach().float().where(chosen == expert, -1.0)
        last = wanted.flatten().sort(descending=True).values[capacity - 1]
        taken |= (chosen == expert) & (wanted >= last)
    dropped.append(int((~taken).sum()))
    return hidden, chosen, weights * taken


def capacity_problems(cases: Sequence[Case]) -> list[list[str]]:
    """What is further off than 1e-12 from one process, by case; run by each rank."""
    found = []
    for case in cases:
        MODELS["limited"] = lambda kind=case.kind: limited(kind, [])  # type: ignore[misc]
        alone.cache_clear()
        expected = alone("limited", case.micro_batches, case.steps)
        with stand_in.installed():
            found.append(differences(together(case), expected))  # type: ignore[arg-type]
    return found


def full_case(kind: str, shard: int, expert: int, **knobs: Any) -> Case:
    return Case(
        kind,
        shard,
        expert,
        micro_batches=2,
        knobs=(("expert_capacity_factor", FACTOR), *knobs.items()),
    )


FEW = [
    full_case("own experts", 4, 4),
    full_case("Mixtral", 4, 2, collectives={"expert_transport": "deep_ep"}),
]
MORE = [
    full_case("Mixtral", 2, 1),
    full_case("Mixtral", 4, 2, activations="full"),
    *(
        full_case("DeepseekV3", shard, expert)
        for shard, expert in ((2, 1), (4, 2), (4, 4))
    ),
    *(full_case("GptOss", shard, expert) for shard, expert in ((2, 1), (4, 2), (4, 4))),
    full_case("Mixtral", 4, 2, context_parallel_degree=2),
    full_case("Mixtral", 4, 1, activations="full"),
    full_case("Mixtral", 4, 4, collectives={"hierarchical": False}),
    full_case("Mixtral", 2, 2, optimizer_shard="world"),
]


@pytest.mark.parametrize(
    "cases", [FEW, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_full_experts_leave_out_what_one_process_would(cases: list[Case]) -> None:
    """1e-12: sums in another order, in float64."""
    for found in run_ranks(capacity_problems, 4, cases, ranks_per_node=2, timeout=600):
        assert found == [[] for _ in cases]


def staged_problems(case: Staged) -> list[str]:
    """The same of pipeline stages, whose micro-batches are those of all ranks
    together."""
    MODELS["limited"] = lambda: limited(case.kind, [])
    return differences(
        together_on_stages(case), in_micro_batches(replace(case, kind="limited"), 2)
    )


@pytest.mark.slow
def test_full_experts_on_stages_leave_out_what_one_process_would() -> None:
    """1e-12, as above."""
    knobs = (("expert_parallel_degree", 2), ("expert_capacity_factor", FACTOR))
    case = Staged("Qwen3Moe", shard=2, micro_batches=2, knobs=knobs)
    assert (
        run_ranks(staged_problems, 4, case, ranks_per_node=4, timeout=600) == [[]] * 4
    )


def ragged() -> tuple[dict[str, float], float]:
    """The monitor's figures after a step in which ranks have different numbers of
    tokens, with the share of bytes that is still sent; and the share of choices that
    one process leaves out."""
    (tokens,) = batches(1, 1)[0]
    parallel = full_case("Mixtral", 2, 2).parallel()
    loads = RouterLoads((parallel.module,), False, torch.device("cpu"))
    mine = tokens[:1] if dist.get_rank() == 0 else tokens[1:]
    loss_of(parallel.module, mine).backward()

    def over_ranks(own: list[float], _: str) -> list[float]:
        total = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    seen = loads.report(over_ranks)
    sent = dispatched(parallel)
    whole = Case("Mixtral", 2, 2).parallel()
    loss_of(whole.module, mine).backward()
    seen["share of bytes"] = sent / dispatched(whole)
    dropped: list[int] = []
    MODELS["limited"] = lambda: limited("Mixtral", dropped)
    loss_of(build("limited"), tokens)
    return seen, sum(dropped) / (len(dropped) * tokens.numel() * 2)


def dispatched(parallel: ParallelModel) -> float:
    """Bytes that this rank sent to experts."""
    parallel.meter.close_step()
    figures = parallel.meter.per_step()
    return sum(
        value
        for name, value in figures.items()
        if name.startswith("expert_dispatch") and "bytes" in name
    )


def test_the_monitor_says_what_was_left_out() -> None:
    for seen, expected in run_ranks(ragged, 2, ranks_per_node=2):
        assert seen["dropped_choices"] == pytest.approx(expected, rel=1e-12)
        assert 0 < expected < 1 and 0 < seen["share of bytes"] < 1


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"expert_capacity_factor=1.5: Linear has no experts that torch-smp knows",
    ):
        plan_of(nn.Linear(8, 8), expert_capacity_factor=1.5)

"""Branches that only some ranks take in some micro-batches train to one process's
numbers as `units.optional`.

Compared to 1e-12 in float64: a few hundred rounding errors of sums in another order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.plan.units import plan_units
from tests.core.branching import WAYS, Branching, batch_of, loss_of
from tests.core.equivalence import full_weights
from tests.core.pictured import small_llava
from tests.harness import run_ranks

OPTIONAL = {
    "units": {"modules": ["Block"], "optional": ["left", "right.*"]},
    "shard_degree": 2,
}
STEPS = 3


def way_of(step: int, micro: int, rank: int) -> str:
    return WAYS[(3 * step + micro) % len(WAYS)].split(" ")[rank]


def alone(micro_batches: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Branching()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for micro in range(micro_batches):
            for rank in range(2):
                (
                    loss_of(
                        model, batch_of(rank, step, micro), way_of(step, micro, rank)
                    )
                    / 2
                ).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def together(micro_batches: int, knobs: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    parallel = parallelize(Branching(), SmpConfig(**{**OPTIONAL, **knobs}))
    optimizer = torch.optim.AdamW(parallel.module.parameters(), lr=0.1)
    parallel.prepare_optimizer(optimizer)
    for step in range(STEPS):
        for micro in range(micro_batches):
            with parallel.window.accumulate(micro < micro_batches - 1):
                rank = dist.get_rank()
                loss_of(
                    parallel.module,
                    batch_of(rank, step, micro),
                    way_of(step, micro, rank),
                ).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(parallel.module)


def several(cases: list[tuple[int, dict[str, Any]]]) -> list[dict[str, torch.Tensor]]:
    return [together(micro_batches, knobs) for micro_batches, knobs in cases]


def test_ranks_may_leave_optional_units_out() -> None:
    cases: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (3, {"activations": "full"}),
        (3, {"keep_between_micro_batches": "gradients"}),
        (1, {"activations": "full"}),
    ]
    for results in run_ranks(several, 2, cases):
        for (micro_batches, _), weights in zip(cases, results, strict=True):
            for name, expected in alone(micro_batches).items():
                assert torch.allclose(weights[name], expected, rtol=0, atol=1e-12), name


def test_optional_modules_belong_to_the_unit_around_them() -> None:
    units = {
        unit.name: unit.parameters
        for unit in plan_units(Branching(), SmpConfig(**OPTIONAL)).units
    }
    assert units.keys() == {""} and len(units[""]) == 10
    some = plan_units(
        Branching(),
        SmpConfig(
            units={"modules": ["Block"], "optional": ["left.0", "right.1.linear"]}
        ),
    )
    units = {unit.name: unit.parameters for unit in some.units}
    assert units.keys() == {"", "left.1", "right.0", "right.1"}
    assert {"left.0.linear.weight", "left.0.linear.bias"} < set(units[""])
    assert units["right.1"] == ("right.1.linear.weight", "right.1.linear.bias")
    by_size = SmpConfig(units={"min_parameters": 1, "optional": ["Block"]})
    assert [unit.name for unit in plan_units(Branching(), by_size).units] == [
        "head",
        "",
    ]


def test_of_another_dtype_they_are_replicated() -> None:
    model = Branching()
    model.left.float()
    plan = plan_units(model, SmpConfig(**OPTIONAL))
    assert [unit.name for unit in plan.units] == [""]
    assert set(plan.replicated) == {
        name for name, _ in model.named_parameters() if name.startswith("left.")
    }


def test_a_pattern_without_a_module_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"units\.optional='visual' matches no class name and no module name of Branch",
    ):
        plan_units(Branching(), SmpConfig(units={"optional": ["visual"]}))


def test_auto_finds_towers_and_refuses_models_without() -> None:
    auto = SmpConfig(units={"optional": "auto"})
    plan = plan_units(small_llava(), auto)
    assert plan.optional == ("model.vision_tower",)
    assert [unit.name for unit in plan.units] == [
        "model.language_model.layers.1",
        "model.language_model.layers.0",
        "",
    ]
    wrapped = nn.ModuleDict({"net": small_llava()})
    assert plan_units(wrapped, auto, entry="steps").optional == (
        "net.model.vision_tower",
    )
    for model in (
        Branching(),
        small_llava().model.vision_tower,
        small_llava().model.language_model,
    ):
        with pytest.raises(
            ValueError,
            match=r"units\.optional='auto' finds nothing in .* Name what ranks leave out",
        ):
            plan_units(model, auto)

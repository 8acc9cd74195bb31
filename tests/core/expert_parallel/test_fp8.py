"""Experts in FP8 on several ranks: the same digits as where each rank has all of
them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.core.expert_parallel.cases import Case
from tests.core.tensor_parallel.model_cases import Training, differences, together
from tests.harness import run_ranks

STEPS = 4  # the scale of a weight is another one in the last


def trained(cases: Sequence[Case]) -> tuple[list[Training], list[str]]:
    """The trainings, and the weights in FP8 of the first."""
    seen = [together(case) for case in cases]  # type: ignore[arg-type]
    fp8 = cases[0].parallel().fp8
    assert fp8 is not None
    return seen, list(fp8.state.names)


def problems(
    kind: str, layouts: Sequence[tuple[int, int]], *knobs: tuple[str, object]
) -> list[str]:
    """What is further off than 1e-12 from FP8 in one process."""
    every = (("fp8", True), *knobs)
    alone, names = run_ranks(trained, 1, [Case(kind, 1, 1, knobs=every, steps=STEPS)])[
        0
    ]
    assert any(name.endswith("experts.down_proj") for name in names)
    cases = [
        Case(kind, shard, expert, knobs=every, steps=STEPS) for shard, expert in layouts
    ]
    found = []
    for seen, split in run_ranks(trained, 4, cases, ranks_per_node=2, timeout=600):
        assert split == names
        for case, training in zip(cases, seen, strict=True):
            found += [f"{case}: {line}" for line in differences(training, alone[0])]
    return found


def test_experts_in_fp8_train_like_one_process() -> None:
    """1e-12: sums in another order, of float64. Casts are those of one process: scales
    are of all ranks."""
    assert problems("Qwen3Moe", [(4, 2)]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs", [(), (("activations", "full"),), (("optimizer_shard", "world"),)]
)
@pytest.mark.parametrize("kind", ["Qwen3Moe", "Glm4Moe"])
def test_more_experts_in_fp8_train_like_one_process(
    kind: str, knobs: tuple[tuple[str, object], ...]
) -> None:
    """1e-12, as above; with 4 x 4 tokens take two hops."""
    assert problems(kind, [(4, 2), (2, 2), (4, 4)], *knobs) == []

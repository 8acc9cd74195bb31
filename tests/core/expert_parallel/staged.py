"""Trainings through pipeline stages whose ranks divide experts, beside those of one process."""

from __future__ import annotations

from tests.core.expert_parallel import models as models  # makes its models known
from tests.core.pipeline.cases import Case, together
from tests.core.tensor_parallel.model_cases import alone, differences
from tests.harness import run_ranks


def problems(cases: list[Case]) -> list[list[str]]:
    """What is further off than 1e-12 from one process, by case; run by each rank."""
    found = []
    for case in cases:
        lines = differences(together(case), alone(case.kind, case.windows))
        found.append([f"{case}: {line}" for line in lines])
    return found


def assert_like_one_process(cases: list[Case], world: int = 4) -> None:
    for found in run_ranks(problems, world, cases, ranks_per_node=4, timeout=900):
        assert [line for lines in found for line in lines] == []

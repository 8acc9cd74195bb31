"""Training through pipeline stages equals one process: losses, norms, clipped gradients and weights of five AdamW steps
in float64, to 1e-12: a few hundred rounding errors of sums in another order."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.pipeline.cases import Case, several
from tests.core.tensor_parallel.model_cases import Training, alone, differences
from tests.harness import run_ranks

TWO_RANKS = [
    Case("gpt2", micro_batches=4),
    Case("gpt2", schedule="gpipe", windows=2),
    Case("llama", windows=2),
    Case("plain", micro_batches=4, knobs=(("reshard_after_forward", False),)),
]
FOUR_RANKS = [
    Case("gpt2", shard=2, windows=2),
    Case("llama", shard=1, micro_batches=4),  # two replicas
    Case("llama_tied", shard=2, micro_batches=4),
]


def expected(case: Case) -> Training:
    whole = alone(case.kind, case.windows)
    # Tied names are one parameter on ranks.
    names = {name.partition(" ")[2] for name in whole.gradients}
    return Training(whole.losses, whole.norms, whole.gradients, {n: w for n, w in whole.weights.items() if n in names})


def assert_equal(cases: list[Case], ranks: int) -> None:
    for trainings in run_ranks(several, ranks, cases, ranks_per_node=2):
        for case, seen in zip(cases, trainings, strict=True):
            found = differences(seen, expected(case))
            assert not found, f"{case}: {found[:5]}"


def test_two_stages() -> None:
    assert_equal(TWO_RANKS, 2)


def test_stages_of_partition_groups_and_of_replicas() -> None:
    assert_equal(FOUR_RANKS, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["opt", "bert", "gemma2", "mistral", "phi3", "olmo2", "gpt_neox", "starcoder2", "glm"])
def test_other_architectures(kind: str) -> None:
    # BERT names its embeddings as a block, too, and a unit of their own would be tied to the head's.
    knobs: Any = (("units", ["BertLayer"]),) if kind == "bert" else ()
    assert_equal([Case(kind, knobs=knobs), Case(kind, micro_batches=4, schedule="gpipe", knobs=knobs)], 2)

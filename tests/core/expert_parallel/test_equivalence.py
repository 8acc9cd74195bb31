"""Experts on several ranks train as one process does: losses, gradients, norms and
weights in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch._dynamo.utils import counters  # the compiler's only count of its graphs

from tests.core.expert_parallel.cases import Case, assert_like_one_process, problems
from tests.core.expert_parallel.models import FAMILIES, FEW, OWN
from tests.harness import run_ranks

LAYOUTS = (
    {"shard": 4, "expert": 2},
    {"shard": 2, "expert": 2},
    {"shard": 4, "expert": 4},
)


def each_on_a_layout(kinds: Sequence[str]) -> list[Case]:
    layouts = [LAYOUTS[n % len(LAYOUTS)] for n in range(len(kinds))]
    return [Case(kind, **layout) for kind, layout in zip(kinds, layouts, strict=True)]


def test_experts_on_several_ranks_train_like_one_process() -> None:
    """1e-12: sums in another order, of losses of about 4 and gradients of up to 0.1 in
    float64. With "frozen words" nothing that experts get has a gradient."""
    assert_like_one_process(
        [Case("GptOss", **LAYOUTS[1]), Case("frozen words", **LAYOUTS[0])]
    )


@pytest.mark.slow
def test_ten_families_and_ones_own_train_like_one_process() -> None:
    """1e-12, as above; two of them through five steps."""
    assert_like_one_process(
        [*each_on_a_layout((*FAMILIES, *OWN)), Case("Qwen3Moe", **LAYOUTS[0])]
    )
    on_all = [
        Case(kind, **layout, steps=5)
        for kind in ("Mixtral", "Qwen3Moe")
        for layout in LAYOUTS
    ]
    assert_like_one_process(on_all)


MATRIX = [
    (),
    (("keep_between_micro_batches", "parameters"),),
    (("activations", "full"),),
    (("optimizer_shard", "world"),),
    (("state_offload", "optimizer"),),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_trains_like_one_process_on_all_layouts(kind: str) -> None:
    """1e-12, as above, also through five steps; and where a rank gets no token, and one
    expert all."""
    cases = [Case(kind, **layout, steps=5) for layout in LAYOUTS]
    for layout, count, knobs in itertools.product(LAYOUTS, (1, 3), MATRIX):
        cases.append(Case(kind, **layout, micro_batches=count, knobs=knobs))
    skewed = [
        Case(f"{kind}, to {few}", **layout)
        for few, layout in itertools.product(FEW, LAYOUTS)
    ]
    assert_like_one_process([*cases, *skewed])


KNOBS = [
    (("optimizer_shard", "world"),),
    (("optimizer_shard", "world"), ("state_offload", "optimizer")),
    (("state_offload", "all"),),
    (("activations", "full"),),
    (("activations", "selective"),),
    (("keep_between_micro_batches", "gradients"),),
    (("keep_between_micro_batches", "parameters"),),
    (("reshard_after_forward", 2),),
    (("context_parallel_degree", 2),),
    (("compression", {"gather": "int8", "gather_exclude": ["*"]}),),
]


@pytest.mark.slow
@pytest.mark.parametrize("every", [5, 1], ids=["some", "all"])
def test_experts_train_like_one_process_beside_other_knobs(every: int) -> None:
    """1e-12, as above."""
    cases = []
    for number, knobs in enumerate(KNOBS[::every]):
        layout = LAYOUTS[number % 2]
        if "reshard_after_forward" in dict(knobs) or "context_parallel_degree" in dict(
            knobs
        ):
            layout = LAYOUTS[0]
        cases.append(Case("Mixtral", **layout, knobs=knobs, micro_batches=3))
    assert_like_one_process(cases)


@pytest.mark.parametrize(
    "layouts", [LAYOUTS[:1], pytest.param(LAYOUTS[1:], marks=pytest.mark.slow)], ids=len
)
def test_experts_are_drawn_shard_by_shard_as_in_one_process(
    layouts: Sequence[dict[str, int]],
) -> None:
    """1e-12, as above."""
    delayed = (("delayed_init", True),)
    assert_like_one_process(
        [Case("Mixtral", **layout, knobs=delayed) for layout in layouts]
    )


COMPILED = (("compile", {"backend": "aot_eager"}),)


def compiled(cases: list[Case]) -> list[tuple[list[str], int]]:
    """What is further off than 1e-12 from one process, and how many graphs the compiler
    made; by case."""
    found = []
    for case in cases:
        torch.compiler.reset()
        counters.clear()
        (lines,) = problems([case])
        found.append((lines, counters["stats"]["unique_graphs"]))
    return found


def assert_compiled_like_one_process(cases: list[Case]) -> None:
    for trained in run_ranks(compiled, 4, cases, ranks_per_node=4, timeout=900):
        for lines, graphs in trained:
            assert lines == []
            assert graphs > 0


@pytest.mark.slow
def test_compiled_blocks_with_experts_train_like_one_process() -> None:
    """1e-12, as above. Tokens are sent between graphs."""
    assert_compiled_like_one_process(
        [Case("one expert takes all", 4, 2, knobs=COMPILED)]
    )


@pytest.mark.slow
def test_more_compiled_blocks_with_experts_train_like_one_process() -> None:
    """1e-12, as above."""
    kinds = ("Mixtral", "Qwen3Moe", "DeepseekV3")
    assert_compiled_like_one_process(
        [Case(kind, 4, 2, micro_batches=2, knobs=COMPILED) for kind in kinds]
    )
    tensor = (*COMPILED, ("tensor_parallel_degree", 2))
    assert_compiled_like_one_process([Case("Mixtral", 2, 2, knobs=tensor)])


@pytest.mark.parametrize(
    "more", [(), pytest.param((("activations", "full"),), marks=pytest.mark.slow)]
)
def test_adapters_of_attention_train_like_one_process(
    more: tuple[tuple[str, str], ...],
) -> None:
    """1e-12, as above; experts on several ranks are frozen."""
    pytest.importorskip("peft")
    assert_like_one_process([Case("adapted", 4, 2, knobs=more)])


ADAPTERS = [Case("adapted experts only", **LAYOUTS[1], micro_batches=3)]
MORE_ADAPTERS = [
    Case("adapted experts", **LAYOUTS[0]),
    Case("adapted, one expert takes all", **LAYOUTS[2]),
]


@pytest.mark.parametrize(
    "cases", [ADAPTERS, pytest.param(MORE_ADAPTERS, marks=pytest.mark.slow)], ids=len
)
def test_adapters_of_experts_train_like_one_process(cases: list[Case]) -> None:
    """1e-12, as above. Adapters are of all experts, and a rank takes the part of its
    own."""
    pytest.importorskip("peft")
    assert_like_one_process(cases)


def left_with_their_layers() -> tuple[list[list[str]], list[str], str]:
    """What is further off than 1e-12 from one process, the units of experts, and why
    there are none."""
    case = Case("adapted experts", 2, "auto")
    parallel = case.parallel()
    units = [unit.name for unit in parallel.units if "experts" in unit.name]
    return problems([case]), units, parallel.config.why("expert_parallel_degree")


def test_experts_that_auto_leaves_with_their_layers_are_no_units() -> None:
    """1e-12, as above. On nodes of one rank; adapters of experts cannot be told from
    outside of a unit of theirs."""
    pytest.importorskip("peft")
    for found, units, why in run_ranks(left_with_their_layers, 2, ranks_per_node=1):
        assert (found, units) == ([[]], [])
        assert "the most that divide" in why


@pytest.mark.slow
def test_adapters_of_experts_train_like_one_process_beside_other_knobs() -> None:
    """1e-12, as above; also in one hop, where tokens go between nodes."""
    pytest.importorskip("peft")
    more = (*KNOBS, COMPILED, (("collectives", {"hierarchical": False}),))
    assert_like_one_process(
        [
            Case("adapted experts", **LAYOUTS[2 * (n % 2)], knobs=more[n])
            for n in range(len(more))
        ]
    )


def test_two_hops_are_exact() -> None:
    """1e-12, as above. Expert ranks on two nodes of two. With "one expert takes all"
    every other rank gets no token."""
    assert_like_one_process(
        [Case(kind, 4, 4) for kind in ("Qwen3Moe", "one expert takes all")]
    )

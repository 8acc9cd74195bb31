"""Any tensor degree trains like one process on the same global batch.

float64 is the proof: 1e-12 is a few hundred rounding errors of sums in another order,
and any wrong factor, missing sum or stale weight is many orders larger. Every rank
builds its model from another seed.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from smp_core.tensor_parallel import apply, blocks, layers
from tests.core.tensor_parallel.model_cases import (
    Case,
    Training,
    alone,
    assert_like_one_process,
    differences,
    together,
)
from tests.core.tensor_parallel.models import MODELS
from tests.harness import run_ranks

# Tensor 2 x shard 2; keys and values of two heads on four ranks. Others are the slow
# test's.
SAMPLE = [
    Case("llama", tensor=4, sequence=False),
    Case(
        "llama",
        shard=2,
        micro_batches=3,
        knobs=(("activations", "full"), ("reshard_after_forward", False)),
    ),
]
MORE = [
    Case("llama", shard=2, micro_batches=3),
    Case("gpt2", shard=2, micro_batches=2),
    Case(
        "qwen3",
        knobs=(
            (
                "activations",
                {"checkpoint": {"*.mlp": "full", "*.self_attn": "selective"}},
            ),
        ),
    ),
]


@pytest.mark.parametrize(
    "cases", [SAMPLE, pytest.param(MORE, marks=pytest.mark.slow)], ids=["some", "more"]
)
def test_layers_over_ranks_train_like_one_process(cases: list[Case]) -> None:
    assert_like_one_process(cases, 4)


KEPT = [
    Case(kind, shard=2, micro_batches=2, knobs=(("keep_between_micro_batches", kept),))
    for kind, kept in (("llama_tied", "parameters"), ("gpt2", "gradients"))
]


@pytest.mark.slow
def test_what_stays_unsharded_trains_like_one_process() -> None:
    assert_like_one_process(KEPT, 4)


@pytest.mark.slow  # in the normal run: Llama, in SAMPLE
def test_what_stays_unsharded_until_its_backward_trains_like_one_process() -> None:
    assert_like_one_process(
        [Case("gpt2", shard=2, knobs=(("reshard_after_forward", False),))], 4
    )


@pytest.mark.slow  # in the normal run: a tensor group over nodes
def test_partition_groups_over_nodes_gather_in_two_stages_around_tensor_groups() -> (
    None
):
    """Nodes of four ranks: two tensor groups on each, whose partition group spans both
    nodes. Between forward and backward each node keeps a copy."""
    on_node = (("reshard_after_forward", "node"),)
    assert_like_one_process(
        [Case("llama_tied", shard=4, knobs=on_node)], 8, ranks_per_node=4
    )


def test_a_tensor_group_over_nodes_trains_like_one_process() -> None:
    across = (("tensor_parallel", {"across_nodes": True}),)
    assert_like_one_process(
        [Case("llama", tensor=4, knobs=across)], 4, ranks_per_node=2
    )


def test_heads_in_groups_and_biases_of_heads_train_like_one_process() -> None:
    """Queries, keys and values side by side for each head or group of heads; what is
    added to scores, head by head."""
    assert_like_one_process([Case("falcon", sequence=False), Case("bloom")], 2)


def inferred(kind: str, tensor: int = 2, sequence: bool = True, **more: Any) -> Case:
    found = (("tensor_parallel", {"plan": "infer", "sequence_parallel": sequence}),)
    return Case(kind, tensor, knobs=found, **more)


INSPECTED = [inferred("encoder"), inferred("strange", sequence=False)]
MORE_INSPECTED = [inferred("strange"), inferred("gpt2")]


@pytest.mark.parametrize(
    "cases",
    [INSPECTED, pytest.param(MORE_INSPECTED, marks=pytest.mark.slow)],
    ids=["some", "more"],
)
def test_inspected_models_train_like_one_process(cases: list[Case]) -> None:
    """Modules that torch wrote, attention that knows its sizes by other names than
    ours, a Transformers model whose plan is not looked at."""
    assert_like_one_process(cases, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["plain", "encoder", "strange", "llama", "gpt2", "opt", "bert", "qwen3", "t5"],
)
def test_inspected_models_train_like_one_process_on_more_layouts(kind: str) -> None:
    layouts = itertools.product((2, 4), (True, False))
    cases = [
        inferred(kind, tensor, sequence, shard=4 // tensor, micro_batches=3)
        for tensor, sequence in layouts
    ]
    assert_like_one_process(cases, 4)


@pytest.mark.parametrize(
    "case",
    [
        Case("t5"),
        pytest.param(Case("t5_gated", sequence=False), marks=pytest.mark.slow),
    ],
    ids=lambda c: c.kind,
)
def test_an_encoder_and_a_decoder_train_like_one_process(case: Case) -> None:
    """Keys and values of other tokens than queries, position biases of heads, one
    embedding in four modules."""
    assert_like_one_process([case], 2)


@pytest.mark.slow
def test_adapters_train_like_one_process() -> None:
    """Base layers are frozen; adapters are split as they are. Biases, packed heads,
    shared heads."""
    pytest.importorskip("peft")
    assert_like_one_process([Case("llama_lora"), Case("gpt2_lora", sequence=False)], 2)


@pytest.mark.slow
def test_adapters_train_like_one_process_on_more_layouts() -> None:
    pytest.importorskip("peft")
    cases = [
        Case(kind, tensor, 4 // tensor, sequence, 3)
        for kind in ("llama_lora", "gpt2_lora")
        for tensor in (2, 4)
        for sequence in (True, False)
    ]
    assert_like_one_process(cases, 4)


# (tensor, shard, replicas), and (tokens split, micro-batches, recomputation): every two
# of these together.
LAYOUTS = [(2, 1, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1), (2, 2, 2), (4, 1, 2), (4, 2, 1)]
PAIRS = [(True, 1, "none"), (True, 3, "full"), (False, 1, "full"), (False, 3, "none")]
# But for those whose blocks look at several tokens, outside of attention: pipeline
# stages train them.
KINDS = [
    kind for kind in MODELS if "_deep" not in kind and kind not in ("routing", "odd")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "kind"), list(itertools.product(LAYOUTS, KINDS)), ids=str
)
def test_every_model_at_every_degree(layout: tuple[int, int, int], kind: str) -> None:
    """Five steps of AdamW with clipping. Every pair on two ranks, one of them on each
    other layout."""
    number, (tensor, shard, replicas) = LAYOUTS.index(layout), layout
    cases = [
        Case(
            kind,
            tensor,
            shard,
            sequence,
            micro,
            (("activations", checkpoint),),
            steps=5,
        )
        for sequence, micro, checkpoint in (
            PAIRS if number == 0 else [PAIRS[number % len(PAIRS)]]
        )
    ]
    if kind == "vit" and tensor == 4:  # ten tokens of a picture
        cases = [replace(case, sequence=False) for case in cases]
    assert_like_one_process(cases, tensor * shard * replicas)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_every_product_of_choices(kind: str) -> None:
    every = itertools.product((True, False), (1, 3), ("none", "full"))
    cases = [
        Case(kind, 2, 2, split, micro, (("activations", again),), steps=5)
        for split, micro, again in every
    ]
    assert_like_one_process(cases, 8)


@pytest.mark.slow
def test_all_axes_at_once() -> None:
    """Sixteen ranks: four tensor ranks, two of a partition group, two replicas."""
    assert_like_one_process(
        [Case("llama", 4, 2, True, 3, (("activations", "full"),), steps=5)], 16
    )


def mutated(case: Case) -> tuple[Training, list[str]]:
    """The training with one sum left out, and why tokens stayed whole."""
    kept = apply._Splitting._summing, layers.RowForward.__call__, layers.exchange_rows
    changed: Any = layers
    if case.mutation == "norms":
        apply._Splitting._summing = lambda *_: iter(())  # type: ignore[method-assign,assignment,return-value]
    elif case.mutation == "bias":
        layers.RowForward.__call__ = functools.partialmethod(
            _row_with_every_bias, kept[1]
        )  # type: ignore
    else:
        changed.exchange_rows = functools.partial(_rows_of_own_gradients, kept[2])
    try:
        said: list[str] = []
        with mock.patch.object(
            blocks.logger, "warning", lambda text, *args: said.append(text % args)
        ):
            return together(case), said
    finally:
        apply._Splitting._summing, layers.RowForward.__call__, changed.exchange_rows = (
            kept  # type: ignore[method-assign]
        )


def _row_with_every_bias(self: Any, call: Any, hidden: Any) -> Any:
    if not self.tokens.split:
        return call(self, hidden)
    with layers.showing(self.module, {"weight": layers.local(self.module.weight)}):
        return layers.scatter_tokens(self.original(hidden), self.axis)


def _rows_of_own_gradients(
    exchange: Any, stored: Any, axis: Any, rows: Any, dim: int = 0
) -> Any:
    """Of the ranks that share a head only the first has a gradient of it."""
    used = exchange(stored, axis, rows, dim)
    return (
        used
        if rows.by_rank.index(rows.by_rank[axis.rank]) == axis.rank
        else used.detach() + 0 * used
    )


@pytest.mark.parametrize("mutation", ["norms", "bias"])
def test_without_a_sum_tokens_stay_whole(mutation: str) -> None:
    """Gradients of norms among split tokens; the bias of a row layer, once."""
    case = Case("llama", mutation=mutation)
    for rank, (seen, said) in enumerate(run_ranks(mutated, case.tensor, case)):
        assert differences(seen, alone(case.kind, case.micro_batches)) == []
        assert rank or "tokens stay whole in model.layers.0" in said[0]


def test_without_the_sum_of_shared_heads_it_would_not() -> None:
    """Gradients of heads that ranks share."""
    case = Case("llama", tensor=4, sequence=False, mutation="heads")
    ((seen, _), *_) = run_ranks(mutated, case.tensor, case)
    assert differences(seen, alone(case.kind, case.micro_batches), 1e-9)
